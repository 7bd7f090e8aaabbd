"""The optimizer: its schedule, its clipping, what it decays, what it refuses."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig
from memjax.models import Architecture
from memjax.training.distributed.sharding import leaf_name
from memjax.training.optimizer import (
    OptimizerConfig,
    decays,
    make_optimizer,
    schedule,
    with_rates,
)
from tests import tiny
from tests.mechanisms.test_contract import CONFIGS

CONFIG = OptimizerConfig()


def rate_of(config, steps):
    """The schedule as a function to plain floats."""
    rate: Any = schedule(config, steps)
    return lambda step: float(rate(step))


def test_the_defaults_are_the_papers_table_9():
    assert dataclasses.asdict(CONFIG) == dict(
        learning_rate=2e-3,
        warmup_ratio=0.01,
        final_ratio=0.0,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-7,
        weight_decay=0.1,
        decay_vectors=False,
        max_gradient_norm=1.0,
        schedule_steps=None,
    )


def test_behind_its_own_end_the_rate_is_constant():
    config = OptimizerConfig(final_ratio=0.1, schedule_steps=50)
    rate: Any = schedule(config, 200)
    before: Any = schedule(OptimizerConfig(final_ratio=0.1), 50)
    assert [rate(i) for i in (0, 20, 49)] == [before(i) for i in (0, 20, 49)]
    assert float(rate(50)) == float(rate(199)) == pytest.approx(2e-4)


def test_the_rate_rises_linearly_then_falls_by_a_cosine():
    rate: Any = schedule(OptimizerConfig(warmup_ratio=0.1, final_ratio=0.2), 100)
    values = np.asarray(jax.jit(rate)(np.arange(101)))
    # From peak / 11 in ten equal strides: no step is wasted at 0.
    np.testing.assert_allclose(values[:11], 2e-3 * np.arange(1, 12) / 11, rtol=1e-5)
    half = 2e-3 * (0.2 + 0.8 / 2)
    np.testing.assert_allclose(values[55], half, rtol=1e-5)
    np.testing.assert_allclose(values[100], 0.2 * 2e-3, rtol=1e-5)
    assert np.all(np.diff(values[10:]) < 0)


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_a_short_run_needs_no_warm_up(steps):
    rate = rate_of(CONFIG, steps)
    assert rate(0) == pytest.approx(2e-3)
    assert rate(steps) == pytest.approx(0.0, abs=1e-9)


def one_update(config, params, gradients):
    transform = make_optimizer(config, 1000)

    @jax.jit
    def update(params, gradients):
        return transform.update(gradients, transform.init(params), params)[0]

    rate = rate_of(config, 1000)(0)
    return {k: np.asarray(v) / rate for k, v in update(params, gradients).items()}


def test_matrices_decay_and_norms_do_not():
    params = {
        "matrix": np.full((2, 3), 4, np.float32),
        "norm": np.full(3, 4, np.float32),
        "query_bias": np.full((2, 3), 4, np.float32),
    }
    nothing = jax.tree.map(np.zeros_like, params)
    updates = one_update(CONFIG, params, nothing)
    np.testing.assert_allclose(updates["matrix"], -0.1 * 4.0, rtol=1e-6)
    assert np.all(updates["norm"] == 0) and np.all(updates["query_bias"] == 0)


def test_biases_norms_and_prompts_of_models_do_not_decay():
    """By their role: biases of heads and norms of queries have two axes."""
    heads = tiny.LLAMA.mechanisms[0]
    assert isinstance(heads, AttentionConfig)
    heads = dataclasses.replace(
        heads, qkv_bias=True, output_bias=True, qk_norm="width", rope_theta=None
    )
    opt = Architecture(
        norm="layer",
        feed_forward="relu",
        learned_positions=66,
        feed_forward_bias=True,
        embedding_dim=8,
        scale_embedding=False,
    )
    around = Architecture(norm_outputs=True, feed_forward_bias=True)
    models = [
        nnx.eval_shape(functools.partial(tiny.make_llama, mechanisms=(heads,), **style))
        for style in (dict(architecture=opt), dict(architecture=around))
    ]
    kinds = ("hmt", "rmt", "mplus")
    models += [nnx.eval_shape(functools.partial(tiny.make_model, k)) for k in kinds]
    params = [nnx.state(model, nnx.Param) for model in models]
    found = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        found[leaf_name(path).rpartition("/")[2]] = decays(leaf_name(path))
    linear = {"query", "key", "value", "output", "gate", "up", "down"}
    tables = {"embedding", "head", "positions", "project_in", "project_out"}
    vectors = {"norm", "bias", "scale", "initial_memory", "summary_prompt"}
    vectors |= {"bos", "position", "query_norm", "key_norm"}
    vectors |= {f"{name}_bias" for name in linear}
    outputs = ("mechanism", "feed_forward")
    vectors |= {f"{name}{end}_norm" for name in outputs for end in ("", "_output")}
    assert {name for name, decayed in found.items() if decayed} == linear | tables
    assert {name for name, decayed in found.items() if not decayed} == vectors


def test_long_gradients_are_scaled_to_the_limit():
    """A first AdamW update is g / (|g| + epsilon), which shows the scaled g."""
    config = OptimizerConfig(epsilon=1.0, weight_decay=0.0, max_gradient_norm=0.5)
    params = {"w": np.zeros((1, 2), np.float32)}
    for gradient, scaled in (([3.0, 4.0], [0.3, 0.4]), ([0.03, 0.04], [0.03, 0.04])):
        updates = one_update(config, params, {"w": np.array([gradient], np.float32)})
        expected = -np.array(scaled) / (np.array(scaled) + 1)
        np.testing.assert_allclose(updates["w"][0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name,value,allowed",
    [
        ("learning_rate", 0.0, "positive"),
        ("learning_rate", float("nan"), "positive"),
        ("epsilon", -1e-8, "positive"),
        ("max_gradient_norm", 0.0, "positive"),
        ("warmup_ratio", 1.0, r"in \[0, 1\)"),
        ("warmup_ratio", -0.1, r"in \[0, 1\)"),
        ("beta1", 1.0, r"in \[0, 1\)"),
        ("beta2", float("nan"), r"in \[0, 1\)"),
        ("final_ratio", 1.5, r"in \[0, 1\]"),
        ("weight_decay", -0.1, ">= 0"),
        ("weight_decay", float("nan"), ">= 0"),
    ],
)
def test_values_out_of_range_are_refused(name, value, allowed):
    with pytest.raises(ValueError, match=f"{name} must be {allowed}, got {value}"):
        OptimizerConfig(**{name: value})


def test_parameters_can_have_their_own_rate():
    config = OptimizerConfig(weight_decay=0.0, max_gradient_norm=float("inf"))
    whole = make_optimizer(config, 10)
    params: Any = {"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4), "c": jnp.ones(4)}
    gradients: Any = {
        "a": {"w": jnp.full((2, 3), 0.3)},
        "b": jnp.ones(4),
        "c": jnp.ones(4),
    }
    # By a part of the path below an attribute, or by the attribute.
    changed = with_rates(whole, {"a/w": 5.0, "b": 0.0})
    state, other = jax.jit(lambda: (whole.init(params), changed.init(params)))()

    @jax.jit
    def both(state, other):
        updates = whole.update(gradients, state, params)
        return *updates, *changed.update(gradients, other, params)

    for _ in range(3):
        expected: Any
        found: Any
        expected, state, found, other = both(state, other)
        ours, theirs = np.asarray(found["a"]["w"]), np.asarray(expected["a"]["w"])
        np.testing.assert_array_equal(ours, np.float32(5) * theirs)
        np.testing.assert_array_equal(found["b"], 0.0)
        np.testing.assert_array_equal(found["c"], expected["c"])
    chex.assert_trees_all_equal(state, other)


def test_rates_are_of_whole_path_parts():
    params = {"position": jnp.ones(1), "repositioned": jnp.ones(1)}
    transform = with_rates(optax.sgd(1.0), {"position": 0.0})
    updates, _ = transform.update(params, transform.init(params), params)
    expected = {"position": jnp.zeros(1), "repositioned": -jnp.ones(1)}
    chex.assert_trees_all_equal(updates, expected)


def test_each_parameter_is_known_to_decay_or_not():
    """By its role: a bias may be a matrix."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for config in CONFIGS.values():
        params = jax.eval_shape(config.build().init_params, jax.random.key(0))
        for path, _ in jax.tree_util.tree_leaves_with_path(params):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found[decays(name)].add(name.rpartition("/")[2])
    decayed = "query key value output query_key filters value_filters gate read rate "
    decayed += "weight target narrow widen forget weights slots keys values "
    decayed += "selection pace write gate_narrow input_gate recurrent_gate mixing"
    kept = "norm bias query_bias key_bias scale shift log_rate bound skip amount decay "
    kept += "pace_bias value_bias gate_bias filter_bias output_bias input_bias "
    kept += "recurrent_bias mixing_bias summary_prompt"
    assert found == {True: set(decayed.split()), False: set(kept.split())}


def test_updates_of_equal_layers_are_equal_kernels():
    """Each gradient is taken from the loop's once, not by each result again."""
    layers, optimizer = 3, make_optimizer(CONFIG, 10)
    params = [{"weight": jax.ShapeDtypeStruct((8, 16), jnp.float32)}] * layers

    def update(params, state, stacked, tokens):
        given = [{"weight": stacked[i] / tokens} for i in range(layers)]
        updates, state = optimizer.update(given, state, params)
        return optax.apply_updates(params, updates), state

    stacked = jax.ShapeDtypeStruct((layers, 8, 16), jnp.float32)
    given = params, jax.eval_shape(optimizer.init, params), stacked, 1.0
    text = jax.jit(update).lower(*given).compile().as_text()
    assert text is not None and text.count(" slice(") == layers
