"""Steps of a chunk that leave each other what their keys have in common."""

import jax
import jax.numpy as jnp
import numpy as np

from memjax.mechanisms.layers.overlap import (
    Written,
    bounded_step,
    bounded_steps,
    nothing_written,
)

B, T, H, K, C = 2, 11, 2, 3, 4
EMPTY = nothing_written(B, C, H, K)


def draw():
    k = jax.random.normal(jax.random.key(0), (B, T, H, K))
    gamma = jax.random.uniform(jax.random.key(1), (B, T, H))
    return k / jnp.linalg.norm(k, axis=-1, keepdims=True), gamma


def test_steps_of_a_chunk_are_the_formula():
    k, gamma = draw()
    _, found = bounded_steps(EMPTY, jnp.zeros(B, jnp.int32), k, gamma)
    expected = np.asarray(gamma).copy()
    for t in range(T):
        for s in range(t - t % C, t):
            alike = (k[:, s] * k[:, t]).sum(axis=-1) ** 2
            expected[:, t] *= 1 - gamma[:, s] * alike
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_key_that_repeats_is_corrected_once_and_an_orthogonal_one_wholly():
    gamma = draw()[1][:, :C]
    same = jnp.ones((B, C, H, K)) / K**0.5
    _, found = bounded_steps(EMPTY, jnp.zeros(B, jnp.int32), same, gamma)
    whole = 1 - jnp.prod(1 - gamma, axis=1)
    np.testing.assert_allclose(found.sum(axis=1), whole, rtol=1e-5)
    apart = jnp.broadcast_to(jnp.eye(K)[None, :, None], (B, K, H, K))
    _, found = bounded_steps(EMPTY, jnp.zeros(B, jnp.int32), apart, gamma[:, :K])
    np.testing.assert_allclose(found, gamma[:, :K], rtol=1e-6)


def test_segments_continue_a_chunk_at_each_elements_place():
    k, gamma = draw()
    written, position, steps = EMPTY, jnp.zeros(B, jnp.int32), []
    # The second element begins two tokens later.
    starts = jnp.array([0, 2])
    for t in range(T):
        moved, step = bounded_step(written, position, k[:, t], gamma[:, t])
        going = t >= starts
        written = Written(
            *(
                jnp.where(going.reshape(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(moved, written, strict=True)
            )
        )
        position = (position + going) % C
        steps.append(step)
        if t == 4:
            apart = written, position
    after, found = bounded_steps(*apart, k[:, 5:], gamma[:, 5:])
    np.testing.assert_allclose(found, jnp.stack(steps[5:], axis=1), rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), after, written
    )
