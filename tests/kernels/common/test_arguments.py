"""Checks of arguments, shared by all ops."""

import inspect

import jax
import jax.numpy as jnp
import pytest

from memjax_kernels._src.common import arguments

# Without the annotations' own checks, as users run.
check_shapes = inspect.unwrap(arguments.check_shapes)
check_range = inspect.unwrap(arguments.check_range)
check_choice = inspect.unwrap(arguments.check_choice)
check_mask = inspect.unwrap(arguments.check_mask)
check_float32 = inspect.unwrap(arguments.check_float32)


def test_shape_letters_bind_and_optional_none_is_skipped():
    q, v = jnp.ones((2, 3, 4)), jnp.ones((2, 3, 5), jnp.bfloat16)
    sizes = check_shapes(q=(q, "B T K"), g=(None, "B X?"), v=(v, "B T V"))
    assert sizes == {"B": 2, "T": 3, "K": 4, "V": 5}


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 3), "f4", r"k must have shape \[B, T, K\] = \[2, 3, 4\].* got \[2, 3\]"),
        ((2, 3, 5), "f4", r"k must have .* = \[2, 3, 4\].* got \[2, 3, 5\]"),
        ((2, 3, 4), "i4", "k must be floating, got int32"),
        ((2, 3, 4), "c8", "k must be floating, got complex64"),
        ((2, 3, 4), "?", "k must be floating, got bool"),
    ],
)
def test_mismatched_shapes_are_refused(shape, dtype, message):
    q, k = jnp.ones((2, 3, 4)), jnp.ones(shape, dtype)
    with pytest.raises(ValueError, match=message):
        check_shapes(q=(q, "B T K"), k=(k, "B T K"))


def test_unbound_letters_and_empty_axes_in_errors():
    with pytest.raises(ValueError, match=r"q must have shape \[B, T\] = \[B, T\]"):
        check_shapes(q=(jnp.ones(2), "B T"))
    with pytest.raises(ValueError, match=r"no axis empty, got \[2, 0\]"):
        check_shapes(q=(jnp.ones((2, 0)), "B T"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_known_values_out_of_range_are_refused(dtype):
    check_range("beta", None, 0.0, 1.0)
    check_range("beta", jnp.asarray([0, 1], dtype), 0.0, 1.0)
    for bad in (-0.5, 1.5, jnp.nan, jnp.inf):
        with pytest.raises(ValueError, match=r"beta must lie in \[0.0, 1.0\], got"):
            check_range("beta", jnp.asarray([0.5, bad], dtype), 0.0, 1.0)
    check_range("g", jnp.asarray([-jnp.inf, 0], dtype), -float("inf"), 0.0)


def test_ranges_are_not_checked_inside_jit():
    def run(x):
        check_range("beta", x, 0.0, 1.0)
        return x

    assert jax.jit(run)(2.0) == 2


def test_choice_error_lists_allowed_values():
    check_choice("phi", None, (None, "silu"))
    with pytest.raises(ValueError, match=r"phi must be one of \('silu',\), got None"):
        check_choice("phi", None, ("silu",))
    with pytest.raises(ValueError, match="got 'relu'"):
        check_choice("phi", "relu", (None, "silu"))


def test_a_reset_is_a_mask_of_tokens():
    check_mask("reset", None, 2, 3)
    check_mask("reset", jnp.zeros((2, 3), bool), 2, 3)
    with pytest.raises(ValueError, match=r"\[B, T\] = \[2, 3\], got bool\[3, 2\]"):
        check_mask("reset", jnp.zeros((3, 2), bool), 2, 3)
    with pytest.raises(ValueError, match=r"got int32\[2, 3\]"):
        check_mask("reset", jnp.zeros((2, 3), jnp.int32), 2, 3)


def test_a_memory_is_float32():
    check_float32("state", None)
    check_float32("state", jnp.ones(2))
    with pytest.raises(ValueError, match="state must be float32, got bfloat16"):
        check_float32("state", jnp.ones(2, jnp.bfloat16))
