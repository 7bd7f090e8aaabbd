"""Runs chunk implementations of Trellis: `common.steps.segment` says what these are.

They take chunks of q, k, v and alpha, gates gamma and g, float32 [B, n, C, H, 2] for
each pass or [B, n, C, H, 1] for both, and key and value memories, `empty` None where no
chunk is reset. With `normalize` v and alpha are divided by their norms first, and with
`bound_steps` gamma of each pass is bounded by the chunk's keys (`functions`). For both
passes, with x = k, then v, M the memory and N the one after, and cs the inclusive sum
of g over the chunk, g no lower than -104, where exp is 0 already (g may be -inf):

    U = gamma error_gradient(phi, x M^T, alpha)
    W_ij = exp(cs_i - cs_j) for i >= j, else 0
    N = exp(cs_C) M - (U exp(cs_C - cs))^T x
    first pass:   y1 = exp(cs) (q M^T) - ((q x^T) * W) U
    second pass:  y  = exp(cs) (f M)   - ((f U^T) * W) x,     f = activation(y1)
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.steps import segment
from memjax_kernels._src.recurrent_block.norms import l2_normalize
from memjax_kernels._src.trellis.functions import bounded
from memjax_kernels._src.trellis.state import Rule, TrellisState, TrellisTokens


def in_chunks(
    implementation: Callable[..., tuple[tuple, Float[Array, "B n C H V"]]],
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    gamma: Float[Array, "B T H ..."],
    g: Float[Array, "B T H ..."] | None,
    state: TrellisState | None,
    reset: Bool[Array, "B T"] | None,
    empty: TrellisState,
    normalize: bool = False,
) -> tuple[TrellisState, Float[Array, "B T H V"]]:
    """Runs a chunk implementation; the other arguments are those of `trellis`."""
    gamma = per_pass(gamma)
    # Implementations always take gates: g = 0 decays nothing.
    g = jnp.zeros_like(gamma[..., :1]) if g is None else per_pass(g)
    tokens = k, v, alpha, gamma, g
    if state is not None:
        # Open tokens have gates of each pass.
        tokens = of_each_pass(*tokens)
    q, tokens, *flags, position = segment.cut(q, tokens, state, reset, empty)
    x, before = tokens, state or empty
    if state is not None:
        gates = (x.key_gamma, x.value_gamma), (x.key_g, x.value_g)
        x = (x.k, x.v, x.alpha, *(jnp.stack(gate, axis=-1) for gate in gates))
    given = Chunks((q, *x[:3]), tuple(x[3:]), *flags)
    blank = None if reset is None else (empty.keys, empty.values)
    (keys, values), y = implementation(given, (before.keys, before.values), blank)
    memories = {"keys": keys, "values": values}
    after, y = segment.join(before, tokens, y, v.shape[1], position, **memories)
    if state is None and after.tokens is not None:
        after = dataclasses.replace(after, tokens=of_each_pass(*after.tokens))
    if normalize and (x := after.tokens) is not None:
        v, alpha = normalised(x.v, x.alpha)
        after = dataclasses.replace(after, tokens=x._replace(v=v, alpha=alpha))
    return after, y


def of_each_pass(k, v, alpha, gamma, g) -> TrellisTokens:
    """Tokens whose gates [..., 1] are of both passes, or [..., 2] of each."""
    gates = gamma[..., 0], gamma[..., -1], g[..., 0], g[..., -1]
    return TrellisTokens(k, v, alpha, *gates)


def normalised(
    v: Float[Array, "*B V"], alpha: Float[Array, "*B M"]
) -> tuple[Float[Array, "*B V"], Float[Array, "*B M"]]:
    """Values by their norms, and targets by their root mean squares."""
    return l2_normalize(v), l2_normalize(alpha, alpha.shape[-1] ** 0.5)


def as_written(x: Chunks, rule: Rule) -> Chunks:
    """The chunks with tokens normalised and steps bounded, as the rule asks."""
    if rule.normalize:
        q, k, v, alpha = x.tokens
        x = x._replace(tokens=(q, k, *normalised(v, alpha)))
    if not rule.bound_steps:
        return x

    def of_pass(k, gamma):
        return bounded(k.swapaxes(2, 3), gamma.swapaxes(2, 3)).swapaxes(2, 3)

    (_, k, v, _), (gamma, g) = x.tokens, x.gates
    both = of_pass(k, gamma[..., 0]), of_pass(v, gamma[..., -1])
    return x._replace(gates=(jnp.stack(both, axis=-1), g))


def per_pass(gate: Float[Array, "B T H ..."]) -> Float[Array, "B T H _"]:
    """A gate in float32 for each pass, or one for both of [B, T, H]."""
    gate = gate.astype(jnp.float32)
    return gate if gate.ndim == 4 else gate[..., None]
