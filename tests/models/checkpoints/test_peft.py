"""LoRA adapters in PEFT's files, whose layout its documentation gives."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import memjax
from memjax.models.checkpoints.hf.peft import save_adapter
from memjax.models.lora import LoraConfig, add_lora
from tests import tiny

safetensors = pytest.importorskip("safetensors.numpy")
TOKENS = jnp.asarray([[3, 1, 4, 1, 5]])
# As `LoraConfig(...).save_pretrained` writes it, the empty entries left out.
CONFIG = {
    "auto_mapping": None,
    "base_model_name_or_path": "base",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 6,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 2,
    "rank_pattern": {},
    "target_modules": ["q_proj", "o_proj", "up_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}
# Of the tiny Llama: rows and columns of transformers' matrices.
SHAPES = {
    "self_attn.q_proj": (16, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.up_proj": (24, 16),
}


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
    """A base, and an adapter of its second layer."""
    monkeypatch.chdir(tmp_path)
    tiny.llama().save("base", origin="")
    rng, tensors = np.random.default_rng(0), {}
    for module, (rows, columns) in SHAPES.items():
        at = f"base_model.model.model.layers.1.{module}"
        tensors[f"{at}.lora_A.weight"] = rng.normal(size=(2, columns))
        tensors[f"{at}.lora_B.weight"] = rng.normal(size=(rows, 2))
    tensors = {n: x.astype(np.float32) for n, x in tensors.items()}
    (tmp_path / "adapter").mkdir()
    safetensors.save_file(tensors, "adapter/adapter_model.safetensors")
    write(tmp_path / "adapter")
    return tmp_path / "adapter"


def write(folder, **changes):
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))


def logits(model):
    return jax.jit(lambda m: m(m.init_state(1), TOKENS)[1])(model)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_loaded_onto_its_base(folder, rslora):
    """By W + (alpha / r) B A, or alpha / sqrt(r), of transformers' matrices."""
    write(folder, use_rslora=rslora)
    found = memjax.load(folder)
    given = safetensors.load_file(folder / "adapter_model.safetensors")
    tensors = safetensors.load_file("base/model.safetensors")
    for module in SHAPES:
        at = f"model.layers.1.{module}"
        up, down = (given[f"base_model.model.{at}.lora_{x}.weight"] for x in ("B", "A"))
        tensors[f"{at}.weight"] += 6 / (2**0.5 if rslora else 2) * up @ down
    safetensors.save_file(tensors, "base/model.safetensors")
    expected = memjax.load("base").model
    np.testing.assert_allclose(logits(found.model), logits(expected), atol=2e-5)
    np.testing.assert_allclose(logits(found.model.plain()), logits(expected), atol=2e-5)
    trained = nnx.to_flat_state(nnx.state(found.model, nnx.Param))
    names = {path[-2] for path, _ in trained}
    assert names == {"query", "output", "up"}


def test_our_adapters_are_written_as_they_are_read(folder):
    model = add_lora(tiny.llama(), LoraConfig(rank=3, alpha=6.0), jax.random.key(0), 1)
    model = tiny.drawn(lambda: model)
    save_adapter(model, "ours", base="owner/name@abc")
    tiny.llama().save("other", origin="")
    found = memjax.load("ours", base="other").model
    both = (nnx.state(m, nnx.Param) for m in (found, model))
    jax.tree.map(np.testing.assert_array_equal, *both)
    config = json.loads((folder.parent / "ours/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
    named = config["base_model_name_or_path"], config["revision"]
    assert named == ("owner/name", "abc")
    assert config["target_modules"][0] == "model.layers.1.self_attn.q_proj"
    with pytest.raises(ValueError, match="model must have LoRA .*, got none"):
        save_adapter(tiny.llama(), "none", base="base")


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(use_dora=True), "use_dora must be empty, got True"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save must be empty"),
        (dict(alpha_pattern={"q_proj": 4}), "alpha_pattern must be empty"),
        (dict(bias="all"), "bias must be 'none', got 'all'"),
        (dict(peft_type="IA3"), "peft_type must be 'LORA', got 'IA3'"),
        (dict(init_lora_weights="pissa"), "init_lora_weights must be True, got"),
        (dict(r=3), "lora_A.weight' has the shape .2, 16., expected .3, 16."),
        (dict(base_model_name_or_path=None), "base_model_name_or_path is missing"),
        (dict(base_model_name_or_path="gone"), "base=...: gone is neither a folder"),
        (dict(base_model_name_or_path=""), "base=...: '' is neither a folder"),
        (dict(base_model_name_or_path="adapter"), "has no file config.json"),
    ],
)
def test_what_an_adapter_cannot_be_is_named(folder, changes, words):
    write(folder, **changes)
    with pytest.raises(ValueError, match=words) as error:
        memjax.load(folder)
    assert "\n" not in str(error.value)


def test_an_adapter_beside_its_base_is_not_left_out(folder):
    """It goes first, as in transformers; a chain of adapters has no end."""
    expected = logits(memjax.load(folder).model)
    (folder / "adapter_model.safetensors").rename("base/adapter_model.safetensors")
    write(folder.parent / "base", base_model_name_or_path="base")
    np.testing.assert_array_equal(logits(memjax.load("base").model), expected)
    write(folder, base_model_name_or_path="base")
    with pytest.raises(ValueError, match="base=...: base is a LoRA of PEFT itself"):
        memjax.load(folder)


def test_a_base_is_refused_without_an_adapter(folder):
    with pytest.raises(ValueError, match="base must be None for base, which is no L"):
        memjax.load("base", base="base")
