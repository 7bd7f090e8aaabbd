"""The block of the recurrent mechanisms, against NumPy and by its options."""

import dataclasses
import functools
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import (
    ABCConfig,
    DeltaNetConfig,
    GLAConfig,
    GSAConfig,
    LatticeConfig,
    LinearAttentionConfig,
    TrellisConfig,
    TTTLinearConfig,
)
from memjax.mechanisms.cells.base import bind
from memjax.mechanisms.layers.recurrent import block as recurrent_block
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax.mechanisms.layers.recurrent.style import RecurrentStyle
from memjax.models.language_model.presets import RECURRENT, TINY

B, T, D, H, K, V = 2, 7, 6, 2, 3, 4
SIZES: dict[str, Any] = dict(model_dim=D, num_heads=H, key_dim=K, value_dim=V)


def sizes_of(kind):
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    return {name: size for name, size in SIZES.items() if name in names}


@dataclasses.dataclass(frozen=True)
class ProbeConfig(RecurrentConfig):
    """A cell without memory, that returns q·k times the value."""

    name: ClassVar[str] = "probe"

    def cell(self):
        return bind(
            self,
            init_params=lambda config, key: (),
            init_state=lambda config, batch: jnp.zeros((batch, 1)),
            step=read,
            apply=read,
        )

    def cell_axes(self):
        return ()


def read(config, params, memory, q, k, v, x):
    return memory, (q * k).sum(axis=-1, keepdims=True) * v


def probe(shared):
    config = ProbeConfig(**SIZES)
    return recurrent_block.mechanism(config, config.cell(), shared_projection=shared)


@functools.cache
def case(shared) -> Any:
    mechanism = probe(shared)
    mechanism = mechanism._replace(apply=jax.jit(mechanism.apply))
    params = mechanism.init_params(jax.random.key(0))
    params = params._replace(norm=jnp.linspace(0.5, 2.0, V))
    x = np.random.default_rng(1).standard_normal((B, T, D), np.float32)
    return mechanism, params, x


def numpy_block(params, x, shared):
    """Token by token, in float64."""
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = np.asarray(x, np.float64)
    y = np.zeros((B, T, D))
    for b in range(B):
        for t in range(T):
            q_k = np.zeros((2, H, K))
            for which in range(2):
                for lag in range(4):
                    if t - lag >= 0:
                        weight = p.query_key[:, 0 if shared else which]
                        inputs = np.einsum("d,dhk->hk", x[b, t - lag], weight)
                        # The last of the filters belongs to the token itself.
                        q_k[which] += p.filters[3 - lag, which] * inputs
            q_k = q_k / (1 + np.exp(-q_k))
            q, k = q_k / np.sqrt((q_k**2).sum(-1, keepdims=True) + 1e-6)
            v = np.einsum("d,dhv->hv", x[b, t], p.value)
            read = (q * k).sum(-1, keepdims=True) * v
            read /= np.sqrt((read**2).mean(-1, keepdims=True) + 1e-5)
            z = np.einsum("d,dhv->hv", x[b, t], p.gate)
            gelu = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
            y[b, t] = np.einsum("hv,hvd->d", read * p.norm * gelu, p.output)
    return y


@pytest.mark.parametrize("shared", [False, True])
def test_block_equals_its_equations(shared):
    mechanism, params, x = case(shared)
    state, y = mechanism.apply(params, mechanism.init_state(B), x)
    np.testing.assert_allclose(y, numpy_block(params, x, shared), rtol=2e-5, atol=2e-5)
    # The window holds the last three inputs of the convolutions.
    inputs = np.einsum("btd,dshk->btshk", x[:, -3:], params.query_key)
    np.testing.assert_allclose(state.window, inputs, rtol=1e-5, atol=1e-6)
    assert state.window.shape[2] == (1 if shared else 2)


def test_the_convolution_reaches_back_three_tokens_and_never_ahead():
    mechanism, params, x = case(False)

    def run(x):
        return np.asarray(mechanism.apply(params, mechanism.init_state(B), x)[1])

    other = x.copy()
    other[:, 2] += 1.0
    changed = np.abs(run(other) - run(x)).max(axis=(0, 2)) > 0
    assert changed.tolist() == [False, False, True, True, True, True, False]


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_convolution_continues_across_segments(cut):
    mechanism, params, x = case(False)
    whole = mechanism.apply(params, mechanism.init_state(B), x)
    state, first = mechanism.apply(params, mechanism.init_state(B), x[:, :cut])
    state, second = mechanism.apply(params, state, x[:, cut:])
    # The window is kept bit for bit; sums may round apart by length.
    np.testing.assert_allclose(state.window, whole[0].window, atol=1e-6)
    joined = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(joined, whole[1], rtol=1e-5, atol=1e-5)


def test_half_precision_keeps_a_float32_window_that_joins_exactly():
    mechanism, params, x = case(False)
    x = x.astype(jnp.bfloat16)
    whole, _ = mechanism.apply(params, mechanism.init_state(B), x)
    state, _ = mechanism.apply(params, mechanism.init_state(B), x[:, :5])
    state, y = mechanism.apply(params, state, x[:, 5:])
    assert whole.window.dtype == jnp.float32 and y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.window, whole.window)


STARTING = {
    "trellis": TrellisConfig(**SIZES, slots=5, chunk_size=2).build(),
    "lattice": LatticeConfig(D, H, slots=K, value_dim=V, chunk_size=2).build(),
    "ttt_linear": TTTLinearConfig(D, H, K, K, chunk_size=2).build(),
}
STARTS = {
    "trellis": ("keys", "values"),
    "lattice": ("slots",),
    "ttt_linear": ("weights", "bias"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTING)
def test_initial_memory_is_learned(name):
    mechanism = STARTING[name]
    params = jax.device_get(mechanism.init_params(jax.random.key(0)))
    x = np.random.default_rng(1).standard_normal((B, 3, D), np.float32)

    @jax.jit
    def run(params, state, x):
        def loss(params):
            after, y = mechanism.apply(params, state, x)
            return (y**2).sum(), (after, y)

        return jax.grad(loss, has_aux=True)(params)

    def outputs(params, state):
        return np.asarray(run(params, state, x)[1][1])

    moved = params._replace(
        cell=params.cell._replace(
            **{
                field: getattr(params.cell, field)[..., ::-1] + 0.1
                for field in STARTS[name]
            }
        )
    )
    empty = mechanism.init_state(B)
    gradient, (state, y) = run(params, empty, x)
    for field in STARTS[name]:
        assert np.abs(getattr(gradient.cell, field)).max() > 1e-6
    assert np.abs(outputs(moved, empty) - np.asarray(y)).max() > 1e-4
    # Once tokens were read, the start is only in the memory; after a reset, again.
    assert not np.asarray(state.memory.uninitialised).any()
    later, (_, y) = jax.device_get(run(params, state, x))
    for field in STARTS[name]:
        np.testing.assert_array_equal(getattr(later.cell, field), 0.0)
    np.testing.assert_array_equal(outputs(moved, state), y)
    state = mechanism.reset(state, jnp.array([True, False]))
    once_more = outputs(moved, state)
    assert np.abs(once_more[0] - y[0]).max() > 1e-4
    np.testing.assert_allclose(once_more[1], y[1], atol=1e-6)


def test_leaves_of_an_empty_state_are_separate_buffers():
    for mechanism in STARTING.values():
        leaves = jax.tree.leaves(mechanism.init_state(B))
        places = {leaf.unsafe_buffer_pointer() for leaf in leaves}
        assert len(places) == len(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("phi", ["l2_silu", "silu"])
def test_trellis_stays_finite_on_a_key_that_repeats(phi):
    mechanism = TrellisConfig(**SIZES, slots=5, chunk_size=64, phi=phi).build()
    params = mechanism.init_params(jax.random.key(0))
    # The largest step, and no forgetting.
    gates = params.cell.step._replace(bias=jnp.full(H, 20.0))
    params = params._replace(
        cell=params.cell._replace(
            step=gates, forget=params.cell.forget._replace(bias=jnp.full(H, 20.0))
        )
    )
    x = 5 * np.random.default_rng(1).standard_normal((1, 1, D), np.float32)
    x = np.broadcast_to(x, (1, 512, D))
    state, y = jax.jit(mechanism.apply)(params, mechanism.init_state(1), x)
    assert np.isfinite(y).all()
    assert np.abs(state.memory.memory.values).max() < 100


@pytest.mark.parametrize("name", RECURRENT)
def test_config_selects_the_implementation(name):
    def program(implementation):
        config = TINY.mechanism(name, implementation=implementation)
        mechanism = config.build()
        params = jax.eval_shape(mechanism.init_params, jax.random.key(0))
        x = jax.ShapeDtypeStruct((1, 4, config.model_dim), jnp.float32)
        return str(jax.make_jaxpr(mechanism.apply)(params, mechanism.init_state(1), x))

    assert program("reference") != program("xla")


@pytest.mark.parametrize(
    "config",
    [
        LinearAttentionConfig(**SIZES),
        DeltaNetConfig(**SIZES),
        GLAConfig(**SIZES),
        GSAConfig(**SIZES),
        ABCConfig(**SIZES),
    ],
)
def test_heads_that_share_keys_read_them_without_copies(config, monkeypatch):
    style = RecurrentStyle(num_key_heads=1)
    mechanism = dataclasses.replace(config, style=style).build()
    params = mechanism.init_params(jax.random.key(0))
    x = np.random.default_rng(2).standard_normal((B, 3, D), np.float32)
    before = mechanism.init_state(B)
    step = jax.jit(mechanism.step)
    state, reads = before, []
    for t in range(3):
        state, y = step(params, state, x[:, t])
        reads.append(y)
    monkeypatch.setattr(recurrent_block, "for_each_value", None)
    after, y = jax.jit(mechanism.apply)(params, before, x)
    np.testing.assert_allclose(y, np.stack(reads, axis=1), atol=2e-5)
    chex.assert_trees_all_close(after.memory, state.memory, atol=2e-5)


@pytest.mark.parametrize(
    "kind,wrong,message",
    [
        (DeltaNetConfig, dict(num_heads=0), "num_heads must be at least 1, got 0"),
        (GSAConfig, dict(norm_epsilon=0.0), "norm_epsilon must be positive, got 0.0"),
        (GSAConfig, dict(slots=0), "slots must be at least 1, got 0"),
        (ABCConfig, dict(slots=0), "slots must be at least 1, got 0"),
        (TrellisConfig, dict(slots=0), "slots must be at least 1, got 0"),
        (TrellisConfig, dict(chunk_size=0), "chunk_size must be at least 1, got 0"),
        (TrellisConfig, dict(step_size=0.0), "step_size must be positive, got 0.0"),
        (TTTLinearConfig, {}, "needs key_dim == value_dim, got 3 and 4"),
        (TTTLinearConfig, dict(chunk_size=0), "chunk_size must be at least 1, got 0"),
        (TTTLinearConfig, dict(rate=0.0), "rate must be positive, got 0.0"),
        (LatticeConfig, dict(chunk_size=0), "chunk_size must be at least 1, got 0"),
        (LatticeConfig, dict(forget="l1"), "chunk_size=1 only, got chunk_size=16"),
        (LatticeConfig, dict(slots=5), "slots <= value_dim=4, got 5"),
    ],
)
def test_invalid_values_are_refused(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        kind(**(sizes_of(kind) | wrong))


@pytest.mark.parametrize(
    "kind,wrong",
    [
        (TrellisConfig, dict(phi="relu")),
        (GSAConfig, dict(implementation="pallas")),
        (TrellisConfig, dict(activation="silu")),
        (LatticeConfig, dict(variant="both")),
        (LatticeConfig, dict(forget="l3")),
        (LatticeConfig, dict(initial="zero")),
    ],
)
def test_an_unknown_choice_is_refused(kind, wrong):
    options = kind(**sizes_of(kind))
    # Behind the annotations, which are checked in these tests alone.
    for name, value in wrong.items():
        object.__setattr__(options, name, value)
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must be one of .*, got '{value}'"):
        options.__post_init__()


def test_normalised_initial_slots_are_random_rows():
    config = LatticeConfig(D, H, slots=5, value_dim=4, initial="normalised")
    mechanism = config.build()
    start = mechanism.init_params(jax.random.key(0)).cell.slots
    np.testing.assert_allclose(np.linalg.norm(start, axis=-1), 1.0, rtol=1e-6)
