"""Published models with recurrent layers: files, exports, and recorded numbers."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import memjax
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.export import to_hf_config
from memjax.models.checkpoints.hf.hybrids.files import text_config, text_tensors
from memjax.models.checkpoints.hf.known_keys import ONLY, USED, report_unread
from memjax.models.checkpoints.hf.parameters import (
    parameter_shapes,
    parameters_from_tensors,
)
from memjax.models.checkpoints.hf.peft import save_adapter
from memjax.models.checkpoints.hf.tensor_names import tensors_from_parameters
from memjax.models.checkpoints.own_model import abstract_model
from memjax.models.language_model.config import Architecture
from tests.models.checkpoints.hybrid_reading import read_parts, read_token_by_token

GOLDEN = Path(__file__).parents[1] / "golden" / "hybrids"
#: Those of flash-linear-attention; others are compared with transformers itself.
RECORDED = ("delta_net", "gated_deltanet", "gla", "gsa", "hgrn2", "retnet")
MODEL: dict[str, Any] = dict(
    vocab_size=48, hidden_size=24, num_hidden_layers=4, tie_word_embeddings=False
)
ATTENTION: dict[str, Any] = dict(
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    intermediate_size=40,
    rms_norm_eps=1e-3,
)
DELTA = MODEL | ATTENTION | dict(linear_key_head_dim=6, linear_value_head_dim=10)
DELTA |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
MAMBA = MODEL | ATTENTION | dict(mamba_n_heads=4, mamba_n_groups=2, mamba_d_state=10)
MAMBA |= dict(mamba_d_head=12)
QWEN = DELTA | dict(model_type="qwen3_5_text", head_dim=16)
OLMO = DELTA | dict(
    model_type="olmo_hybrid", rope_parameters=dict(rope_theta=None), rms_norm_eps=1e-6
)
MAMBA2 = MODEL | dict(
    model_type="mamba2", num_heads=4, head_dim=12, state_size=10, n_groups=2
)
GRANITE = MAMBA | dict(
    model_type="granitemoehybrid",
    num_local_experts=0,
    shared_intermediate_size=40,
    layer_types=["mamba", "mamba", "attention", "mamba"],
    attention_multiplier=0.2,
    residual_multiplier=0.4,
    embedding_multiplier=3.0,
    logits_scaling=1.7,
    tie_word_embeddings=True,
)
BAMBA = MAMBA | dict(model_type="bamba", attn_layer_indices=[1], mamba_conv_bias=False)
BAMBA |= dict(num_attention_heads=3, num_key_value_heads=1)
FALCON = MAMBA | dict(
    model_type="falcon_h1",
    mamba_d_ssm=48,
    attention_in_multiplier=1.2,
    attention_out_multiplier=0.9,
    key_multiplier=0.6,
    ssm_in_multiplier=1.4,
    ssm_out_multiplier=0.75,
    ssm_multipliers=[0.7, 1.1, 0.9, 1.3, 0.8],
    mlp_multipliers=[0.8, 1.3],
    lm_head_multiplier=0.7,
    embedding_multiplier=2.5,
    time_step_limit=[0.02, {"__float__": "Infinity"}],
)
LFM2 = MODEL | ATTENTION | dict(model_type="lfm2", full_attn_idxs=[2])
LFM2 |= dict(intermediate_size=48, block_multiple_of=8, tie_embedding=False)
SCAN = MODEL | dict(model_type="mamba", state_size=6, time_step_rank=5, use_bias=True)
FALCON_MAMBA = SCAN | dict(model_type="falcon_mamba", mixer_rms_eps=1e-2)
GRIFFIN = MODEL | dict(model_type="recurrent_gemma", num_attention_heads=3)
GRIFFIN |= dict(num_key_value_heads=1, attention_window_size=5, logits_soft_cap=4.0)
GRIFFIN |= dict(rms_norm_eps=1e-3, intermediate_size=80, tie_word_embeddings=True)
FLA: dict[str, Any] = MODEL | dict(
    model_type="gated_deltanet", num_heads=2, num_v_heads=4, head_dim=6
)
FLA |= dict(expand_v=1.5, allow_neg_eigval=True, hidden_ratio=2)
FLA |= dict(attn=dict(layers=[1, 3], num_heads=4, num_kv_heads=2, qkv_bias=True))
OF_FLA = MODEL | dict(num_heads=3, attn=FLA["attn"])
DELTA_NET = OF_FLA | dict(model_type="delta_net", expand_k=0.5, expand_v=1.5)
DELTA_NET |= dict(use_gate=True, conv_size=3)
GLA = OF_FLA | dict(model_type="gla")
RETNET = OF_FLA | dict(model_type="retnet")
GSA = OF_FLA | dict(model_type="gsa", num_slots=5, gate_logit_normalizer=16)
HGRN2 = OF_FLA | dict(model_type="hgrn2", expand_ratio=8, num_heads=None)
CONFIGS = (QWEN, OLMO, MAMBA2, GRANITE, BAMBA, FALCON)
CONFIGS += (FLA, DELTA_NET, GLA, RETNET, GSA, HGRN2)
CONFIGS += (LFM2, SCAN, FALCON_MAMBA, GRIFFIN)
by_family = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c["model_type"])


@functools.cache
def recorded(family):
    golden = load_file(GOLDEN / family / "golden.safetensors")
    return memjax.load(GOLDEN / family).model, golden


@pytest.mark.parametrize("family", RECORDED)
def test_parts_have_the_recorded_logits_and_memories(family):
    # Of one length, which one program reads; the memory after 16 is that of steps.
    read_parts(*recorded(family), (7, 14))


# GLA and HGRN2 are gated linear attention, as GSA is twice.
@pytest.mark.parametrize("family", ["delta_net", "gated_deltanet", "gsa", "retnet"])
def test_steps_have_the_recorded_logits_and_memories(family):
    read_token_by_token(*recorded(family))


@by_family
def test_a_written_config_is_read_as_the_same_model(config):
    model = from_hf_config(config)
    described = json.loads(json.dumps(to_hf_config(model)))
    assert described["model_type"] == config["model_type"]
    assert from_hf_config(described) == model


@functools.cache
def tensors_of(family):
    """A model of the family with drawn parameters, and its tensors."""
    (config,) = (c for c in CONFIGS if c["model_type"] == family)
    model_config = from_hf_config(config)
    model = abstract_model(model_config)
    state = nnx.state(model, nnx.Param)
    numbers = np.random.default_rng(0)

    def draw(x):
        return jnp.asarray(numbers.normal(size=x.shape), jnp.float32)

    drawn = jax.tree.map(draw, nnx.to_pure_dict(state))
    for i, block in drawn["blocks"].items():
        cell = block["mechanism"].get("cell", {})
        if "bound" in cell:
            # Those of the layers grow.
            cell["bound"] = jnp.tanh(cell["bound"]) + 2 * i
    nnx.replace_by_pure_dict(state, drawn)
    nnx.update(model, state)
    return model, dict(tensors_from_parameters(model_config, model))


def load(config, tensors, family):
    """The parameters that are read of tensors in a file's form."""
    shapes = {name: value.shape for name, value in tensors.items()}
    form = text_tensors(family, config, shapes, tensors.__getitem__, "here")
    return parameters_from_tensors(config, *form, "here", family)


def same(found, expected):
    found, expected = (
        nnx.to_pure_dict(nnx.state(m, nnx.Param)) for m in (found, expected)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
        found,
        expected,
    )


@by_family
def test_written_tensors_are_read_as_the_same_parameters(config):
    model, tensors = tensors_of(config["model_type"])
    same(load(model.config, tensors, config["model_type"]), model)


def test_olmo_of_transformers_is_read():
    """Its own `save_pretrained` cuts filters into thirds and renames a norm."""
    model, tensors = tensors_of("olmo_hybrid")
    theirs = dict(tensors)
    for i in range(3):
        at = f"model.layers.{i}.linear_attn"
        names = [f"{at}.{part}_conv1d.weight" for part in "qkv"]
        joined = np.concatenate([tensors[name] for name in names])
        assert [len(tensors[name]) for name in names] == [12, 12, 40]
        for name, part in zip(names, np.array_split(joined, [22, 44]), strict=True):
            theirs[name] = part
    norm = theirs.pop("model.layers.3.post_attention_layernorm.weight")
    theirs["model.layers.3.feedforward_layer_norm.weight"] = norm
    same(load(model.config, theirs, "olmo_hybrid"), model)
    theirs["model.layers.0.linear_attn.q_conv1d.weight"] = np.ones((3, 1, 4))
    with pytest.raises(ValueError, match=r"here: 3 wrong tensors: .*q_conv1d.weight"):
        load(model.config, theirs, "olmo_hybrid")


def multimodal(folder, changes=(), **more):
    """A folder as Qwen3.5 is published, and its text model."""
    model, tensors = tensors_of("qwen3_5_text")
    inner = QWEN | dict(eos_token_id=5, attn_output_gate=True)
    record = dict(model_type="qwen3_5", text_config=inner, vision_config=dict(depth=2))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(record | dict(changes)))
    file = {
        name.replace("model.", "model.language_model.", 1): np.ascontiguousarray(value)
        for name, value in tensors.items()
    }
    save_file(file | more, folder / "model.safetensors")
    return model


def test_the_text_of_a_multimodal_file_is_read(tmp_path, caplog):
    other = np.ones(3, np.float32)
    more = {"model.visual.merger.norm.weight": other, "mtp.norm.weight": other}
    model = multimodal(tmp_path / "a", **more)
    loaded = memjax.load(tmp_path / "a")
    same(loaded.model, model)
    assert loaded.text.generation.eos_ids == (5,)
    (line,) = [r.getMessage() for r in caplog.records if "pictures" in r.getMessage()]
    assert "2 tensors of pictures and of further heads are not read" in line
    assert not [r for r in caplog.records if "not read of config.json" in r.message]
    assert loaded.model.save(tmp_path / "b") == "qwen3_5_text"


def test_files_without_text_are_refused(tmp_path):
    for model_type in ("qwen3_5_vision", "qwen3_5_moe_vision"):
        with pytest.raises(ValueError, match=f"model_type must be .*'{model_type}'"):
            from_hf_config(dict(model_type=model_type))
    with pytest.raises(ValueError, match="text_config is missing"):
        from_hf_config(dict(model_type="qwen3_5"))
    with pytest.raises(ValueError, match="text_config.model_type must be 'qwen3_5_te"):
        from_hf_config(dict(model_type="qwen3_5", text_config=dict(model_type="a")))
    others = {"model.visual.a": np.ones(1), "mtp.b": np.ones(2)}
    with pytest.raises(ValueError, match="here: all 2 tensors are of pictures"):
        load(from_hf_config(QWEN), others, "qwen3_5_text")


@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_further_heads_of_files_with_experts_are_passed_over(family):
    tensors = {name: np.ones(1) for name in ("model.norm.weight", "mtp.norm.weight")}
    shapes = {name: value.shape for name, value in tensors.items()}
    get = tensors.__getitem__
    found, _ = text_tensors(family, from_hf_config(QWEN), shapes, get, "here")
    assert found == {"model.norm.weight": (1,)}


def test_the_outer_record_decides_whether_the_head_is_the_embedding():
    nested = dict(
        model_type="qwen3_5", text_config=QWEN | dict(tie_word_embeddings=True)
    )
    assert from_hf_config(nested).tied_head
    assert not from_hf_config(nested | dict(tie_word_embeddings=False)).tied_head
    assert text_config(QWEN) is QWEN


QUANTISED = dict(quant_method="fp8")


@pytest.mark.parametrize(
    "config,wrong,message",
    [
        (
            QWEN,
            dict(layer_types=["full_attention", "sliding_attention"] * 2),
            r"layer_types\[1\] must be 'linear_attention' or 'full_attention', "
            "got 'sliding_attention'",
        ),
        (QWEN, dict(layer_types=["full_attention"]), "must name 4 layers, got 1"),
        (QWEN, dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
        (QWEN, dict(attn_output_gate=False), "attn_output_gate must be True"),
        (QWEN, dict(partial_rotary_factor=0.2), "turn an even number of 16 channels"),
        (QWEN, dict(linear_num_key_heads=3), "num_key_heads must divide num_heads=4"),
        (QWEN, dict(quantization_config=QUANTISED), "quantization_config must be"),
        (
            dict(model_type="qwen3_5"),
            dict(text_config=QWEN | dict(quantization_config=QUANTISED)),
            "quantization_config must be absent",
        ),
        (MAMBA2, dict(use_bias=True), "use_bias must be False"),
        (MAMBA2, dict(time_step_limit=[0.1]), "time_step_limit must be two numbers"),
        (MAMBA2, dict(rms_norm=False), "rms_norm must be True"),
        (GRANITE, dict(mamba_d_head=5), "mamba_d_head must be 48 / mamba_n_heads=4"),
        (GRANITE, dict(mamba_proj_bias=True), "mamba_proj_bias must be False"),
        (FALCON, dict(ssm_multipliers=[1.0]), "ssm_multipliers must be 5 numbers"),
        (FALCON, dict(attention_bias=True), "attention_bias must be False"),
        (FALCON, dict(partial_rotary_factor=0.5), "partial_rotary_factor must be 1.0"),
        (FALCON, dict(projectors_bias=True), "projectors_bias must be False"),
        (BAMBA, dict(mlp_bias=True), "mlp_bias must be False"),
        (FLA, dict(use_short_conv=False), "use_short_conv must be True"),
        (FLA, dict(expand_v=1.55), "expand_v must make a whole number of head_dim=6"),
        (FLA, dict(attn=dict(num_heads=4)), "attn.layers must be a list"),
        (
            FLA,
            dict(attn=FLA["attn"] | dict(qk_norm=True)),
            "attn must have no keys but .*got 'qk_norm'",
        ),
        (FLA, dict(attn=FLA["attn"] | dict(num_heads=5)), "attn.num_heads must divide"),
        (DELTA_NET, dict(qk_norm="sum"), "qk_norm must be 'l2', got 'sum'"),
        (DELTA_NET, dict(qk_activation="relu"), "qk_activation must be 'silu'"),
        (DELTA_NET, dict(use_beta=False), "use_beta must be True"),
        (DELTA_NET, dict(expand_k=0.3), "expand_k must make hidden_size=24 a mult"),
        (DELTA_NET, dict(attnres_block_size=2), "attnres_block_size must be None"),
        (GLA, dict(clamp_min=-1.0), "clamp_min must be null, got -1.0"),
        (GLA, dict(num_kv_heads=1), "num_kv_heads must be num_heads=3, got 1"),
        (GLA, dict(use_short_conv=True), "use_short_conv must be False"),
        (GLA, dict(fuse_norm=False), "fuse_norm must be True"),
        (RETNET, dict(feature_map="relu"), "feature_map must be null, got 'relu'"),
        (RETNET, dict(expand_k=0.625), "key_dim must be even with retention, got 5"),
        (GSA, dict(feature_map="relu"), "feature_map must be 'swish'"),
        (GSA, dict(expand_v=2), "expand_v must be 1.0, got 2"),
        (HGRN2, dict(expand_ratio=7), "expand_ratio must divide hidden_size=24, got 7"),
        (HGRN2, dict(elementwise_affine=False), "elementwise_affine must be True"),
        (LFM2, dict(conv_bias=True), "conv_bias must be False"),
        (
            LFM2,
            dict(layer_types=["conv", "linear_attention"] * 2),
            r"layer_types\[1\] must be 'conv' or 'full_attention', got 'linear_att",
        ),
        (SCAN, dict(hidden_act="gelu"), "hidden_act must be 'silu'"),
        (SCAN, dict(time_step_rank=0), "time_step_rank must be at least 1"),
        (GRIFFIN, dict(hidden_activation="silu"), "hidden_activation must be 'gelu_p"),
        (GRIFFIN, dict(intermediate_size=81), "intermediate_size must be even, got 81"),
        (GRIFFIN, dict(lru_width=25), "num_blocks must divide width=25, got 3"),
        (
            GRIFFIN,
            dict(block_types=["recurrent", "mamba"]),
            r"block_types\[1\] must be one of .*got 'mamba'",
        ),
    ],
)
def test_unsupported_configs_are_refused_by_key(config, wrong, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(config | wrong)


@by_family
def test_used_keys_are_those_that_are_read(config):
    """The table of keys says what the code does."""
    seen = set()

    class Watched(dict):
        def get(self, key, default=None):
            seen.add(key)
            return super().get(key, default)

    from_hf_config(Watched(config))
    # With positions, and without what is derived then.
    derived = ("layer_types", "mamba_d_ssm")
    more = {key: config[key] for key in config.keys() - {*derived}} | {derived[1]: None}
    more |= dict(position_embedding_type="rope", rope_parameters=dict(rope_theta=9.0))
    # Granite's experts.
    more |= dict(num_local_experts=3, num_experts_per_tok=2)
    from_hf_config(Watched(more))
    assert seen - {*ONLY} <= USED[config["model_type"]]
    elsewhere = {"original_max_position_embeddings", "auto_map", "rope_scaling"}
    assert USED[config["model_type"]] - seen <= elsewhere


def test_keys_without_effect_are_those_of_a_family(caplog):
    report_unread(MAMBA2 | dict(chunk_size=8, expand=2), "mamba2", "here")
    assert not caplog.records
    report_unread(QWEN | dict(chunk_size=8, expand=2), "qwen3_5_text", "here")
    (record,) = caplog.records
    assert record.getMessage().endswith("config.json: chunk_size; expand")


def changed(config, **style):
    """A model whose first layer has another style."""
    model = from_hf_config(config)
    first: Any = model.mechanisms[0]
    others = model.mechanisms[1:]
    first = dataclasses.replace(first, style=dataclasses.replace(first.style, **style))
    return dataclasses.replace(model, mechanisms=(first, *others))


@pytest.mark.parametrize(
    "model,message",
    [
        (
            changed(QWEN, gate="sigmoid"),
            r"layers\[0\].style.gate must be 'silu' in the published family that is "
            "nearest, qwen3_5_text, got 'sigmoid'",
        ),
        (changed(QWEN, query_scale=1.0), r"layers\[0\].style.query_scale must be 0.4"),
        (changed(MAMBA2, unit_norm=True), r"layers\[0\].style.unit_norm must be False"),
        (
            dataclasses.replace(
                from_hf_config(QWEN),
                architecture=Architecture(),
                tied_head=True,
            ),
            "architecture.scale_embedding must be False",
        ),
        (
            dataclasses.replace(from_hf_config(OLMO), norm_epsilon=1e-3),
            r"layers\[3\].qk_norm_epsilon must be 0.001",
        ),
    ],
)
def test_models_that_no_family_has_are_refused_by_field(model, message):
    with pytest.raises(ValueError, match=message):
        to_hf_config(model)


def test_gated_deltanet_of_flash_linear_attention_is_that_of_olmo():
    """Which is compared with transformers; their norms have other epsilons."""
    sizes = dict(linear_key_head_dim=6, linear_value_head_dim=9)
    (theirs,) = {m for m in from_hf_config(OLMO | sizes).layers if not m.attention}
    model = from_hf_config(FLA | dict(norm_eps=1e-5))
    assert model.layers[0] == theirs and model.hidden_dim == 256
    attention: Any = model.layers[1]
    assert (attention.rope_theta, attention.qkv_bias) == (1e4, True)
    windows = FLA | dict(use_gate=False, attn=FLA["attn"] | dict(window_size=5))
    model = from_hf_config(windows)
    assert [m.tokens_per_call for m in model.layers] == [None, 5, None, 5]
    assert from_hf_config(to_hf_config(model)) == model
    assert "model.layers.0.attn.g_proj.weight" not in parameter_shapes(model)
    assert "model.layers.0.attn.b_proj.weight" in parameter_shapes(model)


def test_bounds_that_do_not_grow_are_saved_in_the_own_format(tmp_path):
    """One tensor of HGRN2's file has those of all layers, each a sum of parts."""
    config = from_hf_config(HGRN2 | dict(attn=None))
    model = abstract_model(config)
    state = nnx.state(model, nnx.Param)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), nnx.to_pure_dict(state))
    nnx.replace_by_pure_dict(state, zeros)
    nnx.update(model, state)
    with pytest.raises(ValueError, match="lower bounds must grow .* of layer 2 that"):
        tensors_from_parameters(config, model)
    assert model.save(tmp_path / "a") == "memjax"
    same(memjax.load(tmp_path / "a").model, model)


@pytest.mark.parametrize(
    "given,theta",
    [
        (dict(rope_parameters=dict(rope_theta=None)), None),
        (dict(rope_parameters=None, rope_theta=None), None),
        (dict(rope_parameters=None), 1e4),
        (dict(rope_parameters=dict(rope_type="default")), 1e4),
        (dict(rope_parameters=None, rope_theta=7.0), 7.0),
    ],
)
def test_rope_of_olmo_is_that_of_transformers(given, theta):
    """None where θ is null, as in the released file; a default where it is missing."""
    attention: Any = from_hf_config(OLMO | given).layers[3]
    assert attention.rope_theta == theta


def test_the_first_files_of_mamba_are_read(caplog):
    """As published: a copy of sizes under other keys, another name of the embedding."""
    record = SCAN | dict(d_model=24, n_layer=4, d_inner=48, rms_norm=True, ssm_cfg={})
    report_unread(record | dict(intermediate_size=48), "mamba", "here")
    assert not caplog.records
    model, tensors = tensors_of("mamba")
    first = dict(tensors)
    first["backbone.embedding.weight"] = first.pop("backbone.embeddings.weight")
    same(load(from_hf_config(record), first, "mamba"), model)


def test_adapters_of_joined_matrices_are_not_written_as_pefts(tmp_path):
    model, _ = tensors_of("mamba2")
    with pytest.raises(
        ValueError, match="attention alone for PEFT's files, got mamba2"
    ):
        save_adapter(model, tmp_path / "a", base="owner/name")
