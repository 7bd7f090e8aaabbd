"""Save and load HMT under the official program's tensor names."""

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from memjax.mechanisms import AttentionConfig, GatedDeltaNetConfig
from memjax.models import HMTConfig, LanguageModel, ModelConfig, add_hmt, add_rmt
from memjax.models.adapters import merge_lora
from memjax.models.checkpoints.text_interface import TextInterface, read_text_interface
from memjax.models.hmt.checkpoint import load_hmt, load_official
from memjax.models.lora import LoraConfig, add_lora
from tests import tiny

CONFIG = HMTConfig(
    segment_length=6, num_sensory_tokens=2, num_memories=3, retrieval_dim=5
)
SIZES = ModelConfig(
    mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=32),),
    num_layers=1,
    vocab_size=19,
    model_dim=8,
    hidden_dim=12,
    dtype="float32",
    tied_head=False,
    remat=False,
)
HF = {
    "model_type": "llama",
    "vocab_size": 19,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}


def build(config=CONFIG, **changes):
    sizes = dataclasses.replace(SIZES, **changes)
    key = jax.random.key(0)
    return tiny.drawn(lambda: add_hmt(LanguageModel(sizes, key=key), config, key=key))


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


MODELS = {
    "hmt": lambda: build(),
    "stage 1": lambda: build(dataclasses.replace(CONFIG, retrieval=False)),
    "recurrent": lambda: build(mechanisms=(GatedDeltaNetConfig(8, 2, 4, 4),)),
    "rmt": lambda: tiny.drawn(
        lambda: add_rmt(
            LanguageModel(SIZES, key=jax.random.key(3)), 6, key=jax.random.key(4)
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_loaded_exactly(name, tmp_path):
    model = MODELS[name]()
    model.save(tmp_path / "saved", TextInterface(chat_template="{{ a }}"))
    loaded = load_hmt(tmp_path / "saved")
    assert loaded.config == model.config
    # Those of the backbone before HMT made their capacity that of a segment.
    assert loaded.pretrained.mechanisms == model.pretrained.mechanisms
    chex.assert_trees_all_equal(parameters(loaded), parameters(model))
    text = read_text_interface(tmp_path / "saved", model.vocab_size)
    assert text.chat_template == "{{ a }}"


def test_tensors_have_the_official_names(tmp_path):
    model = build()
    model.save(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    memory = {n: x for n, x in tensors.items() if not n.startswith("memory_cell.model")}
    assert {name: x.shape for name, x in memory.items()} == {
        "memory_cell.memory": (1, 8),
        "mem": (1, 8),
        "cross_attn.wq.weight": (5, 8),
        "cross_attn.wk.weight": (5, 8),
    }
    np.testing.assert_array_equal(memory["mem"][0], model.summary_prompt.get_value())
    np.testing.assert_array_equal(memory["cross_attn.wk.weight"].T, model.key[...])
    name = "memory_cell.model.model.layers.0.mlp.up_proj.weight"
    expected = model.backbone.blocks[0].parameters().feed_forward.up
    np.testing.assert_array_equal(tensors[name].T, expected)


def test_adapters_are_merged(tmp_path):
    def make():
        backbone = LanguageModel(SIZES, key=jax.random.key(0))
        adapted = add_lora(backbone, LoraConfig(rank=2), jax.random.key(1))
        return add_hmt(adapted, CONFIG, key=jax.random.key(1))

    model = tiny.drawn(make)
    model.save(tmp_path / "saved")
    loaded = load_hmt(tmp_path / "saved")
    merged = parameters(merge_lora(model.backbone))
    chex.assert_trees_all_equal(parameters(loaded.backbone), merged)


def official(tmp_path, config=CONFIG, **changes):
    """A checkpoint as the official program has it, some tensors changed."""
    build(config).save(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    tensors["memory_cell.mem_map.linear.weight"] = np.zeros((8, 8), np.float32)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = np.zeros(value, np.float32)
    save_file(tensors, tmp_path / "official.safetensors")
    return tmp_path / "official.safetensors"


def test_an_official_checkpoint_gives_its_retrieval_width(tmp_path):
    open_width = dataclasses.replace(CONFIG, retrieval_dim=None)
    model = load_official(official(tmp_path), HF, open_width)
    assert model.config.retrieval_dim == 5
    chex.assert_trees_all_equal(parameters(model), parameters(build()))
    # The recurrence alone, as in stage 1, of the same file.
    without = dataclasses.replace(CONFIG, retrieval=False)
    model = load_official(tmp_path / "official.safetensors", HF, without)
    assert not hasattr(model, "query")


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(mem=None), "1 wrong tensors: 'mem' is missing"),
        (
            dict(memory_cell__memory=(1, 9), mem=(2, 8)),
            r"'memory_cell.memory' has the shape \[1, 9\], expected \[1, 8\].*"
            r"'mem' has the shape \[2, 8\], expected \[1, 8\]",
        ),
        (dict(cross_attn__wk__weight=(4, 8)), r"wk.* \[4, 8\], expected \[5, 8\]"),
        (dict(other=(1,)), "'other' is not of this model"),
        (
            {"memory_cell__model__model__norm__weight": None},
            "norm.weight' is missing",
        ),
    ],
)
def test_every_wrong_tensor_of_a_checkpoint_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_official(official(tmp_path, **changes), HF, CONFIG)


def test_a_backbone_of_another_width_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\[19, 8\].*expected \[19, 16\]"):
        load_official(official(tmp_path), HF | {"hidden_size": 16}, CONFIG)


def test_a_folder_without_the_memory_config_is_refused(tmp_path):
    official(tmp_path)
    file = tmp_path / "saved" / "config.json"
    record = json.loads(file.read_text())
    assert record.pop("memjax_hmt")["segment_length"] == 6
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="does not say what its memory is"):
        load_hmt(tmp_path / "saved")
    assert load_hmt(tmp_path / "saved", CONFIG).config == CONFIG
    with pytest.raises(ValueError, match="not an empty folder"):
        build().save(tmp_path / "saved")
