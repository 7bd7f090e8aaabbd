"""Splits a segment into chunks, runs an implementation and joins its reads.

Chunk implementations
---------------------
Every one (`xla.trellis_xla`, `pallas_tpu.trellis_tpu`, ...) has this signature:

    f(tokens: Tokens, memory: tuple, empty: tuple | None,
      *, phi: str, activation: str, bound_steps: bool) -> (memory, y)

A tuple holds the key memory, then the value memory. y [B, n, C, H, V] has the dtype
of v.

For each batch element and chunk i, in order, with M the memory:

0. with `bound_steps`, gamma of each pass is bounded by the chunk's keys (`functions`).
1. if reset[i]: M = empty. Given only together: `reset` and `empty` are both None, or
   neither.
2. For both passes, with x = k, then v, and cs the inclusive sum of g over the chunk, g
   no lower than -104, where exp is 0 already (g may be -inf):

       U = gamma error_gradient(phi, x M^T, alpha)
       W_ij = exp(cs_i - cs_j) for i >= j, else 0
       N = exp(cs_C) M - (U exp(cs_C - cs))^T x
       first pass:   y1 = exp(cs) (q M^T) - ((q x^T) * W) U
       second pass:  y  = exp(cs) (f M)   - ((f U^T) * W) x,     f = activation(y1)

3. M = N if full[i]. Where `full` is None every chunk is.

Padding is zeros in every array of tokens, gamma and g included: it writes nothing and
decays nothing. Its y and its gradient are dropped.

Everything is differentiable in tokens, memory and empty.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.trellis.functions import bounded
from memjax_kernels._src.trellis.state import TrellisState, TrellisTokens


class Tokens(NamedTuple):
    """Tokens in whole chunks.

    Attributes:
        q: [B, n, C, H, K].
        k: [B, n, C, H, K].
        v: [B, n, C, H, V].
        alpha: [B, n, C, H, M].
        gamma: [B, n, C, H, 2] float32 for each pass, or [B, n, C, H, 1] for both.
        g: likewise, log space.
        full: Bool[B, n], whether the tokens reach the chunk's end; None is always.
        reset: Bool[B, n], whether the chunk starts from `empty`; None is never.
    """

    q: PyTree
    k: PyTree
    v: PyTree
    alpha: PyTree
    gamma: PyTree
    g: PyTree
    full: PyTree
    reset: PyTree


def of_each_pass(x: Tokens) -> TrellisTokens:
    """All but the queries, with gates of each pass."""
    gates = x.gamma[..., 0], x.gamma[..., -1], x.g[..., 0], x.g[..., -1]
    return TrellisTokens(x.k, x.v, x.alpha, *gates)


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
    *,
    phi: str,
    activation: str,
    bound_steps: bool = False,
) -> tuple[TrellisState, Float[Array, "B T H V"]]:
    """Splits a segment into chunks and runs a chunk implementation on them.

    The other arguments are those of `trellis`; the chunk size is that of `empty`.
    """
    size, time = empty.chunk_size, q.shape[1]
    # Without a state, and in chunks of one token, every batch element starts a chunk.
    position = None if state is None or size == 1 else state.position
    before = empty if state is None else state
    tokens = align(q, k, v, alpha, gamma, g, reset, before, position)
    (keys, values), y = implementation(
        tokens,
        (before.keys, before.values),
        None if reset is None else (empty.keys, empty.values),
        phi=phi,
        activation=activation,
        bound_steps=bound_steps,
    )
    left = open_chunk.last(of_each_pass(tokens), time, position)
    after = TrellisState(keys, values, left, (before.position + time) % size, size)
    return after, chunks.join(y, time, position)


def align(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    alpha: Float[Array, "B T H M"],
    gamma: Float[Array, "B T H ..."],
    g: Float[Array, "B T H ..."] | None,
    reset: Bool[Array, "B T"] | None,
    before: TrellisState,
    position: Int[Array, " B"] | None,
) -> Tokens:
    """Splits tokens into chunks, behind the `position` open tokens of `before`."""
    (batch, time), size = q.shape[:2], before.chunk_size

    def cut(x):
        return chunks.split(x, size, position)

    gamma = per_pass(gamma)
    # Implementations always take gates: g = 0 decays nothing.
    g = jnp.zeros_like(gamma[..., :1]) if g is None else per_pass(g)
    number = chunks.count_chunks(time, size, position is None)
    whole = position is None and time % size == 0
    tokens = Tokens(
        q=cut(q),
        k=cut(k),
        v=cut(v),
        alpha=cut(alpha),
        gamma=cut(gamma),
        g=cut(g),
        full=None if whole else chunks.completed(number, size, time, position, batch),
        # A reset counts at the first token of a chunk; others have been refused or give
        # NaN.
        reset=None if reset is None else cut(reset)[:, :, 0],
    )
    if position is None:
        return tokens
    x = open_chunk.put_in_front(of_each_pass(tokens), before.tokens, position)
    gamma = jnp.stack([x.key_gamma, x.value_gamma], axis=-1)
    g = jnp.stack([x.key_g, x.value_g], axis=-1)
    return tokens._replace(k=x.k, v=x.v, alpha=x.alpha, gamma=gamma, g=g)


def with_bounded_steps(x: Tokens) -> Tokens:
    """The tokens with the steps of both passes bounded."""

    def of_pass(k, gamma):
        return bounded(k.swapaxes(2, 3), gamma.swapaxes(2, 3)).swapaxes(2, 3)

    both = of_pass(x.k, x.gamma[..., 0]), of_pass(x.v, x.gamma[..., -1])
    return x._replace(gamma=jnp.stack(both, axis=-1))


def per_pass(gate: Float[Array, "B T H ..."]) -> Float[Array, "B T H _"]:
    """A gate in float32 for each pass, or one for both of [B, T, H]."""
    gate = gate.astype(jnp.float32)
    return gate if gate.ndim == 4 else gate[..., None]
