"""The GPU kernels of Lattice with C = 1: interpreted, exported, and compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax_kernels import lattice, lattice_state
from memjax_kernels._src.lattice import Rule
from memjax_kernels._src.lattice.chunked import in_chunks
from memjax_kernels._src.lattice.pallas_gpu import lattice_gpu, unsupported
from memjax_kernels._src.lattice.pallas_gpu.inputs import BLOCK

SLOTS = WIDTH = 64


def draw(batch, time, heads, dtype) -> Any:
    """Tokens q, k, v, gamma, and the memories to start from and after a reset."""
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def token(width):
        return unit(normal(batch, time, heads, width)).astype(dtype)

    tokens = token(SLOTS), token(SLOTS), token(WIDTH)
    gamma = 2 * jax.nn.sigmoid(normal(batch, time, heads))

    def memory():
        return unit(normal(batch, heads, SLOTS, WIDTH))

    return *tokens, gamma, memory(), memory()


def by_kernels(form, variant, reset, q, k, v, gamma, start, empty):
    """The memory after the tokens, and their reads."""
    states = lattice_state(start, 1), reset, lattice_state(empty, 1)
    state, y = in_chunks(form, q, k, v, gamma, None, *states, Rule(variant))
    return state.start, y


def by_reference(variant, reset, q, k, v, gamma, start, empty):
    state, y = lattice(
        q,
        k,
        v,
        gamma,
        None,
        lattice_state(start, 1),
        variant=variant,
        chunk_size=1,
        reset=reset,
        empty=lattice_state(empty, 1),
        implementation="reference",
    )
    return state.start, y


def pull(function, arguments):
    """Results, and gradients of everything for random cotangents."""

    @jax.jit
    def run(arguments):
        values, back = jax.vjp(function, *arguments)
        keys = jax.random.split(jax.random.key(7))
        weights = tuple(
            jax.random.normal(key, x.shape).astype(x.dtype)
            for x, key in zip(values, keys, strict=True)
        )
        return values, back(weights)

    return run(arguments)


# The first goes from block to block, with resets within a group and where one starts.
@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, time, resets, dtype, tolerance",
    [
        ("dec", BLOCK + 9, [(0, 7), (0, BLOCK), (1, 0), (1, 16)], jnp.float32, 2e-6),
        ("enc", 9, [], jnp.float32, 2e-6),
        ("sim", 9, [], jnp.bfloat16, 5e-3),
    ],
)
def test_values_and_gradients_agree_with_the_token_loop(
    gpu, variant, time, resets, dtype, tolerance
):
    b = 2 if resets else 1
    arguments = draw(b, time, 1, dtype)
    reset = None
    if resets:
        reset = (
            jnp.zeros((b, time), bool).at[tuple(zip(*resets, strict=True))].set(True)
        )
    form = functools.partial(lattice_gpu, interpret=gpu.interpreter())
    kernels = functools.partial(by_kernels, form, variant, reset)
    reference = functools.partial(by_reference, variant, reset)
    expected = pull(reference, arguments)
    actual = pull(kernels, arguments)
    gpu.close(actual, expected, tolerance)
    assert actual[0][1].dtype == dtype
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    # A memory is emptied, or nothing goes through the empty one.
    assert np.any(expected[1][-1]) == bool(resets)


def gradient(variant, arguments, reset):
    """Of everything, both kernels included."""

    def loss(arguments):
        values = by_kernels(lattice_gpu, variant, reset, *arguments)
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in values)

    return jax.grad(loss)(arguments)


def compiling():
    b, t = 2, BLOCK + 3
    return draw(b, t, 2, jnp.bfloat16), jnp.zeros((b, t), bool)


@pytest.mark.slow
def test_exports_for_cuda(gpu):
    module = gpu.exported(functools.partial(gradient, "dec"), *compiling())
    assert module.count("mosaic_gpu_v2(") == 2 or module.count("mosaic_gpu(") == 2


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dec", "enc"])
def test_the_gradient_compiles(gpu, uncached, variant):
    text = gpu.compiled(functools.partial(gradient, variant), *compiling())
    assert "memjax_lattice_exact_backward" in text


def test_unsupported_reasons():
    def why(width=64, dtype=jnp.float32, **options):
        q, k, v = draw(1, 2, 1, dtype)[:3]
        return unsupported(q, k, v[..., :width], 1, Rule(**options))

    assert why() == why(dtype=jnp.bfloat16) == ""
    assert "q must be bfloat16 or float32" in why(dtype=jnp.float16)
    assert "M and V must be 64" in why(width=32)
    assert "normalize=True" in why(normalize=False)
    assert "forget=None" in why(forget="l1")
