"""GGUF files of the reference library are read exactly, malformed ones refused."""

import re
import shutil
import struct
import sys
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import memjax
from memjax.mechanisms.layers.rope import RopeScaling
from memjax.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from memjax.models.checkpoints.gguf.file import GGUFFile
from memjax.models.checkpoints.gguf.known_keys import (
    GENERAL,
    ONLY,
    SAMPLING,
    USED,
    WITHOUT_EFFECT,
    check_keys,
)
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.safetensors_write import write_folder
from memjax.models.sampling import Sampling
from tests.models.checkpoints.gguf_writing import gguf, write

FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 64, 4, 2, 16, 96, 32


@pytest.mark.parametrize("name", FORMATS)
def test_number_formats_decode_as_the_library_does(name, tmp_path):
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    path = write(tmp_path / "a.gguf", {"one.weight": (raw, kind)})
    found = GGUFFile(path).read("one.weight")
    assert found.dtype == np.float32 and found.shape == (6, 64)
    np.testing.assert_array_equal(found, gguf.dequantize(raw, kind))
    assert np.abs(found - values).max() < 0.35


def test_other_quantizations_go_through_the_library(tmp_path):
    kind = gguf.GGMLQuantizationType.Q6_K
    raw = np.random.default_rng(0).integers(0, 60, (3, 210), np.uint8)
    path = write(tmp_path / "a.gguf", {"one.weight": (raw, kind)})
    found = GGUFFile(path).read("one.weight")
    assert found.shape == (3, 256)
    np.testing.assert_array_equal(found, gguf.dequantize(raw, kind))


def hf_tensors(*, biased, normed=False, seed=0):
    """A random model of one layer under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    attention = "model.layers.0.self_attn."
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM}
    rows["v_proj"] = rows["k_proj"]
    shapes = {f"{attention}{n}.weight": (r, WIDTH) for n, r in rows.items()}
    if biased:
        shapes |= {f"{attention}{n}.bias": (r,) for n, r in rows.items()}
    if normed:
        shapes |= {f"{attention}{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
    shapes |= {
        f"{attention}o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
        "model.layers.0.input_layernorm.weight": (WIDTH,),
        "model.layers.0.post_attention_layernorm.weight": (WIDTH,),
        "model.layers.0.mlp.gate_proj.weight": (HIDDEN, WIDTH),
        "model.layers.0.mlp.up_proj.weight": (HIDDEN, WIDTH),
        "model.layers.0.mlp.down_proj.weight": (WIDTH, HIDDEN),
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def gguf_tensors(tensors, *, permute):
    """The same as llama.cpp stores them, row by row."""
    short = {
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.layers.0": "blk.0",
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    result = {}
    for name, value in tensors.items():
        if permute and re.search("[qk]_proj", name):
            stored = value.copy()
            for row in range(len(value)):
                head, channel = divmod(row, HEAD_DIM)
                half, pair = divmod(channel, HEAD_DIM // 2)
                stored[head * HEAD_DIM + 2 * pair + half] = value[row]
            value = stored
        for long, brief in short.items():
            name = name.replace(long, brief)
        result[name] = value
    return result


def entries(architecture="llama", **changes):
    plain = {
        "context_length": 256,
        "embedding_length": WIDTH,
        "block_count": 1,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10_000.0,
    }
    changed = plain | {k.replace("__", "."): v for k, v in changes.items()}
    kept = {k: v for k, v in changed.items() if v is not None}
    return {f"{architecture}.{key}": value for key, value in kept.items()}


@pytest.fixture(name="llama")
def _llama(tmp_path):
    """Writes a Llama with changed entries or tensors."""

    def make(more=(), **changes):
        tensors = gguf_tensors(hf_tensors(biased=False), permute=True) | dict(more)
        return write(tmp_path / "llama.gguf", tensors, entries(**changes))

    return make


ARCHITECTURES = pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])


def tensors_of(architecture):
    """Under the names of Hugging Face, and under those of the file."""
    biased, normed = architecture == "qwen2", architecture == "qwen3"
    tensors = hf_tensors(biased=biased, normed=normed)
    return tensors, gguf_tensors(tensors, permute=architecture == "llama")


@ARCHITECTURES
def test_tensors_equal_hugging_faces(architecture, tmp_path):
    tensors, stored = tensors_of(architecture)
    path = write(tmp_path / "a.gguf", stored, entries(architecture), architecture)
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.shapes == {n: v.shape for n, v in tensors.items()}
    for name, value in tensors.items():
        np.testing.assert_array_equal(checkpoint.get(name), value, err_msg=name)
    config = checkpoint.config
    assert config["model_type"] == architecture
    assert (config["hidden_size"], config["intermediate_size"]) == (WIDTH, HIDDEN)
    assert (config["vocab_size"], config["num_hidden_layers"]) == (VOCABULARY, 1)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["head_dim"], config["max_position_embeddings"]) == (16, 256)
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 10_000
    assert config["tie_word_embeddings"] is False


@ARCHITECTURES
def test_the_model_equals_that_of_a_folder(architecture, tmp_path):
    tensors, stored = tensors_of(architecture)
    file = write(tmp_path / "a.gguf", stored, entries(architecture), architecture)
    config = GGUFCheckpoint(file).config
    write_folder(tmp_path / "a", config, tensors.items(), {})
    models = [memjax.load(path).model for path in (file, tmp_path / "a")]
    assert models[0].config == models[1].config
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m) for m in models))


def test_all_parts_of_a_file_are_read(tmp_path):
    tensors, stored = tensors_of("llama")
    write(tmp_path / "a.gguf", stored, entries(), tensors_a_part=5)
    parts = [tmp_path / f"a-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        checkpoint = GGUFCheckpoint(part)
        for name, value in tensors.items():
            np.testing.assert_array_equal(checkpoint.get(name), value, err_msg=name)
    wrong = tmp_path / "b-00001-of-00002.gguf"
    for part in parts[:2]:
        shutil.copy(part, tmp_path / part.name.replace("a-", "b-").replace("3.", "2."))
    with pytest.raises(ValueError, match="part 0 of 3 by its split.no.*0 of 2 by its"):
        GGUFCheckpoint(wrong)
    shutil.copy(parts[1], tmp_path / "whole.gguf")
    with pytest.raises(ValueError, match="is part 1 of 3 by its split.no"):
        GGUFCheckpoint(tmp_path / "whole.gguf")
    shutil.copy(parts[0], parts[1])
    with pytest.raises(ValueError, match="part 0 of 3 by .*part 1 of 3 by its name"):
        GGUFCheckpoint(parts[0])
    parts[1].unlink()
    with pytest.raises(ValueError, match="a-00002-of-00003.gguf is missing, a part"):
        memjax.load(parts[0])


def test_quantized_parameters_fit_in_bfloat16(llama):
    q8, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    values = hf_tensors(biased=False)["lm_head.weight"]
    for kind, expected in ((q8, "bfloat16"), (f32, "float32")):
        path = llama(more={"output.weight": (gguf.quantize(values, kind), kind)})
        model = memjax.load(path, dtype="bfloat16").model
        assert model.head.get_value().dtype == expected
        assert model.norm.get_value().dtype == "float32"


def test_widening_of_quantized_weights_is_reported(llama, caplog):
    q4 = gguf.GGMLQuantizationType.Q4_0
    names = ("output", "token_embd", "blk.0.attn_q", "blk.0.attn_output")
    names += ("blk.0.ffn_gate", "blk.0.ffn_up", "blk.0.ffn_down")
    tensors = gguf_tensors(hf_tensors(biased=False), permute=True)
    more = {f"{n}.weight": tensors[f"{n}.weight"] for n in names}
    path = llama(more={n: (gguf.quantize(v, q4), q4) for n, v in more.items()})
    memjax.load(path, dtype="bfloat16")
    memjax.load(path, param_dtype="bfloat16")
    memjax.load(llama())
    assert not caplog.records
    path = llama(more={n: (gguf.quantize(v, q4), q4) for n, v in more.items()})
    memjax.load(path)
    (record,) = caplog.records
    assert "take 0 MB in float32; half of it with param_dtype" in record.getMessage()


def test_rope_scaling_is_recovered(llama):
    linear = llama(rope__scaling__type="linear", rope__scaling__factor=4.0)
    found = GGUFCheckpoint(linear).config["rope_scaling"]
    assert found == {"rope_type": "linear", "factor": 4.0}
    # As files had it first: the old key, and no type.
    assert GGUFCheckpoint(llama(rope__scale_linear=4.0)).config["rope_scaling"] == found
    ignored = llama(rope__scaling__type="none", rope__scaling__factor=4.0)
    assert "rope_scaling" not in GGUFCheckpoint(ignored).config
    # Llama 3.2 with a head of 16: the table of transformers' llama3 scaling.
    inverse = 500_000.0 ** -(np.arange(8) / 8)
    scaled = []
    for frequency in inverse:
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / 4:
            scaled.append(frequency)
        elif wavelength > 8192:
            scaled.append(frequency / 32)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled.append((1 - smooth) * frequency / 32 + smooth * frequency)
    factors = {"rope_freqs.weight": (inverse / scaled).astype(np.float32)}
    path = llama(factors, rope__freq_base=500_000.0)
    assert GGUFCheckpoint(path).config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors["rope_freqs.weight"][3] *= 1.01
    with pytest.raises(ValueError, match="rope_freqs.weight.*not.*Llama 3.1"):
        GGUFCheckpoint(llama(factors, rope__freq_base=500_000.0))
    with pytest.raises(ValueError, match="scales RoPE twice, by 2.0"):
        GGUFCheckpoint(llama(factors, rope__scaling__factor=2.0))


def test_yarn_is_read(llama):
    """Its amplitude relative to the paper's; the original length may be missing."""
    given = dict(type="yarn", factor=4.0, original_context_length=64, attn_factor=1.5)
    given |= dict(yarn_beta_fast=16.0, yarn_beta_slow=2.0)
    path = llama(**{f"rope__scaling__{key}": value for key, value in given.items()})
    config = from_hf_config(GGUFCheckpoint(path).config)
    assert config.capacity == 256
    assert config.heads.rope_scaling == RopeScaling(
        "yarn",
        4.0,
        original_positions=64,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.5 * (0.1 * np.log(4) + 1),
    )
    path = llama(rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert from_hf_config(GGUFCheckpoint(path).config).capacity == 4 * 256


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"block_count": None}, "lacks the entry llama.block_count"),
        ({"block_count": "one"}, "llama.block_count must be a whole number, got 'one'"),
        ({"rope__scaling__type": "longrope"}, "rope.scaling.type='longrope'"),
        ({"rope__scaling__attn_factor": 1.5}, "attn_factor must be 1.0, got 1.5"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5},
            "yarn_ext_factor must be 1.0, got 0.5",
        ),
        ({"rope__dimension_count": 8}, "rope.dimension_count must be 16, got 8"),
        ({"expert_count": 4}, "expert_count must be 0, got 4"),
        ({"attention__causal": False}, "llama.attention.causal must be True, got F"),
        ({"logit_scale": 0.5}, "llama.logit_scale must be 1, got 0.5"),
        ({"vocab_size": 33}, "vocab_size must be 32, got 33"),
        ({"more": {"blk.0.attn_sinks.weight": np.ones(4, "f4")}}, "attn_sinks"),
    ],
)
def test_unsupported_entries_are_named(changes, words, llama):
    with pytest.raises(ValueError, match=re.escape(words)):
        GGUFCheckpoint(llama(**changes))


def test_every_entry_of_the_library_is_known():
    """But those of other architectures, and of sampling that is not made here."""
    known = USED | WITHOUT_EFFECT | ONLY.keys()
    unknown = set()
    for group in (gguf.Keys.General, gguf.Keys.Split, gguf.Keys.Tokenizer):
        keys = [key for name, key in vars(group).items() if name.isupper()]
        unknown |= {key for key in keys if not GENERAL.fullmatch(key)}
    steps = {name for key, (_, more) in SAMPLING.items() for name in (key, *more)}
    # The order of the steps has no value that says nothing.
    assert unknown == steps | {gguf.Keys.General.SAMPLING_SEQUENCE}
    for name, key in vars(gguf.Keys.Rope).items():
        if name.isupper() and key.removeprefix("{arch}.") not in known:
            assert name == "DIMENSION_COUNT_SWA"


def test_entries_that_are_not_read_are_reported_in_one_line(llama, caplog):
    GGUFCheckpoint(llama(pooling_type=1, swin_norm=False))
    assert not caplog.records
    GGUFCheckpoint(llama(ssm__inner_size=3, of_another=True))
    (record,) = caplog.records
    unread = "not read of its metadata: 'llama.ssm.inner_size'; 'llama.of_another'"
    assert record.getMessage().endswith(unread)


def test_steps_of_sampling_that_are_not_built_are_reported(caplog):
    def check(**sampling):
        keys = {f"general.sampling.{key}": value for key, value in sampling.items()}
        check_keys({"general.architecture": "llama"} | keys, "x")

    off: dict[str, Any] = {"temp": 0.5, "penalty_repeat": 1.0, "penalty_last_n": 64}
    off |= {"xtc_probability": 0.0, "xtc_threshold": 1.0, "mirostat_tau": 5.0}
    check(**off)
    assert not caplog.records
    check(**off | {"penalty_repeat": 1.1, "mirostat": 2, "sequence": "kt"})
    names = ("penalty_repeat", "penalty_last_n", "mirostat_tau", "mirostat", "sequence")
    keys = "; ".join(f"'general.sampling.{name}'" for name in names)
    assert caplog.messages == [f"x: not read of its metadata: {keys}"]


def test_an_unknown_architecture_is_named(tmp_path):
    path = write(tmp_path / "a.gguf", {"a.weight": np.ones(4, "f4")}, (), "gemma2")
    with pytest.raises(ValueError, match="general.architecture='gemma2' is not read"):
        GGUFCheckpoint(path)


def test_files_that_are_no_models_are_refused_by_name(tmp_path):
    entries = {"general.type": "adapter", "adapter.type": "lora"}
    path = write(tmp_path / "a.gguf", {"a.lora_a": np.ones((2, 2), "f4")}, entries)
    with pytest.raises(ValueError, match="type must be 'model', got 'adapter'"):
        GGUFCheckpoint(path)


# Malformed files. Offsets are found by what the library wrote there.
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def overwrite(path, at, value):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(value)] = value
    path.write_bytes(raw)
    return path


def refuses(path, words):
    with pytest.raises(ValueError, match=words) as error:
        GGUFFile(path)
    assert str(path) in str(error.value)


def test_malformed_headers_are_refused(tmp_path):
    plain = {"one.weight": np.ones((2, 32), "f4"), "two.weight": np.ones(8, "f4")}

    def make():
        return write(tmp_path / "a.gguf", plain, {"text": "abcd", "flag": True})

    raw = make().read_bytes()
    assert GGUFFile(make()).metadata["flag"] is True
    name = raw.index(b"one.weight")
    after = name + len("one.weight")
    # n_dims, two dimensions, kind, offset.
    dimensions, kind, offset = after + 4, after + 20, after + 24
    refuses(overwrite(make(), 0, b"GGML"), "magic")
    refuses(overwrite(make(), 4, U32.pack(9)), "version 9")
    refuses(overwrite(make(), 4, struct.pack(">I", 3)), "big-endian")
    refuses(overwrite(make(), 8, U64.pack(2**60)), "claims 1152921504606846976 tensors")
    refuses(overwrite(make(), 16, U64.pack(2**60)), "metadata entries")
    refuses(overwrite(make(), raw.index(b"abcd") - 8, U64.pack(2**50)), "'text'.*needs")
    refuses(overwrite(make(), raw.index(b"abcd"), b"\xff"), "'text' is not UTF-8")
    refuses(overwrite(make(), raw.index(b"flag") + 4, U32.pack(77)), "value type 77")
    refuses(overwrite(make(), raw.index(b"flag") + 8, b"\5"), "booleans")
    refuses(overwrite(make(), after, U32.pack(9)), "'one.weight' has 9 dimensions")
    refuses(overwrite(make(), dimensions, U64.pack(0)), "axis of 0")
    refuses(overwrite(make(), dimensions, U64.pack(2**62)), "'one.weight'.*cut short")
    refuses(overwrite(make(), kind, U32.pack(999)), "'one.weight'.*format 999")
    refuses(overwrite(make(), kind, U32.pack(24)), "'one.weight'.*format 24")
    refuses(overwrite(make(), offset, U64.pack(2**62)), "'one.weight'.*cut short")
    refuses(overwrite(make(), offset, U64.pack(3)), "multiple of 32")
    # The other tensor has one dimension.
    other = raw.index(b"two.weight") + len("two.weight") + 16
    refuses(overwrite(make(), other, U64.pack(0)), "'two.weight' overlap")
    refuses(overwrite(make(), name, b"two"), "'two.weight' appears twice")
    path = make()
    path.write_bytes(raw[: len(raw) - 8])
    refuses(path, "cut short")
    path.write_bytes(raw[:10])
    refuses(path, "shorter than its header")
    path.write_bytes(raw[: after + 6])
    refuses(path, "needs")


def test_rows_must_be_whole_blocks(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = gguf.quantize(np.ones((2, 32), "f4"), kind)
    path = write(tmp_path / "a.gguf", {"one.weight": (raw, kind)})
    at = path.read_bytes().index(b"one.weight") + 14
    refuses(overwrite(path, at, U64.pack(31)), "rows of 31 values.*multiple of 32")


def test_without_the_library_the_error_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf", {"one.weight": np.ones(4, "f4")})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        GGUFFile(path)


def test_template_and_sampling_are_kept(llama):
    checkpoint = GGUFCheckpoint(llama())
    letters = [chr(ord("a") + i) for i in range(VOCABULARY - 3)]
    tokens = ["<|end|>", *letters, "<|stop|>"]
    metadata = checkpoint._file.metadata
    metadata |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, tokens[1] + tokens[2]],
        "tokenizer.ggml.merges": [f"{tokens[1]} {tokens[2]}"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": VOCABULARY - 2,
        "tokenizer.chat_template": "{{ messages }}",
        "general.sampling.temp": float(np.float32(0.6)),
        "general.sampling.top_k": 20,
    }
    text = checkpoint.text_interface()
    assert text.chat_template == "{{ messages }}"
    drawn = {"do_sample": True, "temperature": 0.6, "top_k": 20}
    assert text.generation.eos_ids == (0, VOCABULARY - 2)
    assert text.generation.record == drawn
    assert text.generation.sampling == Sampling(0.6, 20)
    assert text.tokenizer is not None and text.tokenizer.vocab_size == VOCABULARY
    # Without an entry by its text, as llama.cpp finds it.
    del metadata["tokenizer.ggml.eot_token_id"]
    metadata["tokenizer.ggml.tokens"][3] = "<|im_end|>"
    assert checkpoint.text_interface().generation.eos_ids == (0, 3)
    metadata |= {"general.sampling.temp": -0.5, "general.sampling.top_k": -1}
    assert checkpoint.text_interface().generation.sampling == Sampling(0.0)
    for value, message in (
        ("warm", "gguf: general.sampling.temp='warm' must be a number"),
        (1e31, r"gguf: general.sampling.temp must be at most 1e\+30"),
    ):
        metadata["general.sampling.temp"] = value
        with pytest.raises(ValueError, match=message):
            print(checkpoint.text_interface().generation.sampling)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "more"]
    with pytest.raises(ValueError, match=f"model a vocabulary of {VOCABULARY}"):
        checkpoint.text_interface()


def test_the_licence_is_that_of_the_metadata(llama):
    checkpoint = GGUFCheckpoint(llama())
    assert checkpoint.license == {}
    checkpoint._file.metadata["general.license"] = "other"
    checkpoint._file.metadata["general.license.name"] = "Llama 3.2"
    assert checkpoint.license == {"license": "other", "license_name": "Llama 3.2"}


def test_a_file_without_vocabulary_has_no_tokenizer(llama):
    assert GGUFCheckpoint(llama()).text_interface().tokenizer is None
