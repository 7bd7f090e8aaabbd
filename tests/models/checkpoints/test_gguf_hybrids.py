"""Models with recurrent layers from GGUF files as llama.cpp's converter writes them."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from memjax.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from memjax.models.checkpoints.gguf.config import read_config
from memjax.models.checkpoints.gguf.known_keys import WITHOUT_EFFECT, check_keys
from memjax.models.checkpoints.gguf.parts import GGUFParts
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.parameters import parameters_from_tensors
from tests.models.checkpoints.gguf_conversion import stored, write_file
from tests.models.checkpoints.gguf_entries import entries
from tests.models.checkpoints.gguf_models import ALONE, FAMILIES, hf_tensors
from tests.models.checkpoints.gguf_writing import gguf, write

EVERY = pytest.mark.parametrize("family", FAMILIES)
TOKENS = jnp.array([[3, 1, 20, 7, 7, 0, 11, 5, 19]])


def _logits(model):
    return model(model.init_state(1), TOKENS)[1]


# Compiled once and run twice.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
logits_of = jax.jit(_logits, compiler_options=QUICK)


def from_hugging_face(family, tensors):
    config = from_hf_config(FAMILIES[family].config)
    shapes = {name: value.shape for name, value in tensors.items()}
    kind = FAMILIES[family].config["model_type"]
    return parameters_from_tensors(config, shapes, tensors.__getitem__, family=kind)


def test_logits_of_falcon_are_those_of_the_original(tmp_path, caplog):
    """Of other families the tensors are: here multipliers are in the file's."""
    tensors = hf_tensors("falcon_h1")
    path = write_file(tmp_path / "a.gguf", "falcon_h1", tensors)
    expected = logits_of(from_hugging_face("falcon_h1", tensors))
    assert np.ptp(expected) > 1
    found = logits_of(memjax.load(path).model)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    assert not caplog.messages


def test_quantized_logits_are_those_of_the_rounded_original(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0

    def fits(value):
        return value.ndim == 2 and value.shape[-1] % 32 == 0

    tensors = hf_tensors("qwen3_5")
    rounded = {
        name: gguf.dequantize(gguf.quantize(value, kind), kind)
        if fits(value)
        else value
        for name, value in tensors.items()
    }
    converted = {
        name: (gguf.quantize(value, kind), kind) if fits(value) else value
        for name, value in stored("qwen3_5", tensors).items()
    }
    assert sum(isinstance(value, tuple) for value in converted.values()) > 10
    path = write(tmp_path / "a.gguf", converted, entries("qwen3_5"), "qwen35")
    expected = logits_of(from_hugging_face("qwen3_5", rounded))
    found = logits_of(memjax.load(path).model)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "falcon_h1"])
def test_tensors_and_sizes_are_those_of_hugging_face(family, tmp_path):
    tensors = hf_tensors(family)
    checkpoint = GGUFCheckpoint(write_file(tmp_path / "a.gguf", family, tensors))
    assert checkpoint.shapes == {name: value.shape for name, value in tensors.items()}
    for name, value in tensors.items():
        # 1 was added to norms, and of rates the logarithm is taken.
        found = checkpoint.get(name)
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=2e-7, err_msg=name)
    original = FAMILIES[family].config
    assert from_hf_config(checkpoint.config) == from_hf_config(original)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "falcon_h1"])
def test_families_are_read_whole(family, tmp_path, caplog):
    path = write_file(tmp_path / "a.gguf", family, hf_tensors(family))
    model = memjax.load(path).model
    assert model.config == from_hf_config(FAMILIES[family].config)
    assert not caplog.messages


def test_multipliers_of_falcon_are_in_its_weights(tmp_path):
    tensors = hf_tensors("falcon_h1")
    checkpoint = GGUFCheckpoint(write_file(tmp_path / "a.gguf", "falcon_h1", tensors))
    original = {
        key: value
        for key, value in FAMILIES["falcon_h1"].config.items()
        if "multiplier" not in key
    }
    assert from_hf_config(checkpoint.config) == from_hf_config(original)
    without = {n: v for n, v in tensors.items() if not n.endswith("mamba.norm.weight")}
    checkpoint = GGUFCheckpoint(write_file(tmp_path / "b.gguf", "falcon_h1", without))
    changed = original | {"mamba_rms_norm": False}
    assert from_hf_config(checkpoint.config) == from_hf_config(changed)


def test_a_tied_falcon_is_reported(tmp_path, caplog):
    tensors = hf_tensors("falcon_h1")
    del tensors["lm_head.weight"]
    checkpoint = GGUFCheckpoint(write_file(tmp_path / "a.gguf", "falcon_h1", tensors))
    assert checkpoint.config["tie_word_embeddings"] is True
    (record,) = caplog.records
    assert "a.gguf: the head is the embedding" in record.getMessage()


def test_derived_numbers_stay_float32(tmp_path):
    tensors = hf_tensors("qwen3_5")
    kind = gguf.GGMLQuantizationType.BF16
    converted = {
        name: (gguf.quantize(value, kind), kind)
        for name, value in stored("qwen3_5", tensors).items()
    }
    path = write(tmp_path / "a.gguf", converted, entries("qwen3_5"), "qwen35")
    checkpoint = GGUFCheckpoint(path)
    wide = {n for n in tensors if checkpoint.get_compact(n).dtype == np.float32}
    assert "model.layers.0.linear_attn.A_log" in wide
    assert wide == {
        name
        for name in tensors
        if name.endswith(("A_log", "norm.weight"))
        and not name.endswith("linear_attn.norm.weight")
    }


def test_layers_that_predict_further_tokens_are_left_out(tmp_path, caplog):
    tensors = hf_tensors("qwen3_5")
    more = {
        f"blk.2.{name}.weight": np.ones((4, 4), "f4")
        for name in ("attn_q", "attn_norm", "nextn.eh_proj", "nextn.shared_head_norm")
    }
    changes = {"block_count": 3, "nextn_predict_layers": 1}
    path = write_file(tmp_path / "a.gguf", "qwen3_5", tensors, more, **changes)
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.shapes == {name: value.shape for name, value in tensors.items()}
    assert checkpoint.config["num_hidden_layers"] == 2
    (record,) = caplog.records
    assert "not read of its tensors: 4 of the layers from 2 on" in record.getMessage()


def test_recurrent_layers_are_those_that_are_listed(tmp_path):
    def kinds(**changes):
        path = tmp_path / "a.gguf"
        write(path, embedding, entries("qwen3_5", block_count=5, **changes), "qwen35")
        return [kind[0] for kind in GGUFCheckpoint(path).config["layer_types"]]

    embedding = {"token_embd.weight": np.ones((24, 32), "f4")}
    assert kinds() == [*"lflfl"]
    assert kinds(full_attention_interval=None) == [*"lllfl"]
    listed = [True, False, False, True, True]
    assert kinds(recurrent_layers=listed) == [*"lffll"]
    listed[-1] = False
    assert kinds(recurrent_layers=listed, nextn_predict_layers=1) == [*"lffl"]


def test_rope_turns_the_channels_that_the_file_says(tmp_path):
    # 30 / 44 * 44 is less than 30.
    changes = {"key_length": 44, "value_length": 44, "dimension_count": 30}
    embedding = {"token_embd.weight": np.ones((24, 32), "f4")}
    path = tmp_path / "a.gguf"
    write(path, embedding, entries("qwen3_5", **changes), "qwen35")
    attention = from_hf_config(GGUFCheckpoint(path).config).layers[1].attention
    assert attention is not None
    assert (attention.head_dim, attention.rope_dim) == (44, 30)


@pytest.mark.parametrize(
    "family, changes, words",
    [
        ("qwen3_5", {"group_count": 4}, "group_count must divide ssm.time_step_rank=6"),
        ("qwen3_5", {"time_step_rank": 10}, "rank must divide ssm.inner_size=192, got"),
        ("qwen3_5", {"freq_base": None}, "lacks the entry qwen35.rope.freq_base"),
        ("qwen3_5", {"dimension_count": None}, "lacks the entry qwen35.rope.dimension"),
        ("qwen3_5", {"recurrent_layers": [True]}, "must be 2 booleans, one a layer"),
        ("qwen3_5", {"recurrent_layers": [1, 0]}, "must be 2 booleans, one a layer"),
        ("qwen3_5", {"nextn_predict_layers": 2}, "must be below block_count=2, got 2"),
        ("qwen3_5", {"expert_count": 4}, "qwen35.expert_count must be 0, got 4"),
        ("qwen3_5", {"block_count": 2**31}, "block_count must be at most 1,024, got"),
        ("mamba2", {"state_size": 2**31}, "must be at most 2,147,483,647, got 21474"),
        ("mamba2", {"head_count": 4}, "mamba2.attention.head_count must be 0, got 4"),
        ("mamba2", {"dt_b_c_rms": True}, "ssm.dt_b_c_rms must be False, got True"),
        ("mamba2", {"group_count": 3}, "must divide ssm.time_step_rank=4, got 3"),
        (
            "mamba2",
            {"nextn_predict_layers": 1},
            "predict_layers must be 0, got 1",
        ),
        ("granite", {"head_count_kv": 1}, "kv must be 2 whole numbers, one a layer"),
        ("granite", {"head_count_kv": [1, 2]}, "must be 0 or the same number in each"),
        ("granite", {"finetuned": 1}, "rope.scaling.finetuned must be true or false"),
        ("granite", {"finetuned": None}, "must be 4, half of a head, got 8"),
        ("granite", {"inner_size": 40}, "must be a multiple of embedding_length=16"),
        ("granite", {"logit_scale": -1.0}, "logit_scale must be in [1e-38, 1e+38], go"),
        ("bamba", {"logit_scale": 2.0}, "logit_scale must be 1 with RoPE, got 2.0"),
        ("bamba", {"dimension_count": None}, "must be 4, half of a head, got 8"),
        ("qwen3_5_moe", {"expert_gating_func": 2}, "expert_gating_func must be 1, got"),
        (
            "qwen3_next",
            {"expert_weights_norm": False},
            "weights_norm must be true, got",
        ),
        ("qwen3_next", {"expert_weights_scale": 2.0}, "must be 1, got 2.0"),
        ("granite_moe", {"expert_used_count": None}, "lacks the entry granitehybrid.e"),
        ("nemotron_h", {"feed_forward_length": [0, 9, 9, 0]}, "must be 0 where layers"),
        ("nemotron_h_moe", {"expert_gating_func": 1}, "expert_gating_func must be 2"),
        ("nemotron_h_moe", {"expert_group_used_count": None}, "lacks the entry nemotr"),
        ("nemotron_h_moe", {"moe_latent_size": 8}, "moe_latent_size must be 0, got 8"),
        ("falcon_h1", {"dimension_count": 4}, "rope.dimension_count must be 6, got 4"),
        ("falcon_h1", {"embedding_scale": 2.0}, "embedding_scale must be 1, got 2.0"),
    ],
)
def test_entries_that_are_missing_or_out_of_range_are_named(
    family, changes, words, tmp_path
):
    width = FAMILIES[family].config["hidden_size"]
    embedding = {"token_embd.weight": np.ones((24, width), "f4")}
    architecture, path = FAMILIES[family].architecture, tmp_path / "a.gguf"
    write(path, embedding, entries(family, **changes), architecture)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        GGUFCheckpoint(path)
    assert "a.gguf" in str(error.value)


@pytest.mark.parametrize(
    "family, changes, shown",
    [
        (
            "mamba2",
            {"layer_norm_rms_epsilon": 2.0},
            "got 2.0 .from mamba2.attention.layer_norm_rms_epsilon=2.0",
        ),
        (
            "granite",
            {"head_count": 3},
            "head_dim .*, granitehybrid.attention.head_count=3",
        ),
    ],
)
def test_refusals_of_our_options_show_the_entries_of_the_file(
    family, changes, shown, tmp_path
):
    architecture, path = FAMILIES[family].architecture, tmp_path / "a.gguf"
    changed = entries(family, **changes)
    write(path, stored(family, hf_tensors(family)), changed, architecture)
    with pytest.raises(ValueError, match=f"a.gguf: .*{shown}"):
        memjax.load(path)


@pytest.mark.parametrize(
    "family, own, change, words",
    [
        ("granite", "blk.0.ffn_up.weight", None, "expected 2 tensors"),
        ("falcon_h1", "blk.0.ffn_norm.weight", np.ones(16, "f4"), "expected 1 tensors"),
        ("qwen3_5", "blk.0.ssm_a", np.zeros(6, "f4"), "'blk.0.ssm_a' must be below 0"),
        ("qwen3_5", "blk.0.ssm_in.weight", np.ones((4, 4), "f4"), "no known role"),
        ("mamba2", "blk.0.ssm_d", None, "mixer.D"),
        ("qwen3_next", "blk.0.ffn_up_exps.weight", np.ones((2, 10, 32), "f4"), "of 3"),
        ("qwen3_next", "blk.0.ssm_in.weight", np.ones((4, 4), "f4"), "no known role"),
        ("granite", "blk.0.ffn_up.weight", np.ones((20, 4), "f4"), "differ in width"),
    ],
)
def test_tensors_that_are_missing_or_wrong_are_named(
    family, own, change, words, tmp_path
):
    tensors = stored(family, hf_tensors(family)) | {own: change}
    kept = {name: value for name, value in tensors.items() if value is not None}
    architecture, path = FAMILIES[family].architecture, tmp_path / "a.gguf"
    write(path, kept, entries(family), architecture)
    with pytest.raises(ValueError, match=re.escape(words)):
        memjax.load(path)


# Keys of RoPE where there is none, an arbitrary length, and the width of dense layers
# where there are none.
UNUSED = {
    **dict.fromkeys(
        ("granite", "granite_moe", "nemotron_h", "nemotron_h_moe"), "rope."
    ),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_next"), "feed_forward_length"),
    **dict.fromkeys(ALONE, "context_length"),
}
VALUES = (True, False, 3, 0.5, "yarn")


@EVERY
def test_every_entry_is_used_refused_or_reported(family, caplog):
    """No entry that the library knows changes without notice."""
    architecture, config = FAMILIES[family]
    mixers = family in ALONE or "nemotron" in family
    root = "backbone.embeddings" if mixers else "model.embed_tokens"
    names = (f"{root}.weight", "lm_head.weight")
    shapes = {name: (24, config["hidden_size"]) for name in names}
    metadata = {
        key: np.array(value) if isinstance(value, list) else value
        for key, value in entries(family).items()
    }
    metadata["general.architecture"] = architecture

    def outcome(changes):
        """The configuration and what is reported, or the error."""
        # Without a file: there are hundreds of entries.
        file = GGUFParts.__new__(GGUFParts)
        file.path, file.records = Path("a"), {}
        file.metadata = metadata | changes
        caplog.clear()
        try:
            check_keys(file.metadata, "a")
            return read_config(file, shapes), caplog.messages
        except ValueError as error:
            return str(error)

    library = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    keys = {key for group in library for key in vars(group).values()}
    keys = {k for k in keys if isinstance(k, str) and k.startswith("{arch}.")}
    scaled = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    yarn = {f"{architecture}.{key}": value for key, value in scaled.items()}
    outcomes = [(base, outcome(base)) for base in ({}, yarn)]

    def is_noticed(key):
        own = key.format(arch=architecture, dense="dense")
        return any(
            outcome(base | {own: value}) != before
            for base, before in outcomes
            for value in VALUES
        )

    unnoticed = {key.removeprefix("{arch}.") for key in keys if not is_noticed(key)}
    exempt = UNUSED.get(family, "-")
    assert {k for k in unnoticed if not k.startswith(exempt)} <= WITHOUT_EFFECT
