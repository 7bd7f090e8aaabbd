"""GGUF files of the reference library are read exactly, malformed ones refused."""

import json
import re
import struct
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

from memjax.models.checkpoints.gguf_checkpoint import GGUFCheckpoint
from memjax.models.checkpoints.gguf_file import GGUFFile
from memjax.models.checkpoints.gguf_tokenizer import tokenizer_json
from memjax.models.checkpoints.pretrained import load_pretrained
from memjax.models.checkpoints.safetensors_write import write_folder

gguf = pytest.importorskip("gguf", reason="needs the optional package gguf")

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 64, 4, 2, 16, 96, 32


def write(path, tensors, entries=(), architecture="llama"):
    """Writes a file by the library; a tensor is an array or (raw bytes, type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in dict(entries).items():
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for name, value in tensors.items():
        raw, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def hf_tensors(*, biased, seed=0):
    """A random model of one layer under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    attention = "model.layers.0.self_attn."
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM}
    rows["v_proj"] = rows["k_proj"]
    shapes = {f"{attention}{n}.weight": (r, WIDTH) for n, r in rows.items()}
    if biased:
        shapes |= {f"{attention}{n}.bias": (r,) for n, r in rows.items()}
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


@pytest.mark.parametrize("architecture, biased", [("llama", False), ("qwen2", True)])
def test_names_and_rows_are_those_of_hugging_face(architecture, biased, tmp_path):
    tensors = hf_tensors(biased=biased)
    stored = gguf_tensors(tensors, permute=architecture == "llama")
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


@pytest.mark.parametrize("architecture, biased", [("llama", False), ("qwen2", True)])
def test_the_model_equals_that_of_a_folder(architecture, biased, tmp_path):
    tensors = hf_tensors(biased=biased)
    stored = gguf_tensors(tensors, permute=architecture == "llama")
    file = write(tmp_path / "a.gguf", stored, entries(architecture), architecture)
    config = GGUFCheckpoint(file).config
    write_folder(tmp_path / "a", config, tensors.items(), None)
    models = [load_pretrained(path).model for path in (file, tmp_path / "a")]
    assert models[0].config == models[1].config
    jax.tree.map(np.testing.assert_array_equal, *(nnx.state(m) for m in models))


def test_rope_scaling_is_recovered(llama):
    linear = llama(rope__scaling__type="linear", rope__scaling__factor=4.0)
    found = GGUFCheckpoint(linear).config["rope_scaling"]
    assert found == {"rope_type": "linear", "factor": 4.0}
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


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"block_count": None}, "lacks the entry llama.block_count"),
        ({"block_count": "one"}, "llama.block_count must be a whole number, got 'one'"),
        ({"rope__scaling__type": "yarn"}, "rope.scaling.type='yarn'"),
        ({"rope__dimension_count": 8}, "rope.dimension_count must be 16, got 8"),
        ({"expert_count": 4}, "expert_count must be 0, got 4"),
        ({"vocab_size": 33}, "vocab_size must be 32, got 33"),
        ({"more": {"blk.0.attn_q_norm.weight": np.ones(4, "f4")}}, "attn_q_norm"),
    ],
)
def test_unsupported_entries_are_named(changes, words, llama):
    with pytest.raises(ValueError, match=re.escape(words)):
        GGUFCheckpoint(llama(**changes))


def test_an_unknown_architecture_is_named(tmp_path):
    path = write(tmp_path / "a.gguf", {"a.weight": np.ones(4, "f4")}, (), "gemma3")
    with pytest.raises(ValueError, match="gemma3"):
        GGUFCheckpoint(
            write(path, {"token_embd.weight": np.ones((4, 4), "f4")}, (), "gemma3")
        )


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
    make = lambda: write(tmp_path / "a.gguf", plain, {"text": "abcd", "flag": True})
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


TEXT = (
    "It's 12345 tokens, I'LL say: don't stop.\n\n\n1 And\t\r\n  22  x = 3.14;"
    "caf\u00e9 cafe\u0301 \u65e5\u672c\u8a9e \u00bd  ??!! <|end|>  word\n"
)


@pytest.fixture(scope="module", name="vocabulary")
def _vocabulary():
    """Tokens and merges of a small byte-level BPE."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=324,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([TEXT] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.eos_token_id": 0,
    }


def rebuilt(vocabulary, pre_tokenizer, **more):
    metadata = vocabulary | {"tokenizer.ggml.pre": pre_tokenizer} | more
    written = tokenizer_json(metadata, "file") or b""
    return tokenizers.Tokenizer.from_str(written.decode())


def split(tokenizer, text):
    """The parts of a text that merges never join."""
    parts = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in parts]


@pytest.mark.parametrize(
    "pre_tokenizer, text, parts",
    [
        ("gpt-2", " 12345 x", [" 12345", " x"]),
        ("gpt-2", "I'LL don't", ["I", "'", "LL", " don", "'t"]),
        ("gpt-2", "a\n\n1", ["a", "\n", "\n", "1"]),
        ("smollm", "  12 x", ["  ", "1", "2", " x"]),
        ("smollm", "a\n\n1", ["a", "\n\n", "1"]),
        ("llama-bpe", " 12345 I'LL", [" ", "123", "45", " I", "'LL"]),
        ("llama-bpe", "a.\n\n b", ["a", ".\n\n", " b"]),
        ("qwen2", " 123 I'LL", [" ", "1", "2", "3", " I", "'LL"]),
        ("default", "12345 a,b", ["123", "45", " a", ",", "b"]),
    ],
)
def test_text_is_split_by_the_named_pre_tokenizer(
    pre_tokenizer, text, parts, vocabulary
):
    assert split(rebuilt(vocabulary, pre_tokenizer), text) == parts


@pytest.mark.parametrize(
    "pre_tokenizer", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"]
)
def test_decoding_inverts_encoding(pre_tokenizer, vocabulary):
    tokenizer = rebuilt(vocabulary, pre_tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert 0 in ids and len(ids) < len(TEXT.encode())
    expected = TEXT.replace("e\u0301", "\u00e9") if pre_tokenizer == "qwen2" else TEXT
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_first_and_last_tokens_are_added_as_the_file_says(vocabulary):
    plain = rebuilt(vocabulary, "gpt-2").encode("a").ids
    flag = {"tokenizer.ggml.add_eos_token": True}
    assert rebuilt(vocabulary, "gpt-2", **flag).encode("a").ids == [*plain, 0]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pre": "tekken-9"}, "tokenizer.ggml.pre='tekken-9'"),
        ({"pre": None}, "tokenizer.ggml.pre=None"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5'.*tokenizer.json"),
        ({"model": "llama"}, "scores must hold 324 numbers"),
        ({"merges": ["a b c"]}, "the merge 'a b c'"),
        ({"merges": ["zz qq"]}, "the merge 'zz qq'"),
        ({"merges": 3}, "merges must list strings"),
        ({"tokens": ["a", "a"]}, "'a' appears twice"),
        ({"token_type": 1}, "token_type must hold 324 numbers"),
        ({"token_type": [1]}, "token_type must hold 324 numbers"),
        ({"eos_token_id": 324}, r"eos_token_id must be in \[0, 324\), got 324"),
    ],
)
def test_malformed_vocabularies_are_refused(changes, words, vocabulary):
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = vocabulary | {"tokenizer.ggml.pre": "gpt-2"} | changes
    with pytest.raises(ValueError, match=f"the.gguf.*{words}"):
        tokenizer_json(metadata, "the.gguf")


def test_a_file_without_vocabulary_has_no_tokenizer(llama):
    assert GGUFCheckpoint(llama()).tokenizer() is None


@pytest.fixture(scope="module", name="pieces")
def _pieces():
    return json.loads((GOLDEN / "sentencepiece.json").read_text())


def sentencepiece(pieces, **changes):
    metadata = {k: v for k, v in pieces.items() if k != "ids"} | {"model": "llama"}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in (metadata | changes).items()}
    written = tokenizer_json(metadata, "the.gguf") or b""
    return tokenizers.Tokenizer.from_str(written.decode())


def test_sentencepiece_vocabularies_give_the_same_ids(pieces):
    tokenizer = sentencepiece(pieces)
    for text, ids in pieces["ids"].items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        if "\u2581" not in text:
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_sentencepiece_adds_a_first_token_by_default(pieces):
    start = {"bos_token_id": 1}
    assert sentencepiece(pieces, **start).encode("a").tokens == ["<s>", "\u2581a"]
    more = {"add_bos_token": False, "add_space_prefix": False}
    assert sentencepiece(pieces, **start, **more).encode("a").tokens == ["a"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces changes texts"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap changes texts"),
        ({"scores": [0.0]}, "scores must hold 700 numbers"),
        ({"scores": ["0"] * 700}, "scores must hold 700 numbers"),
        ({"token_type": [1] * 700}, "one unknown token.*got \\[\\] and 256 bytes"),
        ({"tokens": [f"t{i}" for i in range(700)]}, "0 bytes"),
    ],
)
def test_malformed_sentencepiece_vocabularies_are_refused(changes, words, pieces):
    with pytest.raises(ValueError, match=f"the.gguf.*{words}"):
        sentencepiece(pieces, **changes)
