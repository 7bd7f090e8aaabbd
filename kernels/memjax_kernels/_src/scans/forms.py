"""Gated scans as loops over tokens, and over the tokens of many chunks at once.

The recurrence h = decay h + write is linear, and a product of decays is an exp of sums:

    1. the memory of each chunk that starts empty       a loop over its C tokens
    2. the memory before each of n chunks               a loop over chunks
    3. every read, from those                           a loop over C tokens again

A loop over tokens takes half the operations in T steps, this 2 C + n steps of all
chunks at once. A CPU, which runs few operations at once, has the first. Other devices,
where the steps of few batch elements are short of work, have the second. An associative
scan of chunks would write all memories several times. Cycles a token of a v5e, upper
ends by the compiler's estimates (last counted before `4e463cda`), 1,024 tokens, 1,536
channels, 16 states:

    selective_scan                        loop      this
    one batch element, forward            10,695    1,702
    one batch element, with backward      38,059    10,040
    eight batch elements, forward         1,921     the loop
    eight batch elements, with backward   8,470     the loop

Shapes: B batch, T time, n chunks, C tokens of a chunk, I channels, N states of a
channel.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.cpu import by_platform
from memjax_kernels._src.common.token_scan import scan_tokens
from memjax_kernels._src.common.varying import vary_alike
from memjax_kernels._src.scans.steps import gated_scan_step, selective_scan_step

F32 = jnp.float32
# Tokens between two saved memories of a loop: those of a group stay in a CPU's cache.
# Fewer where all chunks run at once, and have a memory each.
GROUP, CHUNK_GROUP = 16, 4
# Tokens of a chunk, and memories of chunks and batch elements at once. More are fewer
# steps, and more memory in training.
CHUNK_SIZE, AT_ONCE = 32, 32
# Fewer tokens or chunks at once are a loop everywhere.
FEW_TOKENS, FEW_CHUNKS = 8, 8


class Scan(NamedTuple):
    """A scan of some tokens.

    Attributes:
        step: (*token, state) -> (state, y).
        passing: (*tokens [B, C, ...]) -> what a chunk leaves of the memory before it.
        tokens: [B, T, ...].
        state: the memory before the first.
        reset: as in the ops.
    """

    step: Callable[..., Any]
    passing: Callable[..., Array]
    tokens: tuple[Float[Array, "B T _"], ...]
    state: Float[Array, "B ..."]
    reset: Bool[Array, "B T"] | None


def _gated(u, g, state, reset) -> Scan:
    """`gated_scan` of its arguments."""

    def passing(u, g):
        return jnp.exp(g.astype(F32).sum(axis=1))

    return Scan(gated_scan_step, passing, (u, g), state, reset)


def _selective(u, delta, a, b, c, state, reset) -> Scan:
    """`selective_scan` of its arguments; all tokens share the rates `a`."""

    def step(u, delta, *given):
        return selective_scan_step(u, delta, a, *given)

    def passing(u, delta, b, c):
        steps = delta.astype(F32).sum(axis=1)
        return jnp.exp(steps[:, None] * a.astype(F32)[None])

    return Scan(step, passing, (u, delta, b, c), state, reset)


def _looped(scan: Callable[..., Scan], remat_every: int | None, *given: Any):
    """A loop of steps; see `scan_tokens` for `remat_every`."""
    x = scan(*vary_alike(given))
    return scan_tokens(x.step, x.tokens, x.state, x.reset, remat_every=remat_every)


def _at_once(scan: Callable[..., Scan], *given: Any):
    """The chunks of a segment at once."""
    return _scan_segments(scan(*vary_alike(given)))


gated_scan_reference = functools.partial(_looped, _gated, None)
gated_scan_parallel = functools.partial(_at_once, _gated)
#: The loop on a CPU, all chunks at once elsewhere.
gated_scan_xla = by_platform(gated_scan_reference, gated_scan_parallel)

selective_scan_reference = functools.partial(_looped, _selective, None)
selective_scan_parallel = functools.partial(_at_once, _selective)
#: Both save memories between groups of tokens alone: all would be [B, T, N, I].
selective_scan_xla = by_platform(
    functools.partial(_looped, _selective, GROUP), selective_scan_parallel
)


def _scan_segments(scan: Scan):
    """Scans segments of tokens, each in chunks."""
    step, passing, tokens, state, reset = scan
    batch, time = tokens[0].shape[:2]
    at_once = AT_ONCE // batch
    if time <= FEW_TOKENS or at_once < FEW_CHUNKS:
        given = vary_alike((tokens, state, reset))
        return scan_tokens(step, *given, remat_every=GROUP)
    # Of a short text as many chunks as tokens of a chunk, about.
    size = min(CHUNK_SIZE, 1 << ((time - 1).bit_length() + 1) // 2)
    count = -(-time // size)
    # Segments of equal size, for the least padding, which is no token: its decay is
    # exp(0), and it writes nothing.
    segments = -(-count // at_once)
    length = -(-count // segments) * size

    def split(x):
        return jnp.moveaxis(chunks.split(x, length, None), 1, 0)

    def advance(state, item):
        tokens, reset = item
        return _scan_chunks(step, passing, size, tokens, reset, state)

    state, y = chunks.scan(advance, state, jax.tree.map(split, (tokens, reset)))
    return state, chunks.join(jnp.moveaxis(y, 0, 1), time, None)


def _scan_chunks(step, passing, size, tokens, reset, state):
    """A segment, [B, n C, ...], in n chunks of `size` tokens."""
    batch = state.shape[0]

    def chunked(x):
        return x.reshape(-1, size, *x.shape[2:])

    def write(*given):
        state, _ = step(*given)
        # One channel in place of reads, which nothing needs.
        return state, state[..., 0]

    # Chunks are batch elements.
    tokens, reset = jax.tree.map(chunked, (tokens, reset))
    scan = functools.partial(scan_tokens, remat_every=CHUNK_GROUP)
    decay = passing(*tokens)
    if reset is not None:
        decay = chunks.where(reset.any(axis=1), 0.0, decay)
    ends, _ = scan(write, tokens, jnp.zeros_like(decay), reset)
    between = (x.reshape(batch, -1, *x.shape[1:]) for x in (decay, ends))

    def pass_chunk(state, item):
        decay, end = item
        return decay * state + end, state

    first = tuple(jnp.moveaxis(x, 1, 0) for x in between)
    state, starts = jax.lax.scan(pass_chunk, state, first)
    starts = jnp.moveaxis(starts, 0, 1).reshape(decay.shape)
    _, y = scan(step, tokens, starts, reset)
    return state, y.reshape(batch, -1, *y.shape[2:])
