"""SmolLM3, OLMo 2 and Gemma 3 from GGUF files, as llama.cpp's converter writes them.

The tensors are those of `golden/families`, the logits transformers'. Names of tensors
and of metadata are the reference library's.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import memjax
from memjax.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.safetensors_file import SafetensorsFile
from tests.models.checkpoints.gguf_writing import gguf, write

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
FAMILIES = ("smollm3", "olmo2", "gemma3")
KEYS = gguf.Keys
HEADS = {"q_proj": 4, "k_proj": 2}


def tensors_of(family):
    """The golden tensors, by Hugging Face's names, changed where GGUF cannot say."""
    file = SafetensorsFile(GOLDEN / family / "model.safetensors")
    tensors = {name: file.get(name) for name in file.shapes}
    if family == "smollm3":
        return with_idle_layers(tensors)
    if family == "gemma3":
        # Scores are divided by sqrt(12), a head's width. The golden's by sqrt(20).
        for name in tensors:
            if name.endswith("q_norm.weight"):
                tensors[name] = (tensors[name] + 1) * np.float32((12 / 20) ** 0.5) - 1
    return tensors


def with_idle_layers(tensors):
    """Two more layers that add nothing: the last is the fourth, without RoPE."""
    renamed = {}
    for name, value in tensors.items():
        if ".layers.0." in name:
            idle = name.endswith(("o_proj.weight", "down_proj.weight"))
            for layer in (1, 2):
                other = name.replace(".layers.0.", f".layers.{layer}.")
                renamed[other] = value * 0 if idle else value
        renamed[name.replace(".layers.1.", ".layers.3.")] = value
    return renamed


def stored(family, tensors):
    """Under the library's names, and as the converter changes them."""
    kind = next(k for k, n in gguf.MODEL_ARCH_NAMES.items() if n == family)
    names = gguf.get_tensor_name_map(kind, 4)
    result = {}
    for name, value in tensors.items():
        role = name.split(".")[-2]
        if family == "smollm3" and role in HEADS:
            halves = value.reshape(HEADS[role], 2, -1, value.shape[-1])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        if family == "gemma3" and role.endswith("norm"):
            value = value + 1
        result[names.get_name(name, (".weight",))] = value
    return result


def entries(family, **changes):
    """Metadata of the golden model; with `changes` by the last part of a key."""
    plain = {
        KEYS.LLM.CONTEXT_LENGTH: 32,
        KEYS.LLM.EMBEDDING_LENGTH: 32,
        KEYS.LLM.BLOCK_COUNT: 4 if family == "smollm3" else 2,
        KEYS.LLM.FEED_FORWARD_LENGTH: 40,
        KEYS.Attention.HEAD_COUNT: 4,
        KEYS.Attention.HEAD_COUNT_KV: 2,
        KEYS.Attention.LAYERNORM_RMS_EPS: 1e-5 if family == "olmo2" else 1e-6,
        KEYS.Rope.FREQ_BASE: {"smollm3": 1e4, "olmo2": 5e5, "gemma3": 1e3}[family],
    }
    if family == "gemma3":
        plain |= {
            KEYS.Attention.KEY_LENGTH: 12,
            KEYS.Attention.VALUE_LENGTH: 12,
            KEYS.Attention.SLIDING_WINDOW: 7,
            KEYS.Attention.SLIDING_WINDOW_PATTERN: [True, False],
            KEYS.Rope.FREQ_BASE_SWA: 100.0,
            KEYS.Rope.SCALING_TYPE: "linear",
            KEYS.Rope.SCALING_FACTOR: 2.5,
        }
    else:
        plain[KEYS.Rope.DIMENSION_COUNT] = 8
    known = {k.split(".")[-1]: k for k in (*plain, *MORE)}
    changed = plain | {known[key]: value for key, value in changes.items()}
    return {k.format(arch=family): v for k, v in changed.items() if v is not None}


MORE = (
    KEYS.Attention.SLIDING_WINDOW,
    KEYS.LLM.FINAL_LOGIT_SOFTCAPPING,
    KEYS.LLM.ATTN_LOGIT_SOFTCAPPING,
)


@pytest.fixture(name="header")
def _header(tmp_path):
    """Reads a file of an embedding alone, with changed metadata."""

    def read(family, **changes):
        tensors = {"token_embd.weight": np.ones((64, 32), "f4")}
        path = write(tmp_path / "a.gguf", tensors, entries(family, **changes), family)
        return GGUFCheckpoint(path)

    return read


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_hugging_face(family, tmp_path):
    tensors = tensors_of(family)
    path = write(tmp_path / "a.gguf", stored(family, tensors), entries(family), family)
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.shapes == {name: v.shape for name, v in tensors.items()}
    # 1 was added to Gemma's norms, and rounded.
    rounding = 2e-7 if family == "gemma3" else 0
    for name, value in tensors.items():
        np.testing.assert_allclose(checkpoint.get(name), value, 0, rounding, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, tmp_path):
    tensors = stored(family, tensors_of(family))
    path = write(tmp_path / "a.gguf", tensors, entries(family), family)
    model = memjax.load(path).model
    with np.load(GOLDEN / family / "logits.npz") as golden:
        run = jax.jit(lambda model, x: model.logits(model.encode(model.embed(x))))
        logits = run(model, golden["tokens"])
        np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_are_those_of_the_originals(family, header):
    original = json.loads((GOLDEN / family / "config.json").read_text())
    if family == "smollm3":
        original |= {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}
        original["layer_types"] = ["full_attention"] * 4
    if family == "gemma3":
        original["query_pre_attn_scalar"] = 12
    if family == "olmo2":
        original["tie_word_embeddings"] = True
    assert from_hf_config(header(family).config) == from_hf_config(original)


def test_gemma_layer_pattern(header):
    def layers(**changes):
        config = from_hf_config(header("gemma3", block_count=12, **changes).config)
        mechanisms: list[Any] = list(config.layers)
        return [(m.rope_theta, getattr(m, "window", 0)) for m in mechanisms]

    six = [(1e4, 7)] * 5 + [(1e3, 0)]
    found = layers(sliding_window_pattern=None, freq_base_swa=None)
    assert found == six * 2
    found = layers(sliding_window_pattern=3, freq_base_swa=50.0)
    assert found == [(50.0, 7), (50.0, 7), (1e3, 0)] * 4


def test_gemma_27b_score_scale(header):
    large = dict(block_count=62, sliding_window_pattern=None)
    assert header("gemma3", **large).config["query_pre_attn_scalar"] == 32 // 4
    large["block_count"] = 48
    assert header("gemma3", **large).config["query_pre_attn_scalar"] == 12


def test_the_head_of_gemma_is_the_embedding(tmp_path):
    tensors = stored("gemma3", tensors_of("gemma3"))
    more = {"output.weight": tensors["token_embd.weight"] + 1}
    path = write(tmp_path / "a.gguf", tensors | more, entries("gemma3"), "gemma3")
    with pytest.raises(ValueError, match="'lm_head.weight' must be the embedding"):
        memjax.load(path)


def test_gemma_norm_scales_are_float32(tmp_path):
    kind = gguf.GGMLQuantizationType.BF16
    values = np.array([[2**-9, 1.0, 33.25, -0.5]], "f4").repeat(8, axis=1)
    raw = gguf.quantize(values, kind)
    tensors = {"token_embd.weight": (raw, kind), "output_norm.weight": (raw[0], kind)}
    path = write(tmp_path / "a.gguf", tensors, entries("gemma3"), "gemma3")
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.get_compact("model.embed_tokens.weight").dtype == "bfloat16"
    norm = checkpoint.get_compact("model.norm.weight")
    np.testing.assert_array_equal(norm, values[0] - 1)


@pytest.mark.parametrize(
    "family, changes, words",
    [
        ("smollm3", dict(freq_base=None), "lacks the entry smollm3.rope.freq_base"),
        ("smollm3", dict(head_count=0), "head_count must be at least 1, got 0"),
        ("olmo2", dict(sliding_window=64), "sliding_window must be 0, got 64"),
        ("olmo2", dict(freq_base=-1.0), "rope.freq_base must be in [1e-38, 1e+38], g"),
        ("olmo2", dict(layer_norm_rms_epsilon=float("nan")), "1e+38], got nan"),
        ("gemma3", dict(freq_base=None), "lacks the entry gemma3.rope.freq_base"),
        (
            "gemma3",
            dict(key_length=None),
            "lacks the entry gemma3.attention.key",
        ),
        ("gemma3", dict(sliding_window=None), "gemma3.attention.sliding_window"),
        ("gemma3", dict(sliding_window=0), "sliding_window must be at least 1, got 0"),
        ("gemma3", dict(freq_base_swa=0.0), "gemma3.rope.freq_base_swa must be in"),
        ("gemma3", dict(freq_base_swa="a"), "freq_base_swa must be a number, got 'a'"),
        ("gemma3", dict(sliding_window_pattern=0), "pattern must be at least 1, got 0"),
        (
            "gemma3",
            dict(sliding_window_pattern=[True]),
            "must be 2 booleans, one",
        ),
        (
            "gemma3",
            dict(sliding_window_pattern=[1, 0]),
            "must be 2 booleans, one",
        ),
        ("gemma3", dict(sliding_window_pattern=["a"]), "must be a whole number, got"),
        ("gemma3", dict(final_logit_softcapping=30.0), "must be 0, got 30.0"),
        ("gemma3", dict(type="su"), "gemma3.rope.scaling.type='su' is not read"),
    ],
)
def test_entries_that_are_missing_or_out_of_range_are_named(
    family, changes, words, header
):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        header(family, **changes)
    assert f"{family}." in str(error.value) and "a.gguf" in str(error.value)
