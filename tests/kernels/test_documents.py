"""Documents in a row by their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import document_starts, ssd

IDS = np.array([[0, 0, 1, 1, 1], [4, 5, 5, 9, 9]])


def test_each_document_is_read_as_if_alone():
    draws = np.random.default_rng(0)
    q, k, v = draws.standard_normal((3, 2, 5, 1, 3), np.float32)
    g = -draws.random((2, 5, 1), np.float32)
    memory = draws.standard_normal((2, 1, 3, 3), np.float32)

    @jax.jit
    def packed(ids, *given):
        return ssd(*given, reset=document_starts(ids))

    read = jax.jit(ssd)
    state, y = jax.device_get(packed(IDS, q, k, v, g, memory))
    starts = [[0, 0, 1, 0, 0], [0, 1, 0, 1, 0]]
    np.testing.assert_array_equal(document_starts(jnp.asarray(IDS)), starts)
    for row, ids in enumerate(IDS):
        after = memory
        for number in np.unique(ids):
            one = (slice(row, row + 1), np.flatnonzero(ids == number))
            # The first of a row goes on with the memory that is given.
            before = memory[row : row + 1] * np.float32(number == ids[0])
            after, alone = read(q[one], k[one], v[one], g[one], before)
            np.testing.assert_allclose(y[one], alone, atol=1e-6)
        np.testing.assert_allclose(state[row], after[0], atol=1e-6)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 2, 1]], "must not fall along a row, got 1 after 2 at token 2 of row 0"),
        ([[0.0, 1.0]], r"must be integers \[B, T\], got float32\[1, 2\]"),
        ([0, 1], r"must be integers \[B, T\], got int32\[2\]"),
    ],
)
def test_numbers_that_are_none_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        document_starts(jnp.asarray(ids))
