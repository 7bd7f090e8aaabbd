"""Step sizes of a chunk, bounded by the overlap of their keys."""

import jax
import jax.numpy as jnp
import numpy as np

from memjax.mechanisms.layers.overlap import OpenChunk, bounded_step, bounded_steps

B, T, H, K, C = 2, 11, 2, 3, 4
EMPTY = OpenChunk(jnp.zeros((B, H, C, K)), jnp.zeros((B, H, C)))


def draw():
    k = jax.random.normal(jax.random.key(0), (B, T, H, K))
    gamma = jax.random.uniform(jax.random.key(1), (B, T, H))
    return k / jnp.linalg.norm(k, axis=-1, keepdims=True), gamma


def test_steps_of_a_chunk_are_the_formula():
    k, gamma = draw()
    _, _, found = bounded_steps(EMPTY, jnp.zeros(B, jnp.int32), k, gamma)
    expected = np.asarray(gamma).copy()
    for t in range(T):
        for s in range(t - t % C, t):
            alike = (k[:, s] * k[:, t]).sum(axis=-1) ** 2
            expected[:, t] *= 1 - gamma[:, s] * alike
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_repeated_key_is_corrected_once_orthogonal_key_fully():
    gamma = draw()[1][:, :C]
    same = jnp.ones((B, C, H, K)) / K**0.5
    _, _, found = bounded_steps(EMPTY, jnp.zeros(B, jnp.int32), same, gamma)
    whole = 1 - jnp.prod(1 - gamma, axis=1)
    np.testing.assert_allclose(found.sum(axis=1), whole, rtol=1e-5)
    apart = jnp.broadcast_to(jnp.eye(K)[None, :, None], (B, K, H, K))
    _, _, found = bounded_steps(EMPTY, jnp.zeros(B, jnp.int32), apart, gamma[:, :K])
    np.testing.assert_allclose(found, gamma[:, :K], rtol=1e-6)


def test_segments_continue_a_chunk_at_each_elements_place():
    k, gamma = draw()
    # The second element begins two tokens later, and so stands elsewhere in its chunk.
    states, found = [(EMPTY, jnp.zeros(B, jnp.int32))], []
    for t in range(T):
        before, position = states[-1]
        going = (t >= jnp.array([0, 2]))[:, None, None]
        steps, step = bounded_step(before, position, k[:, t], gamma[:, t])
        here = (jnp.arange(C)[None] == position[:, None])[:, None, :, None]
        keys = jnp.where(here, k[:, t][:, :, None], before.keys)
        position = position + going[:, 0, 0]
        # After the last token of a chunk comes the start of the next.
        keys = jnp.where((position < C)[:, None, None, None], keys, 0)
        keys = jnp.where(going[..., None], keys, before.keys)
        after = OpenChunk(keys, jnp.where(going, steps, before.steps))
        states.append((after, position % C))
        found.append(step)
    for split in (2, 5, T - 1):
        rest = k[:, split:], gamma[:, split:]
        steps, _, bounded = bounded_steps(*states[split], *rest)
        expected = jnp.stack(found[split:], axis=1)
        np.testing.assert_allclose(bounded, expected, rtol=1e-5)
        np.testing.assert_allclose(steps, states[-1][0].steps, atol=1e-6)
