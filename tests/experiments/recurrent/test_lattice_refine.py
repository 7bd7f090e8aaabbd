"""The exact recurrence by refinement of chunks, against a token loop in float64."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.recurrent.chunks.lattice_refine import lattice_refined
from memjax_kernels import lattice_init_state, lattice_state

B, T, H, M, V = 2, 13, 1, 4, 6
refined = jax.jit(
    lattice_refined, static_argnames=("variant", "chunk_size", "tolerance")
)


def draw():
    """Steps so large that gates 1 + w p are negative at times."""
    random = np.random.RandomState(0)
    q, k = random.standard_normal((2, B, T, H, M))
    v, gamma = random.standard_normal((B, T, H, V)), 4 * random.rand(B, T, H)
    start = random.standard_normal((B, H, M, V))
    return q, k, v, gamma, start / np.linalg.norm(start, axis=-1, keepdims=True)


def token_loop(q, k, v, gamma, start, variant):
    """Equations 13 and 14; also the least 1 + w p that was met."""
    memory, reads, least = start.copy(), np.zeros(v.shape), np.inf
    for b, t, h in np.ndindex(B, T, H):
        slots, key, value = memory[b, h], k[b, t, h], v[b, t, h]
        match variant:
            case "dec":
                out, code = key @ slots - value, key
            case "enc":
                out, code = value, slots @ value - key
            case _:
                out, code = -value, key
        write, along = gamma[b, t, h] * code, slots @ out
        least = min(least, np.min(1 + write * along))
        slots = slots - write[:, None] * (out - along[:, None] * slots)
        memory[b, h] = slots / np.linalg.norm(slots, axis=-1, keepdims=True)
        reads[b, t, h] = q[b, t, h] @ memory[b, h]
    return memory, reads, least


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dec", "enc", "sim"])
def test_refined_chunks_are_the_exact_recurrence(variant):
    q, k, v, gamma, start = draw()
    memory, reads, least = token_loop(q, k, v, gamma, start, variant)
    assert least < 0
    with jax.enable_x64(True):
        tokens = [jnp.asarray(x) for x in (q, k, v, gamma)]
        before = lattice_state(jnp.asarray(start), 1)
        options = {"variant": variant, "chunk_size": 5}
        state, y, rounds = refined(*tokens, before, tolerance=1e-12, **options)
        np.testing.assert_allclose(y, reads, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(state.start, memory, rtol=1e-9, atol=1e-9)
        assert state.chunk_size == 1 and rounds.shape == (3,)
        # One round more than tokens would change nothing.
        assert np.all((rounds >= 1) & (rounds <= 5))


def test_a_loose_tolerance_ends_after_one_round():
    *tokens, _ = draw()
    tokens = [jnp.asarray(x, jnp.float32) for x in tokens]
    options = {"variant": "sim", "chunk_size": 5}
    _, y, rounds = refined(*tokens, tolerance=10.0, **options)
    start = np.float64(lattice_init_state(B, H, M, V, 1).start)
    reads = token_loop(*draw()[:4], start, "sim")[1]
    assert rounds.tolist() == [1, 1, 1]
    # A round makes one token of each chunk exact, and not the last.
    np.testing.assert_allclose(y[:, 0], reads[:, 0], rtol=1e-4, atol=1e-5)
    assert np.abs(y[:, 4] - reads[:, 4]).max() > 1e-3


@pytest.mark.slow
def test_small_steps_take_few_rounds_and_float32_is_kept():
    q, k, v, gamma, _ = draw()
    start = lattice_init_state(B, H, M, V, 1).start
    memory, reads, _ = token_loop(q, k, v, gamma / 50, np.float64(start), "dec")
    tokens = [jnp.asarray(x, jnp.float32) for x in (q, k, v, gamma / 50)]
    state, y, rounds = refined(*tokens, chunk_size=13, tolerance=1e-6)
    np.testing.assert_allclose(y, reads, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.start, memory, rtol=1e-5, atol=1e-5)
    assert rounds.max() <= 8 and y.dtype == state.start.dtype == jnp.float32


def test_bad_arguments_are_named():
    q, k, v, gamma, _ = (jnp.asarray(x, jnp.float32) for x in draw())
    for match, options in (
        ("tolerance must be at least 0, got -1", {"tolerance": -1.0}),
        ("chunk_size must be at least 1, got 0", {"chunk_size": 0}),
        ("variant must be one of", {"variant": "sum"}),
        ("chunk_size=1, got 4", {"state": lattice_init_state(B, H, M, V, 4)}),
    ):
        with pytest.raises(ValueError, match=match):
            inspect.unwrap(lattice_refined)(q, k, v, gamma, **options)
