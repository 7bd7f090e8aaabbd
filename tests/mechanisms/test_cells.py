"""Cells without a block around them: segments equal steps."""

import jax
import numpy as np
import pytest

from memjax.mechanisms.cells.base import CellConfig
from tests.mechanisms.test_contract import (
    CONFIGS,
    LENGTH,
    ROWS,
    B,
    D,
    T,
    assert_close,
)

CELLS = {
    name: config for name, config in CONFIGS.items() if isinstance(config, CellConfig)
}
CELL_ROWS = [row for row in ROWS if row.values[0] in CELLS]


def make_inputs(config):
    """q and k of unit norm, v and x, as a layer gives them."""
    heads, keys, values = config.num_heads, config.key_dim, config.value_dim
    shapes = ((heads, keys), (heads, keys), (heads, values), (D,))
    random = np.random.default_rng(1)
    q, k, v, x = (random.standard_normal((B, T, *s), np.float32) for s in shapes)
    q, k = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (q, k))
    return q, k, v, x


@pytest.mark.parametrize("name", CELL_ROWS)
def test_two_segments_equal_steps(name):
    cell = CELLS[name].cell()
    assert cell.unit_norm
    inputs = make_inputs(CELLS[name])
    params = jax.jit(cell.init_params)(jax.random.key(0))
    empty = cell.init_state(B)
    assert all(leaf.shape[0] == B for leaf in jax.tree.leaves(empty))

    step, outputs, states = jax.jit(cell.step), [], [empty]
    for t in range(T):
        memory, y = step(params, states[-1], *(z[:, t] for z in inputs))
        states.append(memory)
        outputs.append(y)
    expected = np.stack(outputs, axis=1)

    # The cut lies inside a chunk.
    apply = jax.jit(cell.apply)
    half, first = apply(params, empty, *(z[:, :LENGTH] for z in inputs))
    whole, second = apply(params, half, *(z[:, LENGTH:] for z in inputs))
    assert_close((half, first), (states[LENGTH], expected[:, :LENGTH]))
    assert_close((whole, second), (states[T], expected[:, LENGTH:]))
