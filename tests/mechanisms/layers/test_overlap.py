"""Step sizes of a chunk, bounded by the overlap of their keys."""

from typing import Any

import jax
import numpy as np

from memjax.mechanisms.layers import overlap
from memjax.mechanisms.layers.overlap import OpenChunk

B, T, H, K, C = 2, 11, 2, 3, 4
numbers: Any = np.asarray
EMPTY = OpenChunk(
    numbers(np.zeros((B, H, C, K), "f4")), numbers(np.zeros((B, H, C), "f4"))
)
START = np.zeros(B, np.int32)
bounded_step, bounded_steps = map(
    jax.jit, (overlap.bounded_step, overlap.bounded_steps)
)


def draw():
    random = np.random.default_rng(0)
    k = random.standard_normal((B, T, H, K), np.float32)
    gamma = random.random((B, T, H), np.float32)
    return k / np.linalg.norm(k, axis=-1, keepdims=True), gamma


def test_steps_of_a_chunk_are_the_formula():
    k, gamma = draw()
    _, _, found = bounded_steps(EMPTY, START, k, gamma)
    expected = gamma.copy()
    for t in range(T):
        for s in range(t - t % C, t):
            alike = (k[:, s] * k[:, t]).sum(axis=-1) ** 2
            expected[:, t] *= 1 - gamma[:, s] * alike
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_repeated_key_is_corrected_once_orthogonal_key_fully():
    gamma = draw()[1][:, :C]
    same = np.full((B, C, H, K), K**-0.5, "f4")
    _, _, found = bounded_steps(EMPTY, START, same, gamma)
    whole = 1 - np.prod(1 - gamma, axis=1)
    np.testing.assert_allclose(found.sum(axis=1), whole, rtol=1e-5)
    apart = np.broadcast_to(np.eye(K, dtype="f4")[None, :, None], (B, K, H, K))
    _, _, found = bounded_steps(EMPTY, START, apart, gamma[:, :K])
    np.testing.assert_allclose(found, gamma[:, :K], rtol=1e-6)


def test_segments_continue_a_chunk_at_each_elements_place():
    k, gamma = draw()
    # The second element begins two tokens later, and so stands elsewhere in its chunk.
    states, found = [(EMPTY, START)], []
    for t in range(T):
        before, position = states[-1]
        going = (t >= np.array([0, 2]))[:, None, None]
        steps, step = bounded_step(before, position, k[:, t], gamma[:, t])
        here = (np.arange(C)[None] == position[:, None])[:, None, :, None]
        keys = np.where(here, k[:, t][:, :, None], before.keys)
        position = position + going[:, 0, 0]
        # After the last token of a chunk comes the start of the next.
        keys = np.where((position < C)[:, None, None, None], keys, 0)
        keys = np.where(going[..., None], keys, before.keys)
        after = OpenChunk(numbers(keys), numbers(np.where(going, steps, before.steps)))
        states.append((after, position % C))
        found.append(step)
    for split in (2, 5, T - 1):
        rest = k[:, split:], gamma[:, split:]
        steps, _, bounded = bounded_steps(*states[split], *rest)
        expected = np.stack(found[split:], axis=1)
        np.testing.assert_allclose(bounded, expected, rtol=1e-5)
        np.testing.assert_allclose(steps, states[-1][0].steps, atol=1e-6)
