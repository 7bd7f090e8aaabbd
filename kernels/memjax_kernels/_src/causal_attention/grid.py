"""The grid of the kernels of causal attention, and what both compute alike.

A block has 128 lanes, two packed heads of 64 channels, which hide each other's latency.
Scores have keys along the rows, so that a number per query is a row and its broadcast
is free; sums over keys run on the matrix unit, from transposed tokens. Scores of a head
are products of all lanes with the other head's queries set to zero.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memjax_kernels._src.causal_attention.blocks import Part, Plan, Steps, plan
from memjax_kernels._src.common.packs.tiles import F32, LANES

# The bytes of VMEM that blocks and scores take, and of each token of a sequence: its
# keys and values, fetched twice in turn, or the gradient of its query, added up in
# float32 and written out twice in turn.
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


class Grid:
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

    def call(self, kernel, name, given, outputs, scratch) -> Any:
        """Runs kernel(plan, steps, ...); `given` and `outputs` are (block, array)."""
        in_specs, arrays = zip(*given, strict=True)
        out_specs, shapes = zip(*outputs, strict=True)
        count, window = len(Steps._fields), self.static.window

        def with_steps(*refs):
            kernel(self.plan, Steps(*refs[:count]), *refs[count:])

        return pl.pallas_call(
            with_steps,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=count,
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
            name=kernel_name(name, window),
        )(*self.plan.steps, *arrays)


def kernel_name(name: str, window: int | None) -> str:
    """The name of a kernel's call, one for each window of a model."""
    return f"causal_attention_{name}" + (f"_window_{window}" if window else "")


def by_kind(plan: Plan, kind: Any, body: Any) -> None:
    """Runs body(number) for the kind of a step."""
    if len(plan.distances) == 1:
        # A branch would hide the first step's loads from the compiler.
        body(0)
        return
    for number in range(len(plan.distances)):
        pl.when(kind == number)(lambda number=number: body(number))


def hide(plan: Plan, part: Part, weights: Any) -> Any:
    """Weights of a part, keys along the rows, with zeros where a key is hidden."""
    if part.distance is None:
        return weights
    columns, tile = [], plan.tile
    for start in range(0, weights.shape[1], tile):
        column, distance = weights[:, start : start + tile], part.distance + start
        if plan.hides(distance, tile):
            column = jnp.where(seen(column.shape, distance, plan.window), column, 0.0)
        columns.append(column)
    return jnp.concatenate(columns, axis=1)


def seen(shape: tuple[int, int], distance: Any, window: int | None) -> Any:
    """Which queries, along the columns, see which keys, along the rows."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
    distance = column - row + distance
    found = distance >= 0
    return found if window is None else found & (distance < window)


def dot(x: Any, y: Any, form: Any) -> Any:
    """A product with float32 sums."""
    return jax.lax.dot_general(x, y, form, preferred_element_type=F32)


def transposed(x: Any) -> Any:
    """x^T, in float32 on the way: registers of bfloat16 hold two rows."""
    return x.astype(F32).T.astype(x.dtype)


def of_head(x: Any, channels: slice) -> Any:
    """x with zeros in all other channels."""
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    own = (lane >= channels.start) & (lane < channels.stop)
    return jnp.where(own, x, jnp.zeros_like(x))


def head_products(x: Any, y: Any) -> tuple[Any, ...]:
    """Of each head, the products of the rows of x and y as one row."""
    product = (x.astype(F32) * y.astype(F32)).T
    return tuple(jnp.sum(product[c], axis=0, keepdims=True) for c in HEADS)
