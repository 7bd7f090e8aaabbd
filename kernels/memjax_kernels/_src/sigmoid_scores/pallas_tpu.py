"""The sum of tanh on a TPU: keys are read once, scores are not stored.

A block of scores has keys along its lanes and queries along its sublanes, so that a sum
over queries adds full registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from memjax_kernels._src.common import partition, varying
from memjax_kernels._src.common.packs import tuned

F32 = jnp.float32
SUBLANES = 8
# Widest keys of which a block of both fits, twice.
WIDEST = 512


def unsupported(keys: Any) -> str:
    """Why the kernel cannot take these keys on any TPU; "" if it can."""
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        return f"keys must be float32 or bfloat16, got {keys.dtype}"
    if keys.shape[-1] > WIDEST:
        return f"keys of {keys.shape[-1]} are wider than {WIDEST}"
    return ""


def sum_tanh_tpu(
    queries: Float[Array, "B T K"],
    keys: Float[Array, "B M K"],
    *,
    interpret: Any = False,
) -> Float32[Array, "B M"]:
    """As `xla.sum_tanh`; `interpret` runs where there is no TPU."""
    return partition.by_rows(functools.partial(_on_device, interpret=interpret))(
        queries, keys
    )


def _on_device(queries, keys, *, interpret):
    """On a device's share of queries [B, T, K] and keys [B, M, K]."""
    (batch, count, width), rows = queries.shape, keys.shape[1]
    sizes = tuned.SIZES.sigmoid_scores
    step = min(sizes.queries, -(-count // SUBLANES) * SUBLANES)
    # A query of zeros adds nothing.
    size = min(sizes.block, -(-count // step) * step)
    queries = jnp.pad(queries, ((0, 0), (0, -count % size), (0, 0)))
    blocks = (batch, pl.cdiv(rows, sizes.block), queries.shape[1] // size)
    found = pl.pallas_call(
        functools.partial(_kernel, step=step),
        grid=blocks,
        in_specs=[
            pl.BlockSpec((None, size, width), lambda b, m, t: (b, t, 0)),
            pl.BlockSpec((None, sizes.block, width), lambda b, m, t: (b, m, 0)),
        ],
        out_specs=pl.BlockSpec((None, 1, sizes.block), lambda b, m, t: (b, 0, m)),
        out_shape=varying.like(keys, (batch, 1, rows), F32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="sum_tanh",
    )(*varying.vary_alike((queries, keys)))
    return found[:, 0]


def _kernel(queries, keys, out, *, step):
    """Adds the scores of a block of queries to those of a block of keys."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        out[...] = jnp.zeros(out.shape, F32)

    at_once = tuned.SIZES.sigmoid_scores.keys

    def some_keys(i, _):
        places = pl.ds(pl.multiple_of(i * at_once, at_once), at_once)
        k = keys[places]

        def some_queries(j, total):
            q = queries[pl.ds(pl.multiple_of(j * step, step), step)]
            scores = jax.lax.dot_general(
                q, k, (((1,), (1,)), ((), ())), preferred_element_type=F32
            )
            return total + jnp.tanh(scores).reshape(-1, SUBLANES, at_once).sum(axis=0)

        total = jnp.zeros((SUBLANES, at_once), F32)
        total = jax.lax.fori_loop(0, len(queries) // step, some_queries, total)
        out[:, places] += total.sum(axis=0, keepdims=True)
        return _

    jax.lax.fori_loop(0, len(keys) // at_once, some_keys, None)
