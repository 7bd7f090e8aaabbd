"""Trellis one token at a time, in plain JAX: the definition.

Memory M [M, K], token k, target alpha, step size gamma, log forget gate g; M' is the
memory at the start of the token's chunk of C tokens:

    z = M' k        u = J_phi(z)^T (phi(z) - alpha)        M <- exp(g) M - gamma u k^T

Karami et al., "Trellis", eqs. 8 and 9; the factor 2 of eq. 9 is absorbed in gamma, as
in eqs. 8 and 10-12. With C = 1 this is the fully non-linear recurrence.

Two passes (eqs. 13 and 14) share alpha: the first compresses keys and reads
y1 = M_K q; the second compresses values and reads y = M_V^T f(y1).
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import one_pass
from memjax_kernels._src.trellis import checks, functions
from memjax_kernels._src.trellis.state import Memories, TrellisState


@one_pass.on_tpu
def trellis_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    alpha: Float[Array, "B H M"],
    gamma: Float[Array, "B H ..."],
    g: Float[Array, "B H ..."] | None,
    state: TrellisState,
    *,
    phi: str = "l2_silu",
    activation: str = "ln_silu",
) -> tuple[TrellisState, Float[Array, "B H V"]]:
    """One token of `trellis`; its chunk size is the state's.

    Args:
        q: query.
        k: key.
        v: value.
        alpha: target of both passes.
        gamma: step sizes >= 0, shared by the passes, or [B, H, 2].
        g: log forget gates <= 0, likewise; None forgets nothing.
        state: the memory before the token.
        phi: as in `trellis`.
        activation: as in `trellis`.

    Returns:
        The memory after the token, and its read in the dtype of v.

    Raises:
        ValueError: as `trellis`.
    """
    checks.check_options(state.chunk_size, phi, activation)
    (gamma1, gamma2), (g1, g2) = _per_pass(gamma), _per_pass(g)
    dtype = v.dtype
    k, v, alpha = (x.astype(jnp.float32) for x in (k, v, alpha))
    # The first pass is read after its write, and its read is the second pass's query.
    keys = _write(state.keys_start, state.keys, k, alpha, gamma1, g1, phi)
    reads = jnp.einsum("bhmk,bhk->bhm", keys, q.astype(jnp.float32))
    query = functions.apply(activation, reads)
    values = _write(state.values_start, state.values, v, alpha, gamma2, g2, phi)
    y = jnp.einsum("bhmv,bhm->bhv", values, query)
    position, keys_start = _next(state, state.keys_start, keys)
    _, values_start = _next(state, state.values_start, values)
    after = TrellisState(
        keys_start, keys, values_start, values, position, state.chunk_size
    )
    return after, y.astype(dtype)


def trellis_reference(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    gamma: Float[Array, "B T H ..."],
    g: Float[Array, "B T H ..."] | None,
    state: TrellisState | None,
    reset: Bool[Array, "B T"] | None,
    empty: TrellisState,
    *,
    phi: str,
    activation: str,
) -> tuple[TrellisState, Float[Array, "B T H V"]]:
    """A loop of steps; the arguments are those of `trellis`."""
    # Only the memory at the chunk's start is read of `empty`: see `trellis`.
    emptied = empty.memories.start
    empty = TrellisState.of(
        Memories(emptied, emptied), empty.position, empty.chunk_size
    )
    plain = inspect.unwrap(trellis_step)

    def one_token(state, item):
        (q, k, v, alpha, gamma, g), clear = item
        if clear is not None:
            state = jax.tree.map(functools.partial(_where, clear), empty, state)
        return plain(q, k, v, alpha, gamma, g, state, phi=phi, activation=activation)

    tokens = (q, k, v, alpha, gamma, g)
    items = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, reset))
    state, y = jax.lax.scan(one_token, empty if state is None else state, items)
    return state, jnp.moveaxis(y, 0, 1)


def _write(start, memory, k, alpha, gamma, g, phi):
    # Gradients inside a chunk are taken at its start, and written to the memory now.
    z = jnp.einsum("bhmk,bhk->bhm", start, k)
    u = functions.error_gradient(phi, z, alpha)
    decay = memory if g is None else jnp.exp(_wide(g)) * memory
    return decay - _wide(gamma) * jnp.einsum("bhm,bhk->bhmk", u, k)


def _next(state, start, memory):
    """The position after the token, and the start of its chunk."""
    # At the end of a chunk the running memory becomes the next one's start.
    position = (state.position + 1) % state.chunk_size
    return position, jnp.where((position == 0)[:, None, None, None], memory, start)


def _per_pass(gate):
    """[B, H] for each of the two passes."""
    if gate is None or gate.ndim == 2:
        return gate, gate
    return gate[..., 0], gate[..., 1]


def _wide(gate):
    return gate.astype(jnp.float32)[..., None, None]


def _where(rows: Bool[Array, " B"], new: Array, old: Array) -> Array:
    """`new` in the batch elements that `rows` names."""
    return jnp.where(rows.reshape((-1,) + (1,) * (old.ndim - 1)), new, old)
