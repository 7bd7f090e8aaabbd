"""What the backward pass of a layer computes again: `ModelConfig.remat_saves`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, GatedDeltaNetConfig, TrellisConfig
from memjax.models import LanguageModel, ModelConfig
from tests import tiny
from tests.kernels.distances import close

MECHANISMS = {
    "causal_attention_forward": AttentionConfig(128, 2, 2, 64, capacity=256),
    # Two heads of queries share keys.
    "splash_mha_fwd": AttentionConfig(128, 2, 1, 64, capacity=256),
    "delta_rule_forward": GatedDeltaNetConfig(128, 2, 64, 64),
    "trellis_forward": TrellisConfig(128, 2, 64, 64),
}


def gradient_of(kernel, saves, remat=True):
    """The gradient of a model of one layer, a function of (parameters, tokens)."""
    config = ModelConfig(
        mechanisms=(MECHANISMS[kernel],),
        num_layers=1,
        vocab_size=16,
        model_dim=128,
        hidden_dim=128,
        remat=remat,
        remat_saves=saves,
    )
    model = tiny.drawn(lambda: LanguageModel(config, key=jax.random.key(0)))
    graph, params = nnx.split(model)

    def loss(params, tokens):
        model = nnx.merge(graph, params)
        # As in training: a cache would have a kernel of its own beside.
        logits = model.logits(model.encode(model.embed(tokens)))
        return jnp.square(logits).mean()

    return jax.grad(loss), params


@functools.cache
def computed(saves, **options):
    gradient, params = gradient_of("causal_attention_forward", saves, **options)
    return jax.jit(gradient)(params, jnp.arange(128, dtype=jnp.int32)[None] % 16)


# Of "input", the default, they are in `test_depth.py`.
@pytest.mark.parametrize("saves", ["attention", "products"])
def test_gradients_equal_without_remat(saves):
    # Rounded to bfloat16 in another order.
    close(computed(saves), computed("input", remat=False), 2e-2)


# After the test above: what it traces is of CPUs alone.
@pytest.mark.usefixtures("all_platforms")
@pytest.mark.parametrize(
    ("kernel", "saves", "runs"),
    [
        ("causal_attention_forward", "input", 2),
        ("causal_attention_forward", "products", 1),
        ("splash_mha_fwd", "attention", 1),
        ("delta_rule_forward", "attention", 2),
        ("delta_rule_forward", "products", 1),
        ("trellis_forward", "input", 2),
        ("trellis_forward", "attention", 1),
    ],
)
def test_saved_kernels_run_once(kernel, saves, runs):
    gradient, params = gradient_of(kernel, saves)
    traced = jax.jit(gradient).trace(params, jnp.zeros((1, 128), jnp.int32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    calls = [
        line
        for line in text.splitlines()
        if "tpu_custom_call" in line and f'kernel_name = "{kernel}' in line
    ]
    assert len(calls) == runs
