"""LoRA: what is trained, what stays, and that merging changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from memjax.data.batches.batch import Batch
from memjax.mechanisms import AttentionConfig, GatedDeltaNetConfig
from memjax.mechanisms.layers.projections import Adapted
from memjax.models import LanguageModel, ModelConfig
from memjax.models.adapters import Frozen, merge_lora
from memjax.models.language_model.config import Architecture
from memjax.models.lora import LoraConfig, add_lora
from memjax.nnx import as_arrays
from memjax.training.step import StepConfig, init_train_state, make_train_step
from tests import tiny

V, D, H, G, K, F = 11, 8, 2, 1, 4, 12
ATTENTION = AttentionConfig(D, H, G, K, capacity=16)
CONFIG = ModelConfig(
    mechanisms=(ATTENTION, GatedDeltaNetConfig(D, H, K, K)),
    num_layers=2,
    vocab_size=V,
    model_dim=D,
    hidden_dim=F,
    tied_head=False,
    dtype="float32",
    remat=False,
)
LORA = LoraConfig(rank=3, alpha=6.0)
TOKENS = np.random.default_rng(0).integers(0, V, (2, 9), dtype=np.int32)


@functools.cache
def base():
    return tiny.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


@functools.cache
def adapted():
    return add_lora(base(), LORA, jax.random.key(2))


@functools.partial(jax.jit, static_argnums=0)
def run(graph, variables):
    model = nnx.merge(graph, variables)
    return model(model.init_state(2), jnp.asarray(TOKENS))[1]


def logits(model):
    return run(*nnx.split(model))


def moved():
    """The adapted model after some training: no B is zero any more."""
    params = nnx.state(adapted(), nnx.Param)
    leaves, structure = jax.tree.flatten(params)
    leaves = [
        jnp.asarray(np.asarray(x) + 0.3 * np.asarray(tiny.draw(i, *x.shape)))
        for i, x in enumerate(leaves)
    ]
    return nnx.merge(
        nnx.graphdef(adapted()),
        jax.tree.unflatten(structure, leaves),
        nnx.state(adapted(), Frozen),
    )


def names(model, kind):
    tree = nnx.state(model, kind)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.slow
def test_an_adapted_model_starts_as_its_base():
    np.testing.assert_array_equal(logits(adapted()), logits(base()))


def thin(at, down, up):
    return {f"{at}/down/value": down, f"{at}/up/value": up}


def test_only_low_rank_matrices_are_trainable():
    r = 3
    wide = {"gate": (D, F), "up": (D, F), "down": (F, D)}
    expected = {}
    for block in (0, 1):
        for name, (i, o) in wide.items():
            expected |= thin(f"blocks/{block}/feed_forward/{name}", (i, r), (r, o))
    for name, heads in {"query": H, "key": G, "value": G}.items():
        expected |= thin(f"blocks/0/mechanism/{name}", (D, r), (r, heads, K))
    # A recurrent layer has queries and keys as one, and a gate.
    for name, outputs in {
        "query_key": (2, H, K),
        "value": (H, K),
        "gate": (H, K),
    }.items():
        expected |= thin(f"blocks/1/mechanism/{name}", (D, r), (r, *outputs))
    for block in (0, 1):
        expected |= thin(f"blocks/{block}/mechanism/output", (H, K, r), (r, D))
    assert names(adapted(), nnx.Param) == expected
    frozen = sum(np.prod(shape) for shape in names(adapted(), Frozen).values())
    assert frozen == sum(x.size for x in jax.tree.leaves(nnx.state(base())))


@pytest.mark.slow
def test_adapter_is_scaled_by_alpha_over_rank():
    model, dense = moved(), nnx.merge(*nnx.split(base()))
    for block, new in zip(model.blocks, dense.blocks, strict=True):
        for place in ("mechanism", "feed_forward"):
            params = getattr(new, place)
            for name, change in as_arrays(getattr(block, place))._asdict().items():
                if not isinstance(change, Adapted):
                    continue
                a, b = np.asarray(change.down), np.asarray(change.up)
                weight = np.asarray(getattr(params, name))
                product = a.reshape(-1, 3) @ b.reshape(3, -1)
                weight = weight + 6.0 / 3 * product.reshape(weight.shape)
                params = params._replace(**{name: nnx.Param(jnp.asarray(weight))})
            setattr(new, place, nnx.data(params))
    found = logits(model)
    np.testing.assert_allclose(found, logits(dense), atol=1e-5)
    assert np.abs(found - logits(base())).max() > 0.1


@pytest.mark.slow
def test_merge_equals_adapted_model():
    model = moved()
    merged = merge_lora(model)
    assert nnx.graphdef(merged) == nnx.graphdef(base()) and names(merged, Frozen) == {}
    np.testing.assert_allclose(logits(merged), logits(model), atol=1e-5)
    again = jax.tree.map(
        np.array_equal, nnx.state(merge_lora(merged)), nnx.state(merged)
    )
    assert all(jax.tree.leaves(again))


@pytest.mark.slow
def test_update_changes_adapters_only():
    transform, config = optax.adam(1e-2), StepConfig()
    state = init_train_state(adapted(), transform, config, 2)
    adapters = len(names(adapted(), nnx.Param))
    assert len(jax.tree.leaves(state.optimizer)) == 2 * adapters + 1
    batch = Batch(
        jnp.asarray(TOKENS[:, :-1]),
        jnp.asarray(TOKENS[:, 1:]),
        jnp.ones((2, 8)),
        jnp.ones(2, bool),
    )
    step = jax.jit(make_train_step(adapted(), transform, config), donate_argnums=0)
    before = jax.tree.map(np.array, (state.params, state.frozen))
    after, metrics = step(state, batch)
    after, metrics = step(after, batch)
    assert metrics["finite"] == 1
    same = jax.tree.map(np.array_equal, before, (after.params, after.frozen))
    assert not any(jax.tree.leaves(same[0])) and all(jax.tree.leaves(same[1]))


def test_ungated_feed_forward_has_two_targets():
    opt = Architecture(feed_forward="relu", feed_forward_bias=True)
    biased = dataclasses.replace(ATTENTION, qkv_bias=True)
    config = dataclasses.replace(CONFIG, architecture=opt, mechanisms=(biased,))
    model = nnx.eval_shape(
        lambda: add_lora(
            LanguageModel(config, key=jax.random.key(0)), LORA, jax.random.key(1)
        )
    )
    found = {name.split("/")[-3] for name in names(model, nnx.Param)}
    assert found == {"query", "key", "value", "output", "up", "down"}


def test_adapters_have_different_keys():
    config = dataclasses.replace(CONFIG, mechanisms=(ATTENTION,))
    targets = LoraConfig(rank=3, targets=("query", "gate"))
    model = tiny.drawn(lambda: LanguageModel(config, key=jax.random.key(0)))
    adapted = add_lora(model, targets, jax.random.key(1))
    drawn = [
        as_arrays(part).down
        for block in adapted.blocks
        for part in (block.mechanism.query, block.feed_forward.gate)
    ]
    assert len({np.asarray(x).tobytes() for x in drawn}) == len(drawn) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(rank=0), "rank must be at least 1, got 0"),
        (dict(alpha=0.0), "alpha must be positive, got 0"),
        (dict(targets=()), "targets must be at least 1"),
    ],
)
def test_invalid_lora_configs_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**wrong)


def test_invalid_models_are_refused():
    with pytest.raises(ValueError, match="has LoRA adapters already"):
        add_lora(adapted(), LORA, jax.random.key(0))
    recurrent = dataclasses.replace(CONFIG, mechanisms=CONFIG.mechanisms[1:])
    model = tiny.drawn(lambda: LanguageModel(recurrent, key=jax.random.key(0)))
    with pytest.raises(ValueError, match="none of the model's: its mechanisms are"):
        add_lora(model, LoraConfig(targets=("query",)), jax.random.key(0))
