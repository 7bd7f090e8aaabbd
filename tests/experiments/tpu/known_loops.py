"""Programs whose loops are known, which a test compiles for a TPU and counts."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from experiments.tpu.case import Case, Program

GRID, MIDDLE, INNER, SCANNED = (4, 6), 7, 5, 37
SIDE = 128


def _body(x, y, scratch):
    """Two nested loops; the first step of each row empties the scratch."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        scratch[...] = jnp.zeros_like(scratch)

    def middle(_, carry):
        carry = lax.fori_loop(
            0, INNER, lambda _, c: jnp.tanh(c) * 1.5 + scratch[...], carry
        )
        return carry @ carry

    y[...] = lax.fori_loop(0, MIDDLE, middle, x[...])


def kernel() -> Program:
    """A grid of 24 steps with a loop in a loop."""
    block = pl.BlockSpec((SIDE, SIDE), lambda i, j: (i, j))
    whole = jax.ShapeDtypeStruct((GRID[0] * SIDE, GRID[1] * SIDE), jnp.float32)
    call = pl.pallas_call(
        _body,
        grid=GRID,
        in_specs=[block],
        out_specs=block,
        out_shape=whole,
        scratch_shapes=[pltpu.VMEM((SIDE, SIDE), jnp.float32)],
        name="known_loops",
    )
    return Program(call, (whole,))


def scan() -> Program:
    """A product in each of 37 steps, then a branch with or without two products."""

    def function(x):
        y, _ = lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, None, length=SCANNED)
        return lax.cond(y.sum() > 0, lambda c: (c @ c) @ c, jnp.negative, y)

    return Program(function, (jax.ShapeDtypeStruct((512, 512), jnp.bfloat16),))


def table() -> dict[str, Case]:
    """Both by name."""
    return {f.__name__: Case(f, units=1, unit="call") for f in (kernel, scan)}
