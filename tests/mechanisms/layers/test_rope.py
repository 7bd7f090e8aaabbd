"""RoPE: a rotation, and its scaled frequencies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms.layers import rope
from memjax.mechanisms.layers.rope import RopeScaling

K, THETA = 16, 10_000.0
PLAIN = THETA ** (-np.arange(K // 2) / (K // 2))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_rope_is_a_complex_rotation():
    draw = jax.random.normal(jax.random.key(3), (2, 11, 3, K))
    x, at = np.asarray(draw), jnp.arange(5, 16, dtype=jnp.int32)
    numbers = x[..., : K // 2] + 1j * x[..., K // 2 :]
    turned = numbers * np.exp(1j * np.arange(5, 16)[:, None] * PLAIN)[None, :, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rope.rotate(draw, at, THETA), expected, atol=1e-5)
    # Half the angle, at 1.5 times the length.
    half = RopeScaling("yarn", 2.0, beta_fast=1e9, beta_slow=1e9, attention_factor=1.5)
    slow = rope.rotate(draw, 2 * at, THETA, RopeScaling("linear", 2.0))
    np.testing.assert_allclose(slow, expected, atol=1e-5)
    lengths = np.linalg.norm(rope.rotate(draw, at, THETA, half), axis=-1)
    np.testing.assert_allclose(lengths, 1.5 * np.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("position", [2**16 - 1, 2**20 + 3, 2**24 + 5, 2**31 - 1])
def test_angles_are_exact_far_on(position: int):
    at = jnp.asarray([position, -position])
    angles = position * rope.frequencies(K, THETA, None).astype(np.float64)
    (cosine, back), (sine, unsine) = rope.tables(K, at, THETA)
    np.testing.assert_allclose(cosine, np.cos(angles), atol=4e-7)
    np.testing.assert_allclose(sine, np.sin(angles), atol=4e-7)
    # What was turned is turned back.
    assert (back == cosine).all() and (unsine == -sine).all()


def test_linear_divides_all_frequencies():
    close(rope.frequencies(K, THETA, RopeScaling("linear", 4.0)), PLAIN / 4)


def test_llama3_keeps_the_fast_and_slows_the_slow():
    """By the wavelength, as Llama 3.1's own program has it."""
    old, low, high, factor = 64, 1.0, 4.0, 8.0
    scaling = RopeScaling("llama3", factor, low, high, old)
    expected = []
    for frequency in PLAIN:
        wavelength = 2 * np.pi / frequency
        smooth = (old / wavelength - low) / (high - low)
        if wavelength < old / high:
            expected.append(frequency)
        elif wavelength > old / low:
            expected.append(frequency / factor)
        else:
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    close(rope.frequencies(K, THETA, scaling), expected)
    changed = np.asarray(expected) / PLAIN
    assert changed[0] == 1 and changed[-1] == 1 / factor
    assert any(1 / factor < ratio < 1 for ratio in changed)


def test_yarn_interpolates_by_channel():
    old, factor = 64, 8.0
    scaling = RopeScaling("yarn", factor, original_positions=old)

    # Channels that turn 32 times and once in the old length, on the scale of i.
    def channel(turns):
        return np.log(old / (2 * np.pi * turns)) / np.log(THETA) * (K / 2)

    first, last = max(np.floor(channel(32)), 0), np.ceil(channel(1))
    ramp = np.clip((np.arange(K // 2) - first) / (last - first), 0, 1)
    close(rope.frequencies(K, THETA, scaling), PLAIN * (1 - ramp + ramp / factor))
    assert scaling.amplitude == pytest.approx(0.1 * np.log(8) + 1)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(factor=0.5), r"factor must be in \[1, 2\*\*31\], got 0.5"),
        (dict(factor=float("nan")), "factor must be in .* got nan"),
        (dict(original_positions=0), "original_positions must be at least 1, got 0"),
        (dict(low_frequency_factor=4.0), "high_frequency_factor must be above"),
        (dict(factor=float("inf")), "factor must be in .* got inf"),
        (dict(beta_fast=1e308), r"beta_fast must be at most 1e\+38, got 1e\+308"),
        (dict(beta_slow=33.0), "beta_fast must be at least beta_slow"),
        (dict(attention_factor=0.0), "attention_factor must be positive, got 0.0"),
    ],
)
def test_invalid_scalings_are_refused(wrong, message):
    options: dict[str, Any] = dict(kind="yarn", factor=2.0) | wrong
    with pytest.raises(ValueError, match=message):
        RopeScaling(**options)
