"""Step sizes of a chunk, bounded by the overlap of their keys, token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.mechanisms.layers.overlap import OpenChunk, bounded_step
from memjax_kernels._src.trellis.functions import bounded

B, T, H, K, C = 2, 11, 2, 3, 4


def test_steps_are_those_of_whole_chunks():
    random = np.random.default_rng(0)
    k = random.standard_normal((B, T, H, K), np.float32)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gamma: Any = random.random((B, T, H), np.float32)
    keys, steps = np.zeros((B, H, C, K), "f4"), np.zeros((B, H, C), "f4")
    for t in range(T):
        place = t % C
        if place == 0:
            # After the last token of a chunk comes the start of the next.
            assert not np.any(steps)
            keys = np.zeros_like(keys)
        position = np.full(B, place, np.int32)
        opened = OpenChunk(jnp.asarray(keys), jnp.asarray(steps))
        steps, found = jax.jit(bounded_step)(opened, position, k[:, t], gamma[:, t])
        keys[:, :, place] = k[:, t]
        chunk = slice(t - place, t + 1)
        of_chunk = k[:, chunk].swapaxes(1, 2), gamma[:, chunk].swapaxes(1, 2)
        expected = jax.jit(bounded)(*of_chunk)[..., -1]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
