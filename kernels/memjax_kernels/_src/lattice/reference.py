"""Lattice one token at a time, in plain JAX: the definition.

Memory M [M, V], a slot s_i a row; phi(s) = s / |s|. With every gradient taken at the
memory M' of the chunk's start, r_i = |s'_i| (1 where the recurrence is normalised):

    variant   objective                    h                c
    "dec"     |phi(M)^T k - v|^2           phi(M')^T k - v  k
    "enc"     |phi(M) v - k|^2             v                phi(M') v - k
    "sim"     -<phi(M) v, k>               -v               k

    s_i <- mu s_i - (gamma c_i / r_i) (h - phi(s'_i) <phi(s'_i), h>)     (eqs. 13, 16)
    s_i <- sign(s_i) max(|s_i| + g, 0)                   forget="l1"     (eq. 18)
    read y = M^T q, of slots divided by their norm where normalised      (eq. 14)

mu = exp(g) with forget="l2", else 1; the loss's factor 2 is part of gamma. At the end
of a chunk of C tokens M' becomes M, normalised. C = 1 is the recurrence of the paper;
with C > 1 the division by the norm inside a chunk, which does not change later
gradients, is put off to the read. The written part is separate: A = sum of w h^T,
w = gamma c / r, decayed by mu:

    M = decay M' + cwp phi(M') - A      cwp_i = <phi(s'_i), a_i>

Karami, Mirrokni, Lattice (2025), https://arxiv.org/abs/2504.05646, section 3.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import one_pass
from memjax_kernels._src.lattice.checks import check_options
from memjax_kernels._src.lattice.memory import (
    LatticeForget,
    LatticeState,
    LatticeVariant,
    Rule,
)
from memjax_kernels._src.lattice.sphere import (
    directions,
    inverse_norm,
    l2_normalize,
    shrink,
)


@one_pass.on_tpu
def lattice_step(
    q: Float[Array, "B H M"],
    k: Float[Array, "B H M"],
    v: Float[Array, "B H V"],
    gamma: Float[Array, "B H"],
    g: Float[Array, "B H"] | None,
    state: LatticeState,
    *,
    variant: LatticeVariant = "dec",
    normalize: bool = True,
    forget: LatticeForget | None = None,
) -> tuple[LatticeState, Float[Array, "B H V"]]:
    """One token: writes, then reads. Arguments and errors as in `lattice`."""
    rule = Rule(variant, normalize, forget)
    check_options(rule, state.chunk_size, g)
    return advance(q, k, v, gamma, g, state, rule)


def advance(
    q: Float[Array, "B H M"],
    k: Float[Array, "B H M"],
    v: Float[Array, "B H V"],
    gamma: Float[Array, "B H"],
    g: Float[Array, "B H"] | None,
    state: LatticeState,
    rule: Rule,
) -> tuple[LatticeState, Float[Array, "B H V"]]:
    """`lattice_step` by a rule."""
    dtype = v.dtype
    q, k, v, gamma = (x.astype(jnp.float32) for x in (q, k, v, gamma))
    start, pending, decay = state.start, state.pending, state.decay
    direction, inverse = directions(start, rule)
    h, c = residual(direction, k, v, rule.variant)
    if rule.forget == "l2":
        assert g is not None
        mu = jnp.exp(g.astype(jnp.float32))
        pending, decay = mu[..., None, None] * pending, mu * decay
    else:
        decay = jnp.ones_like(gamma)
    decay_factor = decay[..., None, None]
    write = gamma[..., None] * c * inverse[..., 0]
    # Kept apart from M': its norm across the slots is needed by itself.
    pending = pending + write[..., None] * h[:, :, None]
    along = jnp.sum(direction * pending, axis=-1, keepdims=True)
    orthogonal = along * direction - pending
    memory = decay_factor * start + orthogonal
    if rule.forget == "l1":
        assert g is not None
        memory = shrink(memory, g.astype(jnp.float32)[..., None, None])
    # Normalised at the chunk's end, and in the read below by the norm alone.
    after = l2_normalize(memory) if rule.normalize else memory
    read = after
    if rule.normalize and rule.forget != "l1":
        # Writes are orthogonal to the slot: the norm by Pythagoras.
        if rule.forget == "l2":
            # It may be all that is left, and a difference of squares loses its digits.
            across = jnp.sum(orthogonal * orthogonal, axis=-1, keepdims=True)
        else:
            across = jnp.sum(pending * pending, axis=-1, keepdims=True) - along * along
        read = memory * inverse_norm(decay_factor, across)
    y = jnp.einsum("bhmv,bhm->bhv", read, q)
    # The next tokens of an open chunk take gradients at its start.
    done = state.position + 1 == state.chunk_size

    def where(x, y):
        return jnp.where(done.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    state = LatticeState(
        start=where(after, start),
        pending=where(jnp.zeros_like(pending), pending),
        decay=where(jnp.ones_like(decay), decay),
        position=where(jnp.zeros_like(state.position), state.position + 1),
        chunk_size=state.chunk_size,
    )
    return state, y.astype(dtype)


def lattice_reference(
    q: Float[Array, "B T H M"],
    k: Float[Array, "B T H M"],
    v: Float[Array, "B T H V"],
    gamma: Float[Array, "B T H"],
    g: Float[Array, "B T H"] | None,
    state: LatticeState | None,
    reset: Bool[Array, "B T"] | None,
    empty: LatticeState,
    rule: Rule,
) -> tuple[LatticeState, Float[Array, "B T H V"]]:
    """A loop of steps; `reset` only counts where a chunk starts."""

    def one_token(state, token):
        q, k, v, gamma, g, reset = token
        if reset is not None:
            clear = (reset & (state.position == 0))[:, None, None, None]
            start = jnp.where(clear, empty.start, state.start)
            state = LatticeState(
                start, state.pending, state.decay, state.position, state.chunk_size
            )
        return advance(q, k, v, gamma, g, state, rule)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, gamma, g, reset))
    state, y = jax.lax.scan(one_token, empty if state is None else state, tokens)
    return state, jnp.moveaxis(y, 0, 1)


def residual(
    direction: Float[Array, "B H M V"],
    k: Float[Array, "B H M"],
    v: Float[Array, "B H V"],
    variant: LatticeVariant,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H M"]]:
    """h and c: the gradient at slot i is c_i times what of h is across the slot."""
    match variant:
        case "dec":
            return jnp.einsum("bhmv,bhm->bhv", direction, k) - v, k
        case "enc":
            return v, jnp.einsum("bhmv,bhv->bhm", direction, v) - k
        case "sim":
            return -v, k
