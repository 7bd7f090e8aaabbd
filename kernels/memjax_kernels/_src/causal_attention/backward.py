"""Gradients of causal attention on a TPU: of queries, keys and values in one pass.

Weights are computed again, from each query's log-sum-exp. Steps of one block of keys
follow each other; the gradients of all queries are held on the chip meanwhile.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memjax_kernels._src.causal_attention.blocks import Plan
from memjax_kernels._src.causal_attention.grid import (
    HEADS,
    NN,
    NT,
    SCALE,
    SCALE_OF_TWO,
    Grid,
    Static,
    by_kind,
    dot,
    head_products,
    hide,
    of_head,
    transposed,
)
from memjax_kernels._src.common import varying
from memjax_kernels._src.common.packs.tiles import F32, LANES


def backward(static: Static, residuals, d_y):
    """The gradients of q, k and v; residuals are these, y and `forward`'s sums."""
    q, k, v, y, mass = residuals
    grid = Grid(static, q, by_key=True)
    heads, block, time = len(HEADS), grid.plan.block, q.shape[1]
    tokens = [(grid.queries, x) for x in (q, y, d_y)]

    def like(x):
        return varying.like(x, x.shape, x.dtype)

    return tuple(
        grid.call(
            _kernel,
            "backward",
            (*tokens, (grid.masses, mass), (grid.keys, k), (grid.keys, v)),
            ((grid.sequences, like(q)), (grid.keys, like(k)), (grid.keys, like(v))),
            [
                pltpu.VMEM((LANES, time), F32),
                pltpu.VMEM((LANES, block), F32),
                pltpu.VMEM((LANES, block), F32),
                pltpu.VMEM((heads, time), F32),
            ],
        )
    )


def _kernel(plan: Plan, steps, q, y, d_y, mass, k, v, d_q, d_k, d_v, *sums):
    of_queries, of_keys, of_values, products = sums
    n = pl.program_id(1)
    start = pl.multiple_of(steps.query[n] * plan.block, plan.block)
    here = pl.ds(start, plan.block)

    @pl.when(steps.fresh[n] == 1)
    def _():
        of_queries[:, here] = jnp.zeros((LANES, plan.block), F32)
        for h, product in enumerate(head_products(y[...], d_y[...])):
            products[h : h + 1, here] = product

    def step(kind):
        tokens = tuple(transposed(x[...]) for x in (q, k, d_y))
        for h in range(len(HEADS)):
            own = tuple(of_head(x[...], HEADS[h]) for x in (q, d_y))
            for part in plan.parts(kind):
                _add(plan, kind, part, h, start, own, mass, k, v, tokens, sums)
        # The pair of a block with itself is the last of its queries.
        if plan.distances[kind] == 0:
            d_q[here] = (of_queries[:, here] * SCALE).T.astype(d_q.dtype)

    by_kind(plan, steps.kind[n], step)

    @pl.when(steps.last[n] == 1)
    def _():
        d_k[...] = (of_keys[...] * SCALE).T.astype(d_k.dtype)
        d_v[...] = of_values[...].T.astype(d_v.dtype)


def _add(plan, kind, part, h, start, own, mass, k, v, tokens, sums):
    """Adds the gradients of a part's queries, keys and values, of one head."""

    def add(to, found):
        # The pair of a block with itself is the first of its keys.
        to[channels, rows] = found if first else to[channels, rows] + found

    first = plan.distances[kind] == 0
    of_queries, of_keys, of_values, products = sums
    queries, keys, d_outputs = tokens
    rows, columns = part.keys, part.queries
    size = columns.stop - columns.start
    here = pl.ds(pl.multiple_of(start + columns.start, plan.tile), size)
    one, channels = slice(h, h + 1), HEADS[h]
    scores = dot(k[rows], own[0][columns], NT)
    weight = jnp.exp2(scores * SCALE_OF_TWO - mass[one, columns])
    weight = hide(plan, part, weight)
    d_weight = dot(v[rows], own[1][columns], NT)
    d_scores = (weight * (d_weight - products[one, here])).astype(k.dtype)
    weight = weight.astype(k.dtype)
    add(of_values, dot(d_outputs[channels, columns], weight, NT))
    add(of_keys, dot(queries[channels, columns], d_scores, NT))
    of_queries[channels, here] += dot(keys[channels, rows], d_scores, NN)
