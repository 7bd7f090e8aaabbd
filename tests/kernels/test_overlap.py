"""Overlap of a chunk's keys: the formula and the kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from memjax_kernels import overlap, overlap_with_keys
from memjax_kernels._src.overlap import pallas_tpu
from tests.kernels.distances import close
from tests.kernels.on_tpu import INTERPRETER, needs_libtpu

KERNEL = functools.partial(pallas_tpu.overlap_tpu, interpret=INTERPRETER)
# Faster, for what does not depend on when memory is written.
LIGHTER = functools.partial(pallas_tpu.overlap_tpu, interpret=True)


def draw(seed, time, heads, width, dtype=jnp.float32):
    """Keys of unit norm, of which every third is the first once more, and rates."""
    draws = np.random.default_rng(seed)
    k = draws.standard_normal((2, time, heads, width))
    k[:, ::3] = k[:, :1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gamma = draws.uniform(size=(2, time, heads))
    # A rate of 1 leaves nothing to the next of the same keys.
    gamma[:, ::5] = 1.0
    return jnp.asarray(k, dtype), jnp.asarray(gamma, jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def with_gradients(form, chunk_size, k, gamma):
    """What the form gives, and gradients through the keys that it gives, too."""
    found, pull = jax.vjp(functools.partial(form, chunk_size=chunk_size), k, gamma)
    draws = np.random.default_rng(9)
    weights = [draws.standard_normal(x.shape).astype(x.dtype) for x in found]
    return found, pull(type(found)(weights))


def test_overlap_equals_product_over_chunk():
    k, gamma = draw(0, 7, 2, 3)
    found = overlap(k, gamma, chunk_size=3)
    k, gamma = map(np.asarray, (k, gamma))
    expected = np.ones(gamma.shape)
    for t in range(7):
        for s in range(t - t % 3, t):
            alike = (k[:, s] * k[:, t]).sum(axis=-1) ** 2
            expected[:, t] *= 1 - gamma[:, s] * alike
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("time", "heads", "chunk_size"),
    # Blocks and a part of one.
    [(150, (4, 32), 16), (101, (2, 128), 64)],
)
def test_kernels_equal_xla(time, heads, chunk_size):
    tokens = draw(time, time, *heads)
    assert pallas_tpu.unsupported(tokens[0], chunk_size) == ""

    def run(form):
        return with_gradients(form, chunk_size, *tokens)

    kernel = KERNEL if time == 150 else LIGHTER
    close(run(kernel), run(overlap_with_keys), 1e-4)


@pytest.mark.slow
def test_bfloat16_keys_have_float32_products():
    tokens = draw(1, 64, 2, 64, jnp.bfloat16)

    def run(form):
        return with_gradients(form, 16, *tokens)

    (found, gradients), (expected, others) = run(LIGHTER), run(overlap_with_keys)
    close(found, expected, 1e-5)
    close(gradients, others, 1e-2)


def test_a_gradient_of_the_gradient_is_that_of_xla():
    k, gamma = draw(2, 64, 2, 64)

    def twice(form):
        once = jax.grad(lambda k: (form(k, gamma, chunk_size=16)[1] ** 2).sum())
        return jax.jit(jax.grad(lambda k: (once(k) ** 2).sum()))(k)

    close(twice(LIGHTER), twice(overlap_with_keys), 1e-4)


@pytest.mark.slow  # Fast tests are also run with all annotations checked.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"gamma": jnp.ones((2, 7, 3))}, "gamma"),
        ({"gamma": jnp.full((2, 7, 2), 1.5)}, r"gamma .*1\.5"),
        ({"implementation": "pallas_tpu"}, "it needs a tpu"),
        ({"implementation": "fast"}, "implementation of overlap must be None or one"),
    ],
)
def test_bad_input_is_refused(change, message):
    k, gamma = draw(0, 7, 2, 3)
    with pytest.raises(ValueError, match=message):
        overlap(**({"k": k, "gamma": gamma, "chunk_size": 4} | change))


@pytest.mark.parametrize(
    ("sizes", "dtype", "chunk_size", "reason"),
    [
        ((63, 2, 64), jnp.float32, 16, "63 tokens are less than a block"),
        ((64, 2, 64), jnp.float16, 16, "k must be float32 or bfloat16"),
        ((256, 2, 64), jnp.float32, 129, "a chunk of 129 is more than 128 tokens"),
        ((64, 3, 64), jnp.float32, 16, "no number of 3 heads of 64 fills 128 lanes"),
    ],
)
def test_unsupported_reasons(sizes, dtype, chunk_size, reason):
    k = jax.ShapeDtypeStruct((2, *sizes), dtype)
    assert reason in pallas_tpu.unsupported(k, chunk_size)


@needs_libtpu
def test_the_gradient_compiles():
    devices = np.array(topologies.get_topology_desc("v5p:2x2x1", "tpu").devices)
    mesh = Mesh(devices.reshape(2, 2), ("data", "tensor"))
    place = NamedSharding(mesh, P("data", None, "tensor"))
    shaped = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x in draw(0, 128, 4, 64, jnp.bfloat16)
    ]
    with jax.set_mesh(mesh):
        text = str(
            jax.jit(
                jax.grad(
                    lambda k, gamma: overlap(k, gamma, chunk_size=16).sum(), (0, 1)
                )
            )
            .lower(*shaped)
            .compile()
            .as_text()
        )
    assert "overlap_backward" in text and "all-gather" not in text
