"""Gated scans as loops over tokens, and as associative scans of chunks.

The recurrence h = decay h + write is a fold of pairs (decay, write):

    (d, w) then (e, x)  =  (d e, e w + x)

A loop takes 2 operations for each number and token, in T steps. Scanning pairs takes 6
(three for each of two pairs), in 2 log₂ C steps for each of T / C chunks: for C = 64
three times the operations in a fifth of the steps. A CPU, which runs few operations at
once, has the loop; other devices, where a step is short of work, have the scan.

Shapes: B batch, T time, C tokens of a chunk, I channels, N states of a channel.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.cpu import by_platform
from memjax_kernels._src.common.token_scan import scan_tokens
from memjax_kernels._src.common.varying import vary_alike
from memjax_kernels._src.scans.steps import (
    GatedScanState,
    SelectiveScanState,
    gated_scan_step,
    selective_scan_step,
)

F32 = jnp.float32
# Tokens of a chunk: more are fewer steps, and more memory in training.
CHUNK_SIZE = 64
# Of the loop: tokens between two saved memories. Those of a group stay in the cache.
GROUP = 16


def gated_scan_reference(
    u: Float[Array, "B T I"],
    g: Float[Array, "B T I"],
    state: GatedScanState,
    reset: Bool[Array, "B T"] | None,
) -> tuple[GatedScanState, Float[Array, "B T I"]]:
    """A loop of steps."""
    u, g, state, reset = vary_alike((u, g, state, reset))
    return scan_tokens(gated_scan_step, (u, g), state, reset)


def gated_scan_xla(
    u: Float[Array, "B T I"],
    g: Float[Array, "B T I"],
    state: GatedScanState,
    reset: Bool[Array, "B T"] | None,
) -> tuple[GatedScanState, Float[Array, "B T I"]]:
    """The loop on a CPU, an associative scan of chunks elsewhere."""
    return by_platform(gated_scan_reference, gated_scan_associative)(u, g, state, reset)


def gated_scan_associative(
    u: Float[Array, "B T I"],
    g: Float[Array, "B T I"],
    state: GatedScanState,
    reset: Bool[Array, "B T"] | None,
) -> tuple[GatedScanState, Float[Array, "B T I"]]:
    """Chunks of associative scans."""

    def advance(state, item):
        u, g, reset = item
        decay = _reset(jnp.exp(g.astype(F32)), reset)
        states = _states(decay, u.astype(F32), state)
        return states[:, -1], states.astype(u.dtype)

    return _scan_chunks(advance, state, (u, g, reset))


def selective_scan_reference(
    u: Float[Array, "B T I"],
    delta: Float[Array, "B T I"],
    a: Float[Array, "N I"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    state: SelectiveScanState,
    reset: Bool[Array, "B T"] | None,
    *,
    remat_every: int | None = None,
) -> tuple[SelectiveScanState, Float[Array, "B T I"]]:
    """A loop of steps; see `scan_tokens` for `remat_every`."""
    given = vary_alike((u, delta, a, b, c, state, reset))
    u, delta, a, b, c, state, reset = given

    def step(u, delta, b, c, state):
        return selective_scan_step(u, delta, a, b, c, state)

    tokens = (u, delta, b, c)
    return scan_tokens(step, tokens, state, reset, remat_every=remat_every)


def selective_scan_xla(
    u: Float[Array, "B T I"],
    delta: Float[Array, "B T I"],
    a: Float[Array, "N I"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    state: SelectiveScanState,
    reset: Bool[Array, "B T"] | None,
) -> tuple[SelectiveScanState, Float[Array, "B T I"]]:
    """The loop on a CPU, associative scans of chunks elsewhere.

    Both save memories between groups of tokens alone: all would be [B, T, N, I].
    """
    loop = functools.partial(selective_scan_reference, remat_every=GROUP)
    form = by_platform(loop, selective_scan_associative)
    return form(u, delta, a, b, c, state, reset)


def selective_scan_associative(
    u: Float[Array, "B T I"],
    delta: Float[Array, "B T I"],
    a: Float[Array, "N I"],
    b: Float[Array, "B T N"],
    c: Float[Array, "B T N"],
    state: SelectiveScanState,
    reset: Bool[Array, "B T"] | None,
) -> tuple[SelectiveScanState, Float[Array, "B T I"]]:
    """Chunks of associative scans, whose memories [B, C, N, I] are dropped again."""
    rates = a.astype(F32)[None, None]

    def advance(state, item):
        u, delta, b, c, reset = item
        wide, delta, b, c = (x.astype(F32) for x in (u, delta, b, c))
        decay = _reset(jnp.exp(delta[:, :, None] * rates), reset)
        write = b[..., None] * (delta * wide)[:, :, None]
        states = _states(decay, write, state)
        y = (states * c[..., None]).sum(axis=2)
        return states[:, -1], y.astype(u.dtype)

    return _scan_chunks(advance, state, (u, delta, b, c, reset))


def _scan_chunks(advance, state, tokens):
    """Scans advance(state, chunk) -> (state, y) over chunks of the tokens."""
    time = tokens[0].shape[1]
    size = min(CHUNK_SIZE, time)

    # Padding is no token: its decay is exp(0), and it writes nothing.
    def chunked(x):
        return jnp.moveaxis(chunks.split(x, size, None), 1, 0)

    state, y = chunks.scan(advance, state, jax.tree.map(chunked, tokens))
    return state, chunks.join(jnp.moveaxis(y, 0, 1), time, None)


def _reset(decay, reset):
    """Decay factors [B, C, ...], zero where the memory is emptied."""
    if reset is None:
        return decay
    return jnp.where(reset.reshape(*reset.shape, *[1] * (decay.ndim - 2)), 0.0, decay)


def _states(decay, write, state):
    """The memories [B, C, ...] after each token of a chunk."""
    write = write.at[:, 0].add(decay[:, 0] * state)

    def then(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(then, (decay, write), axis=1)[1]
