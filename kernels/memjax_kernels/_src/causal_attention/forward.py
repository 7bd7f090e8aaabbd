"""Outputs of causal attention on a TPU, and what the gradients need of them.

No maximum of the scores is found before their exponentials, which would wait for it.
Any reference r_t of a query keeps the sums

    y_t = Σ_s exp(s_ts - r_t) v_s / Σ_s exp(s_ts - r_t)

as exact as the maximum does, as long as float32 can hold them. The reference is the
query's score of its own key: it is always seen, so the sum of weights is one or more.
Where a score is so far above it that a sum leaves float32, a block of queries is
computed again with the running maximum.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memjax_kernels._src.causal_attention.blocks import Plan
from memjax_kernels._src.causal_attention.grid import (
    HEADS,
    NN,
    NT,
    SCALE_OF_TWO,
    Grid,
    Static,
    by_kind,
    dot,
    head_products,
    hide,
    of_head,
    seen,
    transposed,
)
from memjax_kernels._src.common import varying
from memjax_kernels._src.common.packs.tiles import F32, LANES, eights

# Rows of a register, over which sums of weights are added up at a block's last step.
ROWS = 8
# The least sum of weights. It is one, but for rounding of scores above a million.
LEAST = 2.0**-60
# The initial maximum.
LOWEST = float(jnp.finfo(F32).min)


def forward(static: Static, q, k, v):
    """y, and log2 of the sum of every query's weights, [B N, heads, T]."""
    grid = Grid(static, q, by_key=False)
    heads, block = len(HEADS), grid.plan.block
    mass = varying.like(q, (grid.groups, heads, q.shape[1]), F32)
    return grid.call(
        _kernel,
        "forward",
        ((grid.queries, q), (grid.sequences, k), (grid.sequences, v)),
        ((grid.queries, varying.like(q, q.shape, q.dtype)), (grid.masses, mass)),
        [
            pltpu.VMEM((LANES, block), F32),
            pltpu.VMEM((heads, ROWS, block), F32),
            pltpu.VMEM((heads, block), F32),
        ],
    )


def _kernel(plan: Plan, steps, q, k, v, y, mass, *sums):
    total, weights, reference = sums
    n = pl.program_id(1)
    start = pl.multiple_of(steps.key[n] * plan.block, plan.block)

    def step(kind):
        rows = pl.ds(start, plan.block)
        if plan.distances[kind] == 0:
            _begin(q, k[rows], sums)
        values = transposed(v[rows])
        for h in range(len(HEADS)):
            queries = of_head(q[...], HEADS[h])
            for part in plan.parts(kind):
                _add(plan, part, h, start, queries, k, values, sums)

    def finish():
        divisors = jnp.sum(weights[...], axis=1)
        mass[...] = reference[...] * SCALE_OF_TWO + jnp.log2(divisors)
        for h, channels in enumerate(HEADS):
            total[channels] = total[channels] / divisors[h : h + 1]
        y[...] = total[...].T.astype(y.dtype)

    by_kind(plan, steps.kind[n], step)

    @pl.when(steps.last[n] == 1)
    def _():
        left = _left_float32(total, weights)
        finish()

        @pl.when(left)
        def _():
            _with_running_maximum(plan, steps.query[n], q, k, v, sums)
            finish()


def _begin(q, own_keys, sums):
    """Empty sums, and scores of queries and their own keys."""
    total, weights, reference = sums
    total[...] = jnp.zeros(total.shape, F32)
    weights[...] = jnp.zeros(weights.shape, F32)
    for h, scores in enumerate(head_products(q[...], own_keys)):
        reference[h : h + 1] = scores


def _add(plan, part, h, start, queries, k, values, sums):
    """Adds the values of a part's keys, of one head."""
    total, weights, reference = sums
    rows, columns = part.keys, part.queries
    size = rows.stop - rows.start
    keys = k[pl.ds(pl.multiple_of(start + rows.start, plan.tile), size)]
    scores = dot(keys, queries[columns], NT) - reference[h : h + 1, columns]
    weight = hide(plan, part, jnp.exp2(scores * SCALE_OF_TWO))
    read = dot(values[HEADS[h], rows], weight.astype(keys.dtype), NN)
    total[HEADS[h], columns] += read
    weights[h, :, columns] += eights(weight)


def _left_float32(total, weights):
    """Whether a sum is not finite, or so small that it may have lost some weights."""
    sums = jnp.sum(weights[...], axis=1)
    kept = jnp.sum(jnp.where(sums > LEAST, sums, jnp.inf), axis=0)
    # What is not finite stays so in a sum.
    found = eights(jnp.abs(total[...])).sum(axis=0) + kept
    return jnp.logical_not(jnp.sum(found) < jnp.inf)


def _with_running_maximum(plan, query, q, k, v, sums):
    """Adds all values that a block of queries sees; its references become maxima."""
    total, weights, reference = sums
    start = pl.multiple_of(query * plan.block, plan.block)
    total[...] = jnp.zeros(total.shape, F32)
    weights[...] = jnp.zeros(weights.shape, F32)
    reference[...] = jnp.full(reference.shape, LOWEST, F32)

    def some_keys(i, _):
        rows = pl.ds(pl.multiple_of(i * plan.tile, plan.tile), plan.tile)
        values = transposed(v[rows])
        shown = seen((plan.tile, plan.block), start - i * plan.tile, plan.window)
        for h, channels in enumerate(HEADS):
            one = slice(h, h + 1)
            scores = dot(k[rows], of_head(q[...], channels), NT)
            before = reference[one]
            highest = jnp.max(jnp.where(shown, scores, before), axis=0, keepdims=True)
            now = jnp.maximum(before, highest)
            reference[one] = now
            weight = jnp.exp2((scores - now) * SCALE_OF_TWO)
            weight = jnp.where(shown, weight, 0.0)
            fewer = jnp.exp2((before - now) * SCALE_OF_TWO)
            weights[h] = weights[h] * fewer + eights(weight)
            read = dot(values[channels], weight.astype(v.dtype), NN)
            total[channels] = total[channels] * fewer + read
        return _

    first = 0 if plan.window is None else jnp.maximum(start - (plan.window - 1), 0)
    end = (query + 1) * (plan.block // plan.tile)
    jax.lax.fori_loop(jax.lax.div(first, plan.tile), end, some_keys, None)
