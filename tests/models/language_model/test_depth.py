"""Equal layers run by one loop: what the model computes is what it was."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from memjax.mechanisms import (
    AttentionConfig,
    LinearAttentionConfig,
    SlidingWindowConfig,
)
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import BlockStyle
from memjax.models.language_model.depth import Layer, repetitions
from memjax.models.lora import LoraConfig, add_lora
from tests import tiny

B, T, V, D = 2, 5, 31, 8
FULL = AttentionConfig(D, 2, 1, 4, capacity=16)
WINDOW = SlidingWindowConfig(D, 2, 1, 4, window=3)
RECURRENT = LinearAttentionConfig(D, 2, 4, 4)
HYBRID = (FULL, WINDOW) * 2
ONE_DIFFERS = (RECURRENT, FULL, FULL)


def build(mechanisms, scan_layers, remat=False):
    return LanguageModel(
        ModelConfig(
            mechanisms=mechanisms,
            num_layers=len(mechanisms),
            vocab_size=V,
            model_dim=D,
            hidden_dim=12,
            dtype="float32",
            remat=remat,
            scan_layers=scan_layers,
        ),
        key=jax.random.key(0),
    )


@functools.partial(jax.jit, static_argnums=0)
def gradients(graph, variables, options):
    """The loss and the memory after a text, and the gradients of all parameters."""

    def loss(variables):
        model = nnx.merge(graph, variables)
        x = model.embed(tiny.tokens(0, B, T))
        # A mask in the form without memories, all else in that with them.
        if "mask" in options:
            state, features = (), model.encode(x, **options)
        else:
            state, features = model.read(model.init_state(B), x, **options)
        return (model.logits(features) ** 2).mean(), state

    return jax.value_and_grad(loss, has_aux=True)(variables)


def test_scanned_features_equal_unrolled():
    models = [
        tiny.drawn(functools.partial(build, ONE_DIFFERS, scan))
        for scan in (False, True)
    ]
    expected, found = (
        tiny.method(model, "features", model.init_state(B), tiny.tokens(0, B, T))
        for model in models
    )
    tiny.assert_close(found, expected)


@pytest.mark.slow
def test_scanned_layers_have_the_gradients_of_unrolled():
    """A loop computes its layers again, which changes nothing either."""
    models = [
        tiny.drawn(functools.partial(build, HYBRID, scan, remat=scan))
        for scan in (False, True)
    ]
    lengths = {"lengths": jnp.array([3, 0])}
    expected, found = (gradients(*nnx.split(m), lengths) for m in models)
    tiny.assert_close(found, expected)


@pytest.mark.slow
def test_scanned_layers_with_adapters_and_padding():
    lora, key = LoraConfig(rank=2, alpha=3.0), jax.random.key(1)
    mask = jnp.array([[True] * T, [False] * 2 + [True] * 3])
    models = [
        tiny.drawn(
            lambda scan=scan: add_lora(build((FULL,) * 2, scan, scan), lora, key)
        )
        for scan in (False, True)
    ]
    expected, found = (gradients(*nnx.split(m), {"mask": mask}) for m in models)
    tiny.assert_close(found, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("scan", [False, True])
def test_lowered_program_has_products_of_one_layer(scan):
    def products(depth):
        make = functools.partial(build, (FULL,) * depth, scan)
        graph, variables = nnx.split(nnx.eval_shape(make))
        lowered = gradients.lower(graph, variables, {})
        return lowered.as_text().count("dot_general")

    assert products(2) == products(6) > 0


@pytest.mark.parametrize("devices", [1, 4])
def test_layers_are_one_function_but_where_a_mesh_divides_them(devices):
    model = tiny.drawn(lambda: build((FULL,) * 2, False))
    mesh = AbstractMesh((devices,), ("data",), (AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(model)(model.init_state(B), tiny.tokens(0, B, T))
    assert ("name=of_arrays" in str(program)) == (devices == 1)


def test_single_token_is_not_scanned():
    model = tiny.drawn(lambda: build((FULL,) * 3, True))

    def step(state):
        return model(state, jnp.zeros((B, 1), jnp.int32))

    jaxpr = jax.make_jaxpr(step)(model.init_state(B))
    assert "scan" not in str(jaxpr)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", [(1, 1)]),
        ("aaaa", [(1, 4)]),
        ("abab", [(2, 2)]),
        ("aaabaaab", [(4, 2)]),
        ("aabaaa", [(1, 2), (1, 1), (1, 3)]),
        ("ababa", [(1, 1)] * 5),
    ],
)
def test_repetitions_are_periods_or_runs(names, expected):
    mechanisms: dict[str, Any] = {name: object() for name in "ab"}
    layers = [
        Layer(mechanisms[name], jnp.zeros(2), None, BlockStyle()) for name in names
    ]
    assert repetitions(layers) == expected


def test_layers_of_other_shapes_are_separate_runs():
    mechanism: Any = object()
    layers = [
        Layer(mechanism, jnp.zeros(size), None, BlockStyle()) for size in (2, 2, 3)
    ]
    assert repetitions(layers) == [(1, 2), (1, 1)]
