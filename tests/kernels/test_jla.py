"""Linear ops by jax-linear-attention: refusals, and equal values where it is there."""

import functools
import importlib
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax_kernels
from experiments.lab import ops
from memjax_kernels._src.common import implementations
from memjax_kernels._src.linear import jla

INSTALLED = importlib.util.find_spec("jla") is not None
HOPPER = INSTALLED and not implementations.needs("gpu")


def arguments(op, dtype, time=70):
    """Tokens with two value heads a key head, a memory, and documents' starts."""
    shape = ops.Shape(2, time, 4, 64, key_heads=2)
    tokens = ops.inputs(op, shape, dtype).values()
    state = jax.random.normal(jax.random.key(1), (2, 4, 64, 64)) / 8
    reset = jnp.zeros((2, time), bool).at[0, 3].set(True).at[1, (0, 40)].set(True)
    return (*tokens, state), reset


def results(function, given, reset):
    """State, reads and gradients of all arguments."""

    def loss(*given):
        state, y = function(*given, reset)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))) + jnp.sum(state**2), (state, y)

    grads, found = jax.grad(loss, tuple(range(len(given))), has_aux=True)(*given)
    return jax.tree.leaves((found, grads))


@pytest.fixture(autouse=True)
def _ranks():
    """jax-linear-attention promotes ranks, which the other tests refuse."""
    with jax.numpy_rank_promotion("allow"):
        yield


def ours(op, implementation):
    function = getattr(memjax_kernels, op)

    def run(*given):
        *tokens, reset = given
        return function(*tokens, reset=reset, implementation=implementation)

    return run


@pytest.mark.parametrize("op", jla.KINDS)
def test_what_cannot_run_here_is_refused_with_the_reason(op):
    given, reset = arguments(op, "bfloat16", time=1)
    if HOPPER:
        given = [x.astype(jnp.float32) for x in given]
    says = (
        "no kernel"
        if HOPPER
        else "a gpu, jax runs on"
        if INSTALLED
        else "not installed"
    )
    with pytest.raises(ValueError, match=f"implementation='jla' of {op} .*{says}"):
        ours(op, "jla")(*given, reset)


@pytest.mark.skipif(not INSTALLED, reason=f"needs {jla.INSTALL}")
@pytest.mark.parametrize("op", jla.KINDS)
def test_its_plain_ops_are_ours(op):
    given, reset = arguments(op, "float32")

    def theirs(*given):
        return jla.run(op, *given, implementation="reference")

    # A reset at the first token is the caller's: `run` empties the memory before.
    reset = reset.at[:, 0].set(False)
    expected = results(ours(op, "reference"), given, reset)
    found = results(theirs, given, reset)
    for theirs_, ours_ in zip(found, expected, strict=True):
        assert theirs_.shape == ours_.shape and theirs_.dtype == ours_.dtype
        np.testing.assert_allclose(theirs_, ours_, atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(not INSTALLED, reason=f"needs {jla.INSTALL}")
@pytest.mark.parametrize("op", jla.KINDS)
def test_its_kernels_take_our_calls(op, monkeypatch):
    """As on a Hopper GPU, by shapes."""
    importlib.import_module("jla.ops.mosaic_gpu")
    for name, module in list(sys.modules.items()):
        if name.startswith("jla.ops.mosaic_gpu") and hasattr(module, "is_hopper"):
            monkeypatch.setattr(module, "is_hopper", lambda: True)
    monkeypatch.setattr(jla, "needs", lambda platform: "")
    given, reset = arguments(op, "bfloat16")
    *tokens, state = given
    assert jla.unsupported(op, *tokens) == ""
    float32 = [x.astype(jnp.float32) for x in tokens]
    assert "no kernel for q, k, v of float32[2, 70" in jla.unsupported(op, *float32)

    def kernels(*given):
        return jla.run(op, *given)

    found = jax.eval_shape(functools.partial(results, kernels), given, reset)
    expected = [state, tokens[2], *given]
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]


@pytest.mark.skipif(not HOPPER, reason=f"needs a Hopper GPU, and {jla.INSTALL}")
@pytest.mark.parametrize("op", jla.KINDS)
def test_its_kernels_are_the_reference(op):
    given, reset = arguments(op, "bfloat16", time=300)
    expected = results(ours(op, "reference"), given, reset)
    for theirs, exact in zip(
        results(ours(op, "jla"), given, reset), expected, strict=True
    ):
        exact, theirs = (np.asarray(x, np.float32) for x in (exact, theirs))
        assert np.abs(theirs - exact).max() <= 3e-2 * np.abs(exact).max()
