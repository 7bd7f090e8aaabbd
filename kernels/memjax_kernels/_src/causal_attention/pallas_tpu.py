"""Causal attention on a TPU, without a transpose of heads.

A block has 128 lanes, two packed heads of 64 channels, which hide each other's latency.
Scores have keys along the rows, so that a number per query is a row and its broadcast
is free; sums over keys run on the matrix unit, from transposed tokens. Scores of a head
are products of all lanes with the other head's queries set to zero.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memjax_kernels._src.causal_attention.blocks import Steps, plan
from memjax_kernels._src.common import varying
from memjax_kernels._src.common.packs.tiles import F32, LANES

#: The name of what the backward kernel reads, by which a remat policy can save it.
READS = "attention_reads"
# Added to hidden scores; also the initial maximum.
HIDDEN = -1e30
# The bytes of VMEM that blocks, masks and scores take, and of each token of a sequence:
# the gradient of queries, added up in float32, and written out twice in turn.
VMEM, VMEM_A_TOKEN = 32 * 2**20, 1024
NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))


#: Channels of a head, and of each head of a block its channels.
WIDTH = 64
HEADS = tuple(slice(start, start + WIDTH) for start in range(0, LANES, WIDTH))
#: Scale of the scores, and the same for powers of two, which the chip
#: computes.
SCALE = WIDTH**-0.5
SCALE_OF_TWO = SCALE * math.log2(math.e)


class Static(NamedTuple):
    """Static arguments of the kernels."""

    window: int | None
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(static: Static, q, k, v):
    """The output for heads side by side, [B, T, H K]."""
    return _forward_call(static, q, k, v)[0]


def _forward(static, q, k, v):
    y, mass = _forward_call(static, q, k, v)
    return y, (q, k, v, y, mass)


# What is not asked for again leaves out a whole call, and not a kernel alone.
@functools.partial(jax.jit, static_argnums=0)
def _forward_call(static, q, k, v):
    """y, and log2 of the sum of every query's weights, [B N, heads, T]."""
    grid = _Grid(static, q, by_key=False)
    heads, block = len(HEADS), grid.plan.block
    scratch = [pltpu.VMEM((rows, block), F32) for rows in (LANES, heads, heads)]
    mass = varying.like(q, (grid.groups, heads, q.shape[1]), F32)
    found = grid.call(
        _forward_kernel,
        "causal_attention_forward",
        ((grid.queries, q), (grid.keys, k), (grid.keys, v), grid.masks()),
        ((grid.queries, varying.like(q, q.shape, q.dtype)), (grid.masses, mass)),
        scratch,
    )
    # Named here, where the output and its residuals are made, so that the kernel
    # does not run again for either.
    return tuple(checkpoint_name(x, READS) for x in found)


def _backward(static, residuals, d_y):
    q, k, v, y, mass = residuals
    grid = _Grid(static, q, by_key=True)
    heads, block = len(HEADS), grid.plan.block
    scratch = [
        pltpu.VMEM((LANES, q.shape[1]), F32),
        pltpu.VMEM((LANES, block), F32),
        pltpu.VMEM((LANES, block), F32),
        pltpu.VMEM((heads, q.shape[1]), F32),
    ]
    tokens = [(grid.queries, x) for x in (q, y, d_y)]

    def like(x):
        return varying.like(x, x.shape, x.dtype)

    return tuple(
        grid.call(
            _backward_kernel,
            "causal_attention_backward",
            (
                *tokens,
                (grid.masses, mass),
                (grid.keys, k),
                (grid.keys, v),
                grid.masks(),
            ),
            ((grid.sequences, like(q)), (grid.keys, like(k)), (grid.keys, like(v))),
            scratch,
        )
    )


attention.defvjp(_forward, _backward)


class _Grid:
    """A kernel's grid: 128 lanes of a batch element, and the steps of its plan."""

    def __init__(self, static: Static, q: Any, by_key: bool):
        batch, time, channels = q.shape
        self.static, self.time, lanes = static, time, channels // LANES
        self.plan = plan(time, static.window, by_key)
        self.groups = batch * lanes
        block = self.plan.block

        def at(g):
            return (jax.lax.div(g, lanes), jax.lax.rem(g, lanes))

        def spec(rows, row):
            return pl.BlockSpec(
                (None, rows, LANES),
                lambda g, n, *steps: (at(g)[0], row(n, Steps(*steps)), at(g)[1]),
            )

        self.queries = spec(block, lambda n, steps: steps.query[n])
        self.keys = spec(block, lambda n, steps: steps.key[n])
        self.sequences = spec(time, lambda n, steps: 0)
        self.masses = pl.BlockSpec(
            (None, len(HEADS), block),
            lambda g, n, *steps: (g, 0, Steps(*steps).query[n]),
        )

    def masks(self) -> tuple[pl.BlockSpec, Any]:
        """The mask added to the scores, keys along the rows."""
        block, distances = self.plan.block, self.plan.distances
        row, column = (
            jax.lax.broadcasted_iota(jnp.int32, (block, block), i) for i in (0, 1)
        )

        def mask(first):
            if first is None:
                return jnp.zeros((block, block), F32)
            distance = column - row + first
            seen = distance >= 0
            if self.static.window is not None:
                seen &= distance < self.static.window
            return jnp.where(seen, 0.0, HIDDEN)

        shape = (len(distances), block, block)
        spec = pl.BlockSpec(shape, lambda g, n, *steps: (0, 0, 0))
        return spec, jnp.stack([mask(first) for first in distances])

    def call(self, kernel, name, given, outputs, scratch) -> Any:
        """Runs a kernel; `given` and `outputs` are pairs of a block and an array."""
        in_specs, arrays = zip(*given, strict=True)
        out_specs, shapes = zip(*outputs, strict=True)
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(Steps._fields),
                grid=(self.groups, len(self.plan.steps.query)),
                in_specs=in_specs,
                out_specs=out_specs,
                scratch_shapes=scratch,
            ),
            out_shape=shapes,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"),
                vmem_limit_bytes=VMEM + VMEM_A_TOKEN * self.time,
            ),
            interpret=self.static.interpret,
            name=name,
        )(*self.plan.steps, *arrays)


def _forward_kernel(*refs):
    steps, (q, k, v, masks, y, mass, total, highest, weights) = _apart(refs)
    n, scale = pl.program_id(1), SCALE_OF_TWO

    @pl.when(steps.first[n] == 1)
    def _():
        total[...] = jnp.zeros(total.shape, F32)
        weights[...] = jnp.zeros(weights.shape, F32)
        highest[...] = jnp.full(highest.shape, HIDDEN, F32)

    values, mask = _transposed(v[...]), masks[steps.mask[n]]
    for h, channels in enumerate(HEADS):
        one = slice(h, h + 1)
        scores = _dot(k[...], _of_head(q[...], channels), NT) + mask
        before = highest[one]
        now = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
        highest[one] = now
        weight = jnp.exp2((scores - now) * scale)
        residuals = jnp.exp2((before - now) * scale)
        weights[one] = weights[one] * residuals + jnp.sum(weight, axis=0, keepdims=True)
        read = _dot(values[channels], weight.astype(v.dtype), NN)
        total[channels] = total[channels] * residuals + read

    @pl.when(steps.last[n] == 1)
    def _():
        for h, channels in enumerate(HEADS):
            total[channels] = total[channels] / weights[h : h + 1]
        y[...] = total[...].T.astype(y.dtype)
        mass[...] = highest[...] * scale + jnp.log2(weights[...])


def _backward_kernel(*refs):
    steps, refs = _apart(refs)
    q, y, d_y, mass, k, v, masks, d_q, d_k, d_v, *scratch = refs
    of_queries, of_keys, of_values, products = scratch
    n = pl.program_id(1)
    block = q.shape[0]
    here = pl.ds(pl.multiple_of(steps.query[n] * block, block), block)

    @pl.when(steps.first[n] == 1)
    def _():
        of_keys[...] = jnp.zeros(of_keys.shape, F32)
        of_values[...] = jnp.zeros(of_values.shape, F32)

    @pl.when(steps.fresh[n] == 1)
    def _():
        of_queries[:, here] = jnp.zeros((LANES, block), F32)
        product = (y[...].astype(F32) * d_y[...].astype(F32)).T
        for h, channels in enumerate(HEADS):
            products[h : h + 1, here] = jnp.sum(
                product[channels], axis=0, keepdims=True
            )

    queries, keys, d_outputs = (_transposed(x[...]) for x in (q, k, d_y))
    mask = masks[steps.mask[n]]
    for h, channels in enumerate(HEADS):

        def own(x, channels=channels):
            return _of_head(x[...], channels)

        scores = _dot(k[...], own(q), NT) + mask
        weight = jnp.exp2(scores * SCALE_OF_TWO - mass[h : h + 1])
        rounded = weight.astype(q.dtype)
        of_values[channels] += _dot(d_outputs[channels], rounded, NT)
        d_weight = _dot(v[...], own(d_y), NT)
        d_scores = weight * (d_weight - products[h : h + 1, here])
        d_scores = d_scores.astype(q.dtype)
        of_keys[channels] += _dot(queries[channels], d_scores, NT)
        of_queries[channels, here] += _dot(keys[channels], d_scores, NN)

    @pl.when(steps.last[n] == 1)
    def _():
        d_k[...] = (of_keys[...] * SCALE).T.astype(d_k.dtype)
        d_v[...] = of_values[...].T.astype(d_v.dtype)

    # The pair of a block with itself is the first of its keys and the last of its
    # queries.
    @pl.when(steps.first[n] == 1)
    def _():
        d_q[here] = (of_queries[:, here] * SCALE).T.astype(d_q.dtype)


def _apart(refs):
    count = len(Steps._fields)
    return Steps(*refs[:count]), refs[count:]


def _dot(x, y, form):
    return jax.lax.dot_general(x, y, form, preferred_element_type=F32)


def _transposed(x):
    # In float32: registers of bfloat16 hold two rows.
    return x.astype(F32).T.astype(x.dtype)


def _of_head(x, channels):
    """x with zeros in all other channels."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    own = (lane >= channels.start) & (lane < channels.stop)
    return jnp.where(own, x, jnp.zeros_like(x))
