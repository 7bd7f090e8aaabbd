"""Lattice with C = 1 on a TPU for packs of heads, interpreted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import lattice_state
from memjax_kernels._src.lattice import Rule, packed, tpu_token
from memjax_kernels._src.lattice.chunked import in_chunks
from memjax_kernels._src.lattice.pallas_tpu import lattice_tpu
from memjax_kernels._src.lattice.tpu_token import equations
from memjax_kernels._src.lattice.xla import lattice_xla
from tests.kernels.distances import close, distances
from tests.kernels.lattice.against_xla import (
    INTERPRETED,
    PLAINLY_INTERPRETED,
    both,
    draw,
    rows,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        # Two packs of two heads; a head of a whole register; four of fewer slots.
        ("dec", (2, 19, 4, 64, 64)),
        ("enc", (1, 5, 1, 128, 128)),
        ("sim", (3, 17, 4, 32, 64)),
    ],
)
def test_values_and_gradients_agree_with_xla(variant, sizes):
    b, t, h, m, v = sizes
    state = lattice_state(rows(2, b, h, m, v).at[0, 0, 1].set(0), 1)
    reset = np.zeros((b, t), bool)
    reset[-1, 3] = reset[0, t - 1] = True
    # With other seeds a gradient of one head may be small, and its rounding large.
    arguments = draw(b, t, h, m, v, seed=6), state, reset, rows(3, b, h, m, v)
    expected = both(lattice_xla, variant, *arguments)
    # The rule is one of equations: one of them shows that memory is written.
    form = INTERPRETED if variant == "enc" else PLAINLY_INTERPRETED
    close(both(form, variant, *arguments), expected, 5e-6)
    d_tokens, d_start, _, d_empty = expected[1]
    leaves = jax.tree.leaves((d_tokens, d_start, d_empty))
    assert all(np.abs(x).max() > 1e-3 for x in leaves)


# Relative errors of the XLA form in bfloat16, in thousandths, for the tokens of the
# test below: of reads and the memory, and of gradients of tokens and both memories.
XLA_ERRORS = 1.63, 0, 2.03, 1.96, 2.36, 1.61, 0.85, 0


@pytest.mark.slow
def test_bfloat16_error_is_no_larger_than_xla():
    b, t, h, d = 1, 5, 1, 128
    state = lattice_state(rows(2, b, h, d, d), 1)
    low = draw(b, t, h, d, d, jnp.bfloat16)
    high: Any = tuple(x.astype(jnp.float32) for x in low)
    # The program of the test above; which memory is not written is tested there.
    arguments = state, np.zeros((b, t), bool), state.start
    exact = both(lattice_xla, "enc", high, *arguments)
    kernel = both(PLAINLY_INTERPRETED, "enc", low, *arguments)
    found = distances(kernel, exact)
    for (path, distance), xla in zip(found.items(), XLA_ERRORS, strict=True):
        assert distance <= 1.05e-3 * xla + 1e-4, (path, distance, xla)
    assert kernel[0][0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_gradients_of_gradients_differentiate_the_same_function(monkeypatch):
    """The XLA form of the kernels' own arguments is the op: `gradients.of_kernels`."""
    b, t, h, m, v = 2, 7, 2, 64, 64
    before, blank = (lattice_state(rows(seed, b, h, m, v), 1) for seed in (2, 3))
    reset = np.arange(t) == np.array([4, t])[:, None]
    given = (*draw(b, t, h, m, v), None, before, reset, blank)

    def in_xla(static, *arguments):
        return tpu_token._in_xla(static.options, *arguments)

    monkeypatch.setattr(tpu_token, "_kernels", in_xla)

    def run(form):
        last: Any = jax.jit(functools.partial(in_chunks, form, rule=Rule("dec")))
        return last(*given)

    close(run(lattice_tpu), run(lattice_xla), 1e-6)


def test_channels_are_summed_in_all_lanes_of_their_head():
    x = jax.random.normal(jax.random.key(0), (2, 8, 128))
    found = packed.sum_channels(x, 2).reshape(2, 8, 2, 64)
    expected = np.asarray(x, np.float64).reshape(2, 8, 2, 64).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, expected + 0 * found, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_slots_of_rows_and_back(count):
    """A number a slot in all lanes of its head; the transpose sums over these lanes."""
    row = jax.random.normal(jax.random.key(0), (3, 1, 64))
    row = row.astype(jnp.bfloat16).astype(jnp.float32) if count == 1 else row
    wide = equations.slots_of_rows(row, 128, 2, count)
    expected = np.repeat(np.asarray(row).reshape(3, 2, 32).swapaxes(1, 2), 64, axis=-1)
    np.testing.assert_allclose(wide, expected, rtol=1e-6)
    d = jax.random.normal(jax.random.key(1), wide.shape)
    back = equations.rows_of_slots(d, 64, 2, 3)
    np.testing.assert_allclose(jnp.vdot(back, row), jnp.vdot(d, wide), rtol=1e-4)
