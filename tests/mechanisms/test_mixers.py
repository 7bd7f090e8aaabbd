"""Mamba, RG-LRU and the short convolution against their equations in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import MambaConfig, RGLRUConfig, ShortConvConfig
from memjax.mechanisms.layers.projections import Adapted
from memjax.mechanisms.mixers.rg_lru import bounded_sqrt
from memjax.models.language_model.presets import SIZES

T, D = 7, 6
CONFIGS = {
    "mamba": MambaConfig(D, inner_dim=8, state_dim=3, dt_rank=2),
    "falcon_mamba": MambaConfig(D, 8, 3, 2, bias=True, norm_epsilon=1e-2),
    "rg_lru": RGLRUConfig(D, width=8, num_blocks=2),
    "short_conv": ShortConvConfig(D),
}
every_layer = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def draw(name) -> Any:
    """A mechanism, its parameters, none of them 0, and tokens of one text."""
    mechanism = CONFIGS[name].build()
    mechanism = mechanism._replace(
        apply=jax.jit(mechanism.apply), whole=jax.jit(mechanism.whole)
    )
    params = mechanism.init_params(jax.random.key(0))
    draws = np.random.default_rng(1)

    def noise(leaf):
        return leaf + 0.3 * draws.standard_normal(leaf.shape, np.float32)

    params = jax.tree.map(noise, jax.device_get(params))
    return mechanism, params, draws.standard_normal((1, T, D), np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def convolve(inputs, t, filters):
    """Σ_w f_w u_{t - (W - 1 - w)}, the last tap for the token itself."""
    back = len(filters) - 1
    return sum(
        f * inputs[t - back + w] for w, f in enumerate(filters) if t - back + w >= 0
    )


def rms(x, epsilon):
    return x / np.sqrt(np.mean(x**2) + epsilon)


def mamba(config, p, x):
    u = x @ p.value + (0 if p.value_bias is None else p.value_bias)
    memory, y = np.zeros((config.state_dim, config.inner_dim)), []
    for t in range(T):
        v = convolve(u, t, p.filters) + p.filter_bias
        v = v * sigmoid(v)
        low, b, c = np.split(v @ p.selection, [config.dt_rank, config.dt_rank + 3])
        if config.norm_epsilon is not None:
            low, b, c = (rms(z, config.norm_epsilon) for z in (low, b, c))
        delta = np.log1p(np.exp(low @ p.pace + p.pace_bias))
        memory = np.exp(-np.exp(p.log_rate) * delta) * memory + np.outer(b, delta * v)
        z = x[t] @ p.gate + (0 if p.gate_bias is None else p.gate_bias)
        read = (c @ memory + p.skip * v) * z * sigmoid(z)
        y.append(read @ p.output + (0 if p.output_bias is None else p.output_bias))
    return np.stack(y)


def rg_lru(config, p, x):
    u, h, y = x @ p.value + p.value_bias, np.zeros(config.width), []

    def gate(v, weight, bias):
        blocks = v.reshape(config.num_blocks, -1)
        return sigmoid(np.einsum("gi,gij->gj", blocks, weight) + bias).reshape(-1)

    for t in range(T):
        v = convolve(u, t, p.filters) + p.filter_bias
        pace = gate(v, p.recurrent_gate, p.recurrent_bias)
        a = np.exp(-8 * pace * np.log1p(np.exp(p.decay)))
        # The first token of a text is not scaled.
        scale = np.sqrt(1 - a**2) if t else 1.0
        h = a * h + scale * gate(v, p.input_gate, p.input_bias) * v
        z = x[t] @ p.gate + p.gate_bias
        gelu = z / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (z + 0.044715 * z**3)))
        y.append((h * gelu) @ p.output + p.output_bias)
    return np.stack(y)


def short_conv(config, p, x):
    u = (x @ p.input_gate) * (x @ p.value)
    read = np.stack([convolve(u, t, p.filters) for t in range(T)])
    return (x @ p.gate * read) @ p.output


EQUATIONS = {
    "mamba": mamba,
    "falcon_mamba": mamba,
    "rg_lru": rg_lru,
    "short_conv": short_conv,
}


@every_layer
def test_outputs_are_those_of_the_equations(name):
    mechanism, params, x = draw(name)
    high = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    expected = EQUATIONS[name](CONFIGS[name], high, np.asarray(x[0], np.float64))
    y = np.asarray(mechanism.whole(params, x, None))[0]
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


@every_layer
def test_lora_changes_every_matrix(name):
    mechanism, params, x = draw(name)
    before = np.asarray(mechanism.whole(params, x, None))
    targets = params.lora_targets
    assert targets == tuple(n for n in targets if getattr(params, n).ndim == 2)
    for target in targets:
        adapted = {}
        for name in targets:
            weight = getattr(params, name)
            down = np.ones((len(weight), 1), np.float32)
            up = np.ones((1, weight.shape[1]), np.float32)
            # The others are adapted by nothing, so that one program serves all.
            scale = np.float32(0.1 if name == target else 0.0)
            given: Any = (weight, down, up, scale)
            adapted[name] = Adapted(*given)
        merged = params._replace(**{target: getattr(params, target) + np.float32(0.1)})
        y = np.asarray(mechanism.whole(params._replace(**adapted), x, None))
        np.testing.assert_allclose(y, mechanism.whole(merged, x, None), atol=1e-4)
        assert np.abs(y - before).max() > 1e-3


def test_gradient_of_the_root_is_bounded():
    root = jax.vmap(jax.grad(bounded_sqrt))
    x = jnp.array([0.0, 1e-12, 1e-4, 1.0])
    np.testing.assert_allclose(root(x), [1000, 1000, 50, 0.5], rtol=1e-6)


def test_a_reset_text_starts_unscaled():
    mechanism, params, x = draw("rg_lru")
    state, first = mechanism.apply(params, mechanism.init_state(1), x)
    assert not state.empty.any()
    state = mechanism.reset(state, jnp.array([True]))
    assert state.empty.all()
    np.testing.assert_array_equal(mechanism.apply(params, state, x)[1], first)
    starts = np.arange(T)[None] == 4
    y = np.asarray(jax.jit(mechanism.packed.whole)(params, x, starts))
    alone = mechanism.whole(params, x[:, 4:], None)
    np.testing.assert_allclose(y[:, 4:], alone, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ["mamba", "rg_lru"])
def test_implementations_agree(name, implementation):
    mechanism, params, x = draw(name)
    config = dataclasses.replace(CONFIGS[name], implementation=implementation)
    y = jax.jit(config.build().apply)(params, mechanism.init_state(1), x)[1]
    expected = mechanism.apply(params, mechanism.init_state(1), x)[1]
    np.testing.assert_allclose(y, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: MambaConfig(D, 0, 3, 2), "inner_dim must be at least 1, got 0"),
        (lambda: MambaConfig(D, 8, 3, 2, conv_width=1), "conv_width must be at least"),
        (lambda: MambaConfig(D, 8, 3, 2, norm_epsilon=0.0), "norm_epsilon must be pos"),
        (lambda: RGLRUConfig(D, 8, 3), "num_blocks must divide width=8, got 3"),
        (lambda: ShortConvConfig(D, conv_width=1), "conv_width must be at least 2"),
    ],
)
def test_sizes_out_of_range_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config()


def test_presets_have_sizes_for_them():
    for name in ("mamba", "rg_lru", "short_conv"):
        config = SIZES["125m"].mechanism(name)
        assert config.name == name and config.model_dim == 768
