"""Configs and tensors of Hugging Face's families: all are read or refused by name."""

import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig, GLAConfig, SlidingWindowConfig
from memjax.mechanisms.layers.rope import RopeScaling
from memjax.models import LanguageModel, ModelConfig
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.export import to_hf_config
from memjax.models.checkpoints.hf.known_keys import (
    ONLY,
    USED,
    report_unread,
)
from memjax.models.checkpoints.hf.parameters import parameters_from_tensors
from memjax.models.checkpoints.hf.tensor_names import (
    tensors_from_parameters,
)
from memjax.models.language_model.presets import TINY
from tests import tiny

YARN = dict(type="yarn", factor=2.0)
LLAMA: dict[str, Any] = dict(
    model_type="llama",
    vocab_size=48,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
)
KV = dict(num_key_value_heads=2)
QWEN2 = LLAMA | KV | dict(model_type="qwen2")
MISTRAL = LLAMA | KV | dict(model_type="mistral", sliding_window=8)
HEADS: dict[str, Any] = dict(model_dim=16, num_heads=4, num_kv_heads=4, head_dim=4)
OPT: dict[str, Any] = dict(
    model_type="opt",
    vocab_size=48,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=24,
    max_position_embeddings=64,
)


QWEN3 = QWEN2 | dict(model_type="qwen3", head_dim=4)
SMOLLM3 = LLAMA | KV | dict(model_type="smollm3", num_hidden_layers=4)
GEMMA = LLAMA | KV | dict(model_type="gemma3_text", num_hidden_layers=6, head_dim=4)
GEMMA |= dict(query_pre_attn_scalar=4, sliding_window=8)
OLMO2 = LLAMA | dict(model_type="olmo2")


def layers_of(config) -> list[Any]:
    return list(config.layers)


def test_gemma_of_transformers_4_and_5_are_equal():
    """As published: a pattern and two keys, and a record for each kind of layer."""
    scaling = dict(rope_type="linear", factor=8.0)
    config = from_hf_config(GEMMA | dict(rope_scaling=scaling))
    heads = [(m.rope_theta, getattr(m, "window", 0)) for m in layers_of(config)]
    assert heads == [(10_000.0, 8)] * 5 + [(1e6, 0)]
    assert layers_of(config)[5].rope_scaling == RopeScaling("linear", 8.0)
    assert layers_of(config)[0].rope_scaling is None
    ropes: dict[str, Any] = dict(sliding_attention=dict(rope_theta=1e4))
    ropes["full_attention"] = scaling | dict(rope_theta=1e6)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    five = dict(rope_parameters=ropes, layer_types=kinds)
    assert config == from_hf_config(GEMMA | five)
    assert config == from_hf_config(to_hf_config(config))
    local = dict(rope_local_base_freq=99.0, sliding_window_pattern=2)
    other = from_hf_config(GEMMA | local)
    assert [m.rope_theta for m in layers_of(other)] == [99.0, 1e6] * 3


def test_every_fourth_layer_of_smollm3_has_no_rope():
    config = from_hf_config(SMOLLM3)
    assert [m.rope_theta for m in layers_of(config)] == [2e6, 2e6, 2e6, None]
    windows = dict(use_sliding_window=True, sliding_window=8)
    config = from_hf_config(SMOLLM3 | windows)
    assert [getattr(m, "window", 0) for m in config.layers] == [0, 0, 0, 8]
    assert config == from_hf_config(to_hf_config(config))


def test_old_configs_have_defaults():
    config = from_hf_config(LLAMA)
    heads = config.heads
    assert (heads.num_kv_heads, heads.head_dim, heads.rope_theta) == (4, 4, 10_000.0)
    assert not config.tied_head and not config.architecture.scale_embedding
    assert config.capacity == config.window == 64
    assert from_hf_config(OPT).tied_head
    assert from_hf_config(OPT).architecture.learned_positions == 66


def test_rope_configs_of_transformers_4_and_5_are_equal():
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaling["original_max_position_embeddings"] = 32
    four = dict(rope_theta=5e5, rope_scaling=scaling | dict(type="llama3"))
    five = dict(rope_parameters=scaling | dict(rope_type="llama3", rope_theta=5e5))
    config = from_hf_config(LLAMA | four)
    assert config == from_hf_config(LLAMA | five)
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    heads = config.heads
    assert (heads.rope_theta, heads.rope_scaling) == (5e5, expected)


def test_yarn_files_have_the_length_before_or_after_scaling():
    """Qwen's documented change adds a factor and leaves the length."""
    added = dict(factor=4.0, original_max_position_embeddings=64, rope_type="yarn")
    config = from_hf_config(QWEN2 | dict(rope_scaling=added))
    assert config.capacity == 256
    after = QWEN2 | dict(rope_scaling=added, max_position_embeddings=256)
    assert from_hf_config(after) == config
    assert from_hf_config(after | dict(rope_scaling=added | dict(factor=None))) == (
        config
    )
    longer = after | dict(max_position_embeddings=300)
    assert from_hf_config(longer).capacity == 300
    assert from_hf_config(to_hf_config(config)) == config


@pytest.mark.parametrize(
    "config,windows,window",
    [
        (MISTRAL, (8, 8), 8),
        (MISTRAL | dict(sliding_window=None), (None, None), 64),
        (QWEN2 | dict(sliding_window=8), (None, None), 64),
        (
            QWEN2
            | dict(sliding_window=8, use_sliding_window=True, max_window_layers=1),
            (None, 8),
            8,
        ),
        (
            QWEN2
            | dict(sliding_window=8, use_sliding_window=True)
            | dict(layer_types=["sliding_attention", "full_attention"]),
            (8, None),
            8,
        ),
    ],
)
def test_windows_are_where_the_config_has_them(config, windows, window):
    found = from_hf_config(config)
    layers = tuple(getattr(mechanism, "window", None) for mechanism in found.layers)
    assert (layers, found.window) == (windows, window)
    assert from_hf_config(to_hf_config(found)) == found


@pytest.mark.parametrize(
    "base,wrong,message",
    [
        (LLAMA, dict(model_type="rwkv"), r"model_type must be one of .*got 'rwkv'"),
        (LLAMA, dict(model_type=None), "model_type is missing"),
        (LLAMA, dict(vocab_size=None), "vocab_size is missing"),
        (LLAMA, dict(vocab_size="48"), "vocab_size must be of type int, got '48'"),
        (LLAMA, dict(hidden_size=0), "hidden_size must be at least 1, got 0"),
        (LLAMA, dict(num_hidden_layers=10**12), "num_hidden_layers must be at most"),
        (LLAMA, dict(num_attention_heads=3), "must divide hidden_size=16, got 3"),
        (LLAMA, dict(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
        (LLAMA, dict(rope_scaling=dict(type="dynamic", factor=2.0)), "got 'dynamic'"),
        (LLAMA, dict(rope_scaling=dict(type="linear")), "factor is missing"),
        (LLAMA, dict(rope_scaling=[2]), r"rope_scaling must be of type dict, got \[2"),
        (
            LLAMA,
            dict(rope_scaling=YARN | dict(mscale=-1.0, mscale_all_dim=1.0)),
            "mscale must be positive, got -1.0",
        ),
        (LLAMA, dict(rope_scaling=YARN | dict(factor=0.0)), "factor must be in"),
        (LLAMA, dict(rope_theta=float("inf")), "rope_theta must be at most"),
        (LLAMA, dict(rms_norm_eps=1e30), "norm_epsilon must be at most 1"),
        (
            LLAMA,
            dict(max_position_embeddings=10**18),
            "max_position_embeddings must be at most",
        ),
        (LLAMA, dict(is_causal=False), "is_causal must be True, got False"),
        (LLAMA, dict(partial_rotary_factor=0.5), "partial_rotary_factor must be 1.0"),
        (LLAMA, dict(quantization_config=dict(bits=4)), "quantization_config must be"),
        (LLAMA, dict(pruned_heads={"0": [1]}), "pruned_heads must be {}, got"),
        (OPT, dict(is_encoder_decoder=True), "is_encoder_decoder must be False"),
        (LLAMA, dict(rope_interleaved=True), "rope_interleaved must be False"),
        (LLAMA, dict(layer_types=["sliding_attention"] * 2), "layer_types must name"),
        (QWEN2, dict(num_key_value_heads=3), "num_key_value_heads must divide .*got 3"),
        (QWEN2, dict(layer_types=["full_attention"]), "layer_types must name the 2"),
        (MISTRAL, dict(sliding_window="8"), "sliding_window must be of type int"),
        (QWEN3, dict(head_dim=None), "head_dim is missing"),
        (SMOLLM3, dict(no_rope_layers=[1]), "no_rope_layers must have 0 or 1 for each"),
        (GEMMA, dict(tie_word_embeddings=False), "tie_word_embeddings must be true"),
        (GEMMA, dict(final_logit_softcapping=30.0), "softcapping must be null, got 30"),
        (GEMMA, dict(use_bidirectional_attention=True), "bidirectional_attention must"),
        (GEMMA, dict(hidden_activation="silu"), "hidden_activation must be 'gelu_py"),
        (OLMO2, dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
        (OPT, dict(activation_function="gelu"), "activation_function must be 'relu'"),
        (OPT, dict(layer_norm_elementwise_affine=False), "elementwise_affine must be"),
        (OPT, dict(_remove_final_layer_norm=True), "_remove_final_layer_norm must be"),
    ],
)
def test_unsupported_configs_are_refused_by_key(base, wrong, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(base | wrong)


CONFIGS = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO2, GEMMA, OPT)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_used_keys_are_those_that_are_read(config):
    """The table of keys says what the code does."""
    seen = set()

    class Watched(dict):
        def get(self, key, default=None):
            seen.add(key)
            return super().get(key, default)

        def __contains__(self, key):
            seen.add(key)
            return super().__contains__(key)

    family = config["model_type"]
    from_hf_config(Watched(config | dict(use_sliding_window=True)))
    assert seen - {*ONLY} <= USED[family]
    # With a scaling of RoPE alone, or before.
    elsewhere = {"original_max_position_embeddings", "auto_map"}
    assert USED[family] - seen <= elsewhere | {"partial_rotary_factor"}


def test_keys_that_are_not_read_are_reported_in_one_line(caplog):
    plain = LLAMA | dict(attention_dropout=0.1, memjax_origin="a", num_experts=None)
    report_unread(plain, "llama", "here")
    assert not caplog.records
    report_unread(plain | dict(sliding_window=8, num_experts=4), "llama", "here")
    (record,) = caplog.records
    expected = "here: not read of config.json: num_experts; sliding_window"
    assert record.getMessage() == expected


def test_defaults_that_differ_between_families_must_be_given():
    for base, key in ((QWEN2, "num_key_value_heads"), (MISTRAL, "sliding_window")):
        with pytest.raises(ValueError, match=f"{key} is missing from config.json"):
            from_hf_config({k: v for k, v in base.items() if k != key})


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            dict(mechanisms=(GLAConfig(16, 4, 4, 4),)),
            "mechanisms must be .*got GLAConfig",
        ),
        (
            dict(mechanisms=(SlidingWindowConfig(**HEADS), AttentionConfig(**HEADS))),
            "mechanisms must all be alike",
        ),
        (
            dict(mechanisms=[SlidingWindowConfig(**HEADS, window=w) for w in (4, 8)]),
            r"windows must all be alike in a published family, got \[4, 8\]",
        ),
        (
            dict(mechanisms=(SlidingWindowConfig(**HEADS, window=8, sinks=2),)),
            "sinks must be 0 in a published family, got 2",
        ),
        (
            dict(mechanisms=(AttentionConfig(**HEADS), AttentionConfig(16, 2, 2, 8))),
            "mechanisms must all have the same attention heads",
        ),
        (
            dict(mechanisms=(AttentionConfig(**HEADS, rope_theta=None),)),
            "rope_theta must",
        ),
        (dict(style=dict(norm_first=False)), "architecture.norm_first must be True"),
        (dict(style=dict(feed_forward="relu")), "feed_forward must be 'swiglu'"),
        (
            dict(
                mechanisms=(AttentionConfig(**HEADS, qkv_bias=True),),
                style=dict(feed_forward_bias=True),
            ),
            "feed_forward_bias must be False",
        ),
        (
            dict(mechanisms=(AttentionConfig(16, 6, 2, 4),)),
            "num_heads must divide model",
        ),
        (
            dict(mechanisms=(AttentionConfig(**HEADS, query_scale=0.3),)),
            "query_scale must be None but in Gemma 3",
        ),
        (
            dict(
                mechanisms=(AttentionConfig(**HEADS, qk_norm="width"),),
                norm_epsilon=1e-6,
            ),
            "qk_norm must be 'head'",
        ),
        (
            dict(
                mechanisms=(AttentionConfig(**HEADS, qk_norm="head"),),
                norm_epsilon=1e-5,
            ),
            "qk_norm_epsilon must be norm_epsilon=1e-05",
        ),
        (dict(style=dict(norm_outputs=True)), "norm_first must be False"),
        (
            dict(style=dict(norm_outputs=True, feed_forward="geglu")),
            "scale_embedding must be True",
        ),
    ],
)
def test_models_that_no_family_describes_are_not_exported(changes, message):
    config = from_hf_config(LLAMA)
    style = dataclasses.replace(config.architecture, **changes.pop("style", {}))
    if "mechanisms" in changes:
        changes["mechanisms"] = tuple(changes["mechanisms"])
    config = dataclasses.replace(config, architecture=style, **changes)
    with pytest.raises(ValueError, match=message):
        to_hf_config(config)


def test_opt_with_another_epsilon_is_not_exported():
    config = dataclasses.replace(from_hf_config(OPT), norm_epsilon=1e-6)
    with pytest.raises(ValueError, match="norm_epsilon must be 1e-05 in OPT, got"):
        to_hf_config(config)


@functools.cache
def checkpoint(family="llama", tied=False):
    config = from_hf_config(
        {"llama": LLAMA, "opt": OPT}[family] | dict(tie_word_embeddings=tied)
    )
    model = tiny.drawn(lambda: LanguageModel(config, key=jax.random.key(0)))
    return config, dict(tensors_from_parameters(model.config, model))


def load(config, tensors):
    shapes = {name: value.shape for name, value in tensors.items()}
    return parameters_from_tensors(config, shapes, tensors.__getitem__, "here")


def same(model, tensors):
    found = dict(tensors_from_parameters(model.config, model))
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_bare_names_are_read_and_buffers_ignored(family):
    config, tensors = checkpoint(family, tied=True)
    bare = {name.removeprefix("model."): v for name, v in tensors.items()}
    same(load(config, bare), tensors)
    embedding = next(v for name, v in tensors.items() if "embed_tokens" in name)
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "lm_head.weight": embedding,
    }
    if family == "opt":
        more["model.decoder.version"] = np.ones(1, np.float32)
    same(load(config, tensors | more), tensors)


def test_all_wrong_tensors_are_listed():
    config, tensors = checkpoint()
    wrong = tensors | {
        "model.norm.bias": np.ones(16, np.float32),
        "model.layers.1.mlp.up_proj.weight": np.ones((16, 24), np.float32),
    }
    del wrong["lm_head.weight"]
    with pytest.raises(ValueError) as error:
        load(config, wrong)
    for part in (
        "here: 3 wrong tensors",
        "'lm_head.weight' is missing",
        "'model.norm.bias' is not of this model",
        "'model.layers.1.mlp.up_proj.weight' has the shape [16, 24], expected [24, 16]",
    ):
        assert part in str(error.value)


def test_a_tied_head_that_is_another_matrix_is_refused():
    config, tensors = checkpoint(tied=True)
    other = {"lm_head.weight": np.ones((48, 16), np.float32)}
    with pytest.raises(ValueError, match="'lm_head.weight' must be the embedding"):
        load(config, tensors | other)


def test_a_scaled_tied_embedding_is_exported_as_an_untied_head():
    """Its tied head over a scaled embedding is a head of its own there."""
    small = dataclasses.replace(TINY, num_layers=1, model_dim=16, hidden_dim=24)
    ours = small.model("attention", vocab_size=32)
    model = tiny.drawn(lambda: LanguageModel(ours, key=jax.random.key(0)))
    record = json.loads(json.dumps(to_hf_config(ours)))
    config: ModelConfig = from_hf_config(record)
    assert not config.tied_head
    again = load(config, dict(tensors_from_parameters(model.config, model)))
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 32)
    run = nnx.jit(lambda model: model.logits(model.encode(model.embed(tokens))))
    logits = [run(m) for m in (model, again)]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)
