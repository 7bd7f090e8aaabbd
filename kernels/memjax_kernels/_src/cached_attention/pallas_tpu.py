"""Attention to a cache on a TPU: each block of the cache is read once for all queries.

A query of one head is a row with zeros in the channels of the other heads. So one
product gives the scores of all heads, and another their sums of values, of which each
head takes its own channels. The extra products cost nothing: the kernel is bound by
memory bandwidth.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import partition, varying
from memjax_kernels._src.common.packs import tuned

F32 = jnp.float32
LANES = 128
# Rows of bfloat16 that fill a register.
ROWS = 16
# A score of what is not seen: finite, as a softmax of -inf alone is NaN.
UNSEEN = -1e30


def unsupported(q: Any, keys: Any) -> str:
    """Why the kernel cannot take these arguments on any TPU; "" if it can."""
    _, slots, width = keys.shape
    for name, x in (("q", q), ("keys", keys)):
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} must be float32 or bfloat16, got {x.dtype}"
    if slots < LANES:
        return f"{slots} slots are less than a block of {LANES}"
    most = tuned.SIZES.cached_attention.bytes
    if LANES * width * keys.dtype.itemsize > most:
        return f"{LANES} slots of {width} channels are more than {most}"
    return ""


def attend_tpu(
    q: Float[Array, "B Q H K"],
    keys: Float[Array, "B S J"],
    values: Float[Array, "B S J"],
    seen: Bool[Array, "B Q S"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B Q H"]]:
    """As `cached_attention`; `interpret` runs where there is no TPU."""
    batch, queries, heads, width = q.shape
    count = queries * heads
    own = _channels(heads, width, keys.shape[-1])
    rows = jnp.tile(q * width**-0.5, (1, 1, 1, keys.shape[-1] // width))
    rows = jnp.where(own, rows, 0).astype(q.dtype).reshape(batch, count, -1)
    rows = jnp.pad(rows, ((0, 0), (0, -count % ROWS), (0, 0)))
    # As one token of one head and its memories.
    form = functools.partial(_on_device, heads=heads, interpret=interpret)
    memories = (keys[:, None], values[:, None], seen[:, None])
    _, (y, mass) = partition.chunkwise(form)(rows[:, None, :, None], *memories)
    y = y[:, 0, :count, 0].reshape(batch, queries, heads, -1)
    y = jnp.where(own, y, 0.0).reshape(*q.shape[:3], -1, width)
    mass = mass[:, 0, :count, 0, 0].reshape(q.shape[:3])
    return y.sum(axis=3).astype(q.dtype), mass


def _channels(heads, width, channels):
    """Bool[H, J]: which channels are those of a head's keys and values."""
    group = np.arange(heads) * (channels // width) // heads
    return group[:, None] == np.arange(channels) // width


def _on_device(rows, keys, values, seen, *, heads, interpret):
    """On a device's share of rows [B, 1, Q H, 1, J], and memories [B, 1, S, J]."""
    rows, keys, values = rows[:, 0, :, 0], keys[:, 0], values[:, 0]
    # A mask of bits would be unpacked in the kernel.
    seen = seen[:, 0].astype(jnp.int32)
    (batch, count, width), slots, queries = rows.shape, keys.shape[1], seen.shape[1]

    size, most = tuned.SIZES.cached_attention
    while size > slots or size * width * keys.dtype.itemsize > most:
        size //= 2
    # Blocks behind the last slot that is seen are not fetched: a block stays where the
    # next step asks for the same.
    places = jnp.arange(1, slots + 1, dtype=jnp.int32)[None]
    blocks = -(-(seen.max(axis=1) * places).max(axis=1) // size)

    def at(b, s, blocks):
        return jnp.minimum(s, jnp.maximum(blocks[b] - 1, 0))

    of_slots = pl.BlockSpec((None, size, width), lambda b, s, n: (b, at(b, s, n), 0))

    def of_rows(n):
        return pl.BlockSpec((None, count, n), lambda b, s, _: (b, 0, 0))

    y, mass = pl.pallas_call(
        functools.partial(_kernel, heads=heads, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(slots, size)),
            in_specs=[
                of_rows(width),
                of_slots,
                of_slots,
                pl.BlockSpec(
                    (None, queries, size), lambda b, s, n: (b, 0, at(b, s, n))
                ),
            ],
            out_specs=[of_rows(width), of_rows(LANES)],
            scratch_shapes=[pltpu.VMEM((count, LANES), F32)],
        ),
        out_shape=[varying.like(keys, (batch, count, n), F32) for n in (width, LANES)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary")
        ),
        interpret=interpret,
        name="cached_attention",
    )(*varying.vary_alike((blocks, rows, keys, values, seen)))
    return (), (y[:, None, :, None], mass[:, None, :, None])


def _kernel(blocks, rows, keys, values, seen, total, largest, weight, *, heads, slots):
    """Adds a block to the sum of values, whose shift is the largest score so far."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        total[...] = jnp.zeros(total.shape, F32)
        weight[...] = jnp.zeros(weight.shape, F32)
        largest[...] = jnp.full(largest.shape, UNSEEN, F32)

    @pl.when(pl.program_id(1) < blocks[pl.program_id(0)])
    def _():
        product = functools.partial(jax.lax.dot_general, preferred_element_type=F32)
        q = rows[...]
        scores = product(q, keys[...].astype(q.dtype), (((1,), (1,)), ((), ())))
        flags, v = seen[:1], values[...].astype(q.dtype)
        row = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        for n in range(1, len(seen)):
            flags = jnp.where(row < n * heads, flags, seen[n : n + 1])
        shows = flags > 0
        if slots % len(keys):
            # Behind the last slot a block may hold anything, NaN too.
            left = slots - pl.program_id(1) * len(keys)
            place = functools.partial(jax.lax.broadcasted_iota, jnp.int32)
            shows &= place(shows.shape, 1) < left
            v = jnp.where(place(v.shape, 0) < left, v, 0)
        scores = jnp.where(shows, scores, UNSEEN)
        before = largest[:, :1]
        after = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        rescale, weights = jnp.exp(before - after), jnp.exp(scores - after)
        added = product(weights.astype(q.dtype), v, (((1,), (0,)), ((), ())))
        total[...] = rescale * total[...] + added
        summed = rescale * weight[:, :1] + weights.sum(axis=1, keepdims=True)
        weight[...] = jnp.broadcast_to(summed, weight.shape)
        largest[...] = jnp.broadcast_to(after, largest.shape)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        # Where no block has anything that is seen both are 0.
        total[...] /= jnp.maximum(weight[:, :1], 1e-30)
        # The second output, which holds the largest score until here.
        largest[...] += jnp.log(jnp.maximum(weight[...], 1e-30))
