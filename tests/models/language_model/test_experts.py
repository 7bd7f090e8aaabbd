"""Mixtures of experts against NumPy, token by token, with published routers."""

import dataclasses
import functools
import json
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from memjax.config_io import from_record, to_record
from memjax.mechanisms import DeltaNetConfig
from memjax.models import LanguageModel, LoraConfig, ModelConfig, add_lora
from memjax.models.language_model.config import Architecture, BlockStyle
from memjax.models.language_model.hidden.experts import experts, init_experts
from memjax.models.language_model.hidden.router import ExpertsConfig, route
from memjax.training.distributed.sharding import require_divides
from memjax.training.monitoring.model_flops import flops_per_token
from memjax.training.optimizer import decays
from tests import tiny
from tests.models.language_model import experts_run
from tests.training.processes import Process

WIDTH = 7
#: By published model: sizes as small as its router allows.
CONFIGS = {
    "qwen2": ExpertsConfig(
        6, 2, 5, renormalize=False, scale=0.8, shared_dim=4, shared_gate=True
    ),
    "qwen3_next": ExpertsConfig(6, 2, 5, shared_dim=4, shared_gate=True),
    "granite": ExpertsConfig(5, 3, 4, shared_dim=6),
    "nemotron": ExpertsConfig(6, 2, 5, router="sigmoid", scale=1.3, shared_dim=4),
    "deepseek": ExpertsConfig(
        12, 3, 4, router="sigmoid", groups=4, chosen_groups=2, scale=2.5, shared_dim=5
    ),
    "one_of_each_group": ExpertsConfig(
        4, 2, 3, router="sigmoid", groups=4, chosen_groups=3, renormalize=False
    ),
}


MODEL = ModelConfig(mechanisms=(DeltaNetConfig(WIDTH, 1, 4, 4),), model_dim=WIDTH)


def style(config):
    """Nemotron-H has one matrix before its activation, all others have SwiGLU."""
    kind = "relu2" if config == CONFIGS["nemotron"] else "swiglu"
    return BlockStyle(feed_forward=kind, experts=config)


def draw(config, seed=0, dtype=jnp.float32):
    """Parameters and tokens, of which any choice of router shows."""
    init = functools.partial(init_experts, MODEL, style(config))
    shapes = jax.eval_shape(init, jax.random.split(jax.random.key(0), 3))
    numbers = np.random.default_rng(seed)

    def normal(leaf):
        rows = leaf.shape[-2] if len(leaf.shape) > 1 else 1
        return rows**-0.5 * numbers.standard_normal(leaf.shape)

    params = jax.tree.map(normal, shapes)
    # Far apart, or the wrong expert would matter little.
    params = params._replace(router=2 * params.router)
    if params.router_bias is not None:
        # Small, or it would choose the same experts for all tokens.
        params = params._replace(router_bias=0.3 * params.router_bias)
    x = numbers.standard_normal((2, 9, WIDTH))
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (params, x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def chosen_and_weights(config, params, token):
    """Experts of one token and their weights, as the published programs say."""
    logits = token @ params.router
    if config.router == "softmax":
        weights = choice = np.exp(logits) / np.exp(logits).sum()
    else:
        weights, choice = sigmoid(logits), sigmoid(logits) + params.router_bias
        groups = choice.reshape(config.groups, -1)
        best = np.argsort(-np.sort(groups, -1)[:, -2:].sum(-1))[: config.chosen_groups]
        outside = np.setdiff1d(np.arange(config.groups), best)
        choice.reshape(config.groups, -1)[outside] = -np.inf
    chosen = np.argsort(-choice)[: config.experts_per_token]
    total = weights[chosen].sum() if config.renormalize else 1.0
    return chosen, config.scale * weights[chosen] / total


def feed_forward(matrices, token):
    up, down = token @ matrices.up, matrices.down
    if matrices.gate is None:
        return np.maximum(up, 0) ** 2 @ down
    gate = token @ matrices.gate
    return (gate * sigmoid(gate) * up) @ down


def reference(config, params, x):
    """The mixture in float64, a token at a time."""
    params, x = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
    y = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        token = x[place]
        for e, weight in zip(*chosen_and_weights(config, params, token), strict=True):
            matrices = jax.tree.map(operator.itemgetter(e), params.routed)
            y[place] += weight * feed_forward(matrices, token)
        if params.shared is not None:
            shared = feed_forward(params.shared, token)
            if params.shared_gate is not None:
                shared = shared * sigmoid(token @ params.shared_gate)
            y[place] += shared
    return y


def run(config, params, x):
    return jax.jit(functools.partial(experts, MODEL, style(config)))(params, x)


def routed(config, params, x):
    given = (params.router, params.router_bias)
    return jax.jit(functools.partial(route, config))(given, x)


def largest_difference(config, params, x):
    expected = reference(config, params, x)
    actual = np.asarray(run(config, params, x), np.float64)
    return np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_those_of_the_published_routers(name):
    params, x = draw(CONFIGS[name])
    assert largest_difference(CONFIGS[name], params, x) < 1e-5


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("qwen3_next", {"renormalize": False}),
        ("qwen2", {"renormalize": True}),
        ("granite", {"experts_per_token": 2}),
        ("nemotron", {"scale": 1.0}),
        ("nemotron", {"renormalize": False}),
        ("nemotron", {"router": "softmax"}),
        ("deepseek", {"groups": 1, "chosen_groups": 1}),
        ("deepseek", {"chosen_groups": 3}),
        ("deepseek", {"groups": 2, "chosen_groups": 1}),
    ],
)
def test_every_choice_of_a_router_counts(name, wrong):
    """In the numbers above: with a wrong choice they are others."""
    params, x = draw(CONFIGS[name])
    expected = reference(CONFIGS[name], params, x)
    other = reference(dataclasses.replace(CONFIGS[name], **wrong), params, x)
    assert np.abs(other - expected).max() > 1e-2 * np.abs(expected).max()


def test_granites_softmax_of_the_chosen_is_the_renormalized_one():
    config = CONFIGS["granite"]
    params, x = draw(config)
    chosen, weights = routed(config, params, x)
    logits = np.take_along_axis(np.asarray(x @ params.router), np.asarray(chosen), -1)
    share = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, share, rtol=1e-5)


@pytest.mark.parametrize(
    "count, k, shape, router",
    [
        (1, 1, (4,), "softmax"),
        (3, 3, (3, 1), "softmax"),
        (8, 5, (1, 11), "sigmoid"),
    ],
)
def test_any_sizes(count, k, shape, router):
    config = ExpertsConfig(count, k, 3, router=router)
    params, _ = draw(config)
    x = np.random.default_rng(1).standard_normal((*shape, WIDTH)).astype(np.float32)
    y = run(config, params, x)
    assert y.shape == x.shape
    np.testing.assert_allclose(y, reference(config, params, x), atol=1e-5)


def mixture(config, params, x):
    return experts(MODEL, style(config), params, x)


def dense(config, params, x):
    """Every expert computes every token; weights of those not chosen are 0."""
    chosen, weights = route(config, (params.router, params.router_bias), x)
    each = jax.nn.one_hot(chosen, config.num_experts) * weights[..., None]
    up = jnp.einsum("btd,edf->btef", x, params.routed.up)
    if params.routed.gate is None:
        hidden = jax.nn.relu(up) ** 2
    else:
        gate = jnp.einsum("btd,edf->btef", x, params.routed.gate)
        hidden = jax.nn.silu(gate) * up
    y = jnp.einsum("btef,efd,bte->btd", hidden, params.routed.down, each.sum(-2))
    plain = params._replace(routed=jax.tree.map(jnp.zeros_like, params.routed))
    return y + mixture(config, plain, x)


# A choice by groups, as of "deepseek", has no gradient.
@pytest.mark.parametrize("name", ["qwen2", "nemotron"])
def test_gradients_are_those_of_the_dense_form(name):
    config = CONFIGS[name]
    params, x = draw(config)

    def loss(form, params, x):
        return (form(config, params, x) ** 2).sum()

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, form), (0, 1)))(params, x)
        for form in (mixture, dense)
    )
    # Nothing but the order of the experts depends on it, and that is no number.
    if params.router_bias is not None:
        assert not found[0].router_bias.any()
    assert jnp.abs(found[0].router).max() > 1e-3
    for actual, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-4, rtol=1e-4)


def test_bfloat16_tokens_are_routed_in_float32():
    config = CONFIGS["deepseek"]
    params, x = draw(config, dtype=jnp.bfloat16)
    y = run(config, params, x)
    assert y.dtype == jnp.bfloat16
    assert largest_difference(config, params, x) < 2e-2
    found = routed(config, params, x)
    params, x = jax.tree.map(
        lambda a: jnp.asarray(np.asarray(a, np.float32)), (params, x)
    )
    expected = routed(config, params, x)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


def test_tokens_are_independent():
    config = CONFIGS["deepseek"]
    params, x = draw(config)
    whole = run(config, params, x)
    part = run(config, params, x[1:, :4])
    np.testing.assert_allclose(part, whole[1:, :4], atol=1e-6)
    # All of them choose the same experts, and none is left out.
    same = np.broadcast_to(np.asarray(x)[:1, :1], x.shape)
    y = run(config, params, same)
    alike = np.broadcast_to(np.asarray(whole)[:1, :1], x.shape)
    np.testing.assert_allclose(y, alike, atol=1e-6)


def test_decoding_reads_the_matrices_of_the_chosen_experts_alone():
    config = CONFIGS["granite"]
    params, x = draw(config)
    token = x[:1, :1]
    chosen, _ = routed(config, params, token)
    held = np.isin(np.arange(config.num_experts), chosen)[:, None, None]
    broken = jax.tree.map(
        lambda m: np.where(held, np.asarray(m), np.float32(np.nan)), params.routed
    )
    y = run(config, params._replace(routed=broken), token)
    np.testing.assert_allclose(y, run(config, params, token), rtol=1e-6)


def test_the_bias_of_the_router_has_no_weight_decay():
    assert not decays("blocks/0/feed_forward/router_bias")
    assert decays("blocks/0/feed_forward/router")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"experts_per_token": 7}, "experts_per_token must be at most .* 6, got 7"),
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"groups": 2}, "groups must be 1 with router='softmax', got 2"),
        ({"router": "sigmoid", "groups": 4}, "groups must divide the 6 experts, got 4"),
        ({"chosen_groups": 2}, "chosen_groups must be at most groups=1, got 2"),
        ({"scale": 0.0}, "scale must be positive, got 0.0"),
        ({"shared_gate": True}, "shared_gate must be False without a shared expert"),
        (
            {"router": "sigmoid", "groups": 6, "chosen_groups": 1},
            "experts_per_token must be at most .* 1, got 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ExpertsConfig(6, 2, 3), **wrong)


def test_a_mixture_needs_a_feed_forward_without_biases():
    mixture = CONFIGS["granite"]
    with pytest.raises(
        ValueError, match="experts must be None with feed_forward='none'"
    ):
        BlockStyle(feed_forward="none", experts=mixture)
    with pytest.raises(
        ValueError, match="feed_forward_bias must be False with experts"
    ):
        dataclasses.replace(
            MODEL,
            styles=(BlockStyle(experts=mixture),),
            architecture=Architecture(feed_forward_bias=True),
        )


def model_with(config):
    """One layer; layers with and without experts are in published families."""
    return ModelConfig(
        mechanisms=MODEL.mechanisms,
        styles=(style(config),),
        num_layers=1,
        vocab_size=11,
        model_dim=WIDTH,
        dtype="float32",
    )


def test_a_model_with_experts_reads_in_pieces_and_is_saved():
    config = model_with(CONFIGS["deepseek"])
    assert from_record(ModelConfig, to_record(config), "model") == config
    model = tiny.drawn(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    tokens = np.asarray(tiny.tokens(1, 2, 6)) % 11
    read = functools.partial(tiny.method, model, "__call__")
    state, whole = read(model.init_state(2), tokens)
    state, first = read(model.init_state(2), tokens[:, :3])
    _, last = read(state, tokens[:, 3:])
    np.testing.assert_allclose(np.concatenate([first, last], 1), whole, atol=1e-5)


def test_lora_adapts_the_shared_expert_and_no_routed_one():
    config = model_with(CONFIGS["granite"])
    model = tiny.drawn(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    targets = LoraConfig(rank=2, targets=("gate", "up", "down"))
    adapted = add_lora(model, targets, jax.random.key(0))
    trained = nnx.to_pure_dict(nnx.state(adapted.blocks[0].feed_forward, nnx.Param))
    assert set(trained) == {"shared"} and set(trained["shared"]) == {
        "gate",
        "up",
        "down",
    }
    tokens = np.arange(6, dtype=np.int32).reshape(2, 3)
    before, after = (
        tiny.method(m, "__call__", m.init_state(2), tokens)[1] for m in (model, adapted)
    )
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_flops_count_the_chosen_experts():
    config = model_with(CONFIGS["granite"])
    counts = {}
    for k in (1, 3):
        mixture = dataclasses.replace(CONFIGS["granite"], experts_per_token=k)
        config = model_with(mixture)
        model = nnx.eval_shape(lambda c=config: LanguageModel(c, rngs=nnx.Rngs(0)))
        counts[k] = flops_per_token(model, 8)
    # Two more of three matrices.
    assert counts[3] - counts[1] == 6 * 2 * 3 * WIDTH * CONFIGS["granite"].hidden_dim


def test_the_mesh_must_divide_the_experts():
    config = model_with(CONFIGS["granite"])
    mesh = AbstractMesh((1, 1, 2, 1), ("data", "fsdp", "tensor", "sequence"))
    with pytest.raises(
        ValueError, match=r"mesh.tensor=2 does not divide the 5 experts of"
    ):
        require_divides(mesh, 2, config, 8)


@pytest.mark.slow
def test_eight_devices_give_what_one_does(with_devices):
    process = Process(experts_run.main, environment=with_devices(8))
    found = json.loads(process.require_end().splitlines()[-1])
    assert found["difference"] < 1e-5
    # Of 12 experts of 8 by 6.
    assert found["held"] == [6, 4, 6]
    # A device is not sent the experts of another.
    assert "f32[6,8,6]" in found["gathered"]
    assert not any("[12," in shape for shape in found["gathered"])
