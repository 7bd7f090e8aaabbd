"""M+ in and out of files under the official names."""

import dataclasses
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import Architecture
from memjax.models.mplus import retriever
from memjax.models.mplus.build import add_memoryllm, add_mplus
from memjax.models.mplus.checkpoints.checkpoint import (
    load_mplus,
    load_official,
)
from memjax.models.mplus.checkpoints.hf_config import mplus_config_from_hf
from memjax.models.mplus.config import MPlusConfig
from memjax.nnx import as_arrays
from tests import tiny

GOLDEN = Path(__file__).parents[1] / "golden" / "mplus"
FILE = GOLDEN / "tiny_model.safetensors"
HF = json.loads((GOLDEN / "config.json").read_text())
CONFIG = MPlusConfig(
    num_memory_tokens=2,
    pool_size=6,
    chunk_size=4,
    min_chunk_size=1,
    num_retrieved=3,
    store_size=8,
    key_dim=5,
    rank=2,
)
ATTENTION = AttentionConfig(8, 2, 1, 4, capacity=32)
SIZES = ModelConfig(
    mechanisms=(ATTENTION,),
    num_layers=2,
    vocab_size=19,
    model_dim=8,
    hidden_dim=12,
    dtype="float32",
    tied_head=False,
    remat=False,
)


def build(make=add_mplus, **changes):
    sizes = dataclasses.replace(SIZES, **changes)
    return tiny.drawn(lambda: make(LanguageModel(sizes, key=KEY), CONFIG, key=KEY))


KEY = jax.random.key(1)


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model))


def official(tmp_path, **changes):
    """The golden checkpoint with some tensors changed, `__` for a dot; None removes."""
    tensors = load_file(FILE)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = np.asarray(value, np.float32)
    save_file(tensors, tmp_path / "official.safetensors")
    return tmp_path / "official.safetensors"


@pytest.fixture(scope="module")
def golden():
    return load_official(FILE, HF)


def test_official_checkpoint_round_trip_is_exact(golden, tmp_path):
    golden.save(tmp_path / "saved", origin="a/b@c")
    expected = load_file(FILE)
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    # What transformers says otherwise, or says nothing of.
    loose = {"bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp"}
    loose |= {"initializer_range", "attention_dropout", "use_cache", "lora_config"}
    # As a Llama transformers would load it, and draw all parameters anew.
    loose |= {"model_type"}
    assert {k: config[k] for k in HF if k not in loose} == {
        k: v for k, v in HF.items() if k not in loose
    }
    lora = HF["lora_config"] | {"lora_dropout": 0.0}
    lora["target_modules"] = sorted(lora["target_modules"])
    config["lora_config"]["target_modules"].sort()
    assert config["lora_config"] == lora
    loaded = load_mplus(tmp_path / "saved")
    chex.assert_trees_all_equal(parameters(loaded), parameters(golden))
    assert loaded.config == golden.config
    assert (config["memjax_origin"], config["model_type"]) == ("a/b@c", "memoryllm")


def test_official_tensors_map_to_parameters(golden):
    """Against PyTorch's meaning of the names: y = x W^T, and B A of an adapter."""
    tensors = load_file(FILE)
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    at = "model.layers.1.self_attn"
    for adapter, name in (("write", "default"), ("read", "decoder_adapter")):
        change = as_arrays(getattr(golden, f"{adapter}_adapter"))[1]["mechanism"][
            "query"
        ]
        up = change.up.reshape(4, -1)
        expected = x @ tensors[f"{at}.q_proj.lora_A.{name}.weight"].T
        expected = expected @ tensors[f"{at}.q_proj.lora_B.{name}.weight"].T
        np.testing.assert_allclose(x @ change.down @ up, expected, atol=1e-6)
    for ours, theirs in (
        ("query", "query_proj"),
        ("key", "key_proj"),
        ("encoder_query", "encoder_query_proj"),
    ):
        hidden = x @ tensors[f"{at}.{theirs}.0.weight"].T
        hidden = hidden / (1 + np.exp(-hidden))
        expected = hidden @ tensors[f"{at}.{theirs}.2.weight"].T
        found = retriever.project(as_arrays(getattr(golden, ours)), 1, jnp.asarray(x))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(golden.bos[...], tensors["bos_embedding"][:, 0])
    emb = tensors["new_memory_positional_emb"][0, 0]
    np.testing.assert_array_equal(golden.position[...], emb)


@pytest.mark.slow
def test_init_state_has_the_checkpoints_memory(tmp_path):
    rng, tensors = np.random.default_rng(0), load_file(FILE)
    ages = {f"ltm_ages__{i}": rng.permutation(20) * 5 for i in range(3)}
    often = rng.normal(size=20)
    recalls = {f"ltm_recall_frequencies__{i}": often for i in range(3)}
    model = load_official(official(tmp_path, **ages, **recalls), HF)
    state = model.init_state(2)
    np.testing.assert_array_equal(state.pool[1], tensors["memory"])
    assert state.num_valid.tolist() == [32, 32] and not state.ages.any()
    store = state.store
    assert store is not None and store.num_valid.tolist() == [20, 20]
    assert store.num_pending.tolist() == [0, 0]
    np.testing.assert_array_equal(store.recalls[1, :20], often.astype(np.float32))
    for i, layer in enumerate(store.layers):
        np.testing.assert_array_equal(layer.rows[1, :20], tensors[f"ltm.{i}"])
        np.testing.assert_array_equal(layer.keys[1, :20], tensors[f"ltm_keys.{i}"])
        age = state.clock[1] - layer.born[1, :20]
        np.testing.assert_array_equal(age, ages[f"ltm_ages__{i}"])
    model.save(tmp_path / "saved")
    loaded = load_mplus(tmp_path / "saved")
    chex.assert_trees_all_equal(parameters(loaded), parameters(model))


def test_bfloat16_refuses_large_ages(tmp_path):
    many = {f"ltm_ages__{i}": np.arange(20) * 513 for i in range(3)}
    model = load_official(official(tmp_path, **many), HF)
    with pytest.raises(ValueError, match="must be 'float32' .*ages of up to 9747"):
        model.save(tmp_path / "half", dtype="bfloat16")
    assert not (tmp_path / "half").exists()


def test_the_config_is_read():
    assert mplus_config_from_hf(HF) == MPlusConfig(
        num_memory_tokens=8,
        pool_size=32,
        num_retrieved=16,
        store_size=72,
        key_dim=16,
        rank=4,
        alpha=8.0,
        merge_every=3,
        recalls=3.0,
    )
    # The published sizes are the defaults.
    published = HF | dict(num_tokens=256, num_blocks=50, num_ltm_blocks=10)
    published |= dict(update_ltm_frequency=60, initial_rf_when_moving_stm_to_ltm=10)
    published |= dict(selector_hidden_dim=256, ltm_initial_size=5120)
    published["lora_config"] = HF["lora_config"] | {"r": 16, "lora_alpha": 32}
    assert mplus_config_from_hf(published) == MPlusConfig()
    del published["num_ltm_blocks"]
    alone = MPlusConfig(pool_size=12_800, num_retrieved=0)
    assert mplus_config_from_hf(published) == alone


@pytest.mark.parametrize(
    "key,value,message",
    [
        ("num_tokens", 0, r"num_tokens must be a whole number in \[1, 1e\+09\], got 0"),
        ("num_tokens", True, "num_tokens must be a whole number"),
        ("num_tokens", 10**400, "num_tokens must be a whole number"),
        ("num_blocks", 2, r"num_blocks must be a whole number in \[3, "),
        ("num_ltm_blocks", -1, "num_ltm_blocks must be a whole number in"),
        ("decay_frequency", float("nan"), "decay_frequency must be a number in"),
        ("decay_frequency", "1", r"decay_frequency must be a number in .* got '1'"),
        ("selector_hidden_dim", None, "selector_hidden_dim .* got None"),
        ("lora_config", None, "lora_config must be an object, got None"),
        ("lora_config", {"r": 4}, "lora_alpha must be a number"),
        ("map_from_hidden_states", False, "map_from_hidden_states must be true"),
        ("model_type", "gpt2", "model_type must be one of"),
    ],
)
def test_a_wrong_config_is_refused_by_key(key, value, message):
    with pytest.raises(ValueError, match=message):
        load_official(FILE, HF | {key: value})


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(memory=None), "1 wrong tensors: 'memory' is missing"),
        (dict(ltm__2=None), "'ltm.2' is missing"),
        # The first layer's size is taken for that of all.
        (dict(ltm__1=np.zeros((19, 64))), r"'ltm.1' .*\[19, 64\], expected \[20, 64\]"),
        (dict(ltm__0=np.zeros(())), r"'ltm.0' has the shape \[\], expected \[1, 64\]"),
        (
            dict(bos_embedding=np.zeros((3, 64)), other=np.zeros(1)),
            r"2 wrong .*'other' is not of .*\[3, 64\], expected \[3, 1, 64\]",
        ),
        (
            dict(model__layers__0__mlp__up_proj__base_layer__weight=None),
            "1 wrong .*'model.layers.0.mlp.up_proj.base_layer.weight' is missing",
        ),
        (
            dict(model__layers__0__self_attn__key_proj__2__weight=np.zeros((16, 9))),
            r"self_attn.key_proj.2.weight' .* expected \[16, 32\]",
        ),
        (dict(ltm_ages__0=np.full(20, 0.5)), "ltm_ages must be whole numbers"),
        (dict(ltm_ages__0=np.full(20, -1)), "ltm_ages must be whole numbers"),
        (dict(ltm_ages__0=np.full(20, np.inf)), "ltm_ages must be whole numbers"),
        (dict(ltm_recall_frequencies__1=np.ones(20)), "alike in all layers"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_tensor(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_official(official(tmp_path, **changes), HF)


def flagged(tmp_path, **flags):
    """The golden checkpoint with MemoryLLM's flag, a byte, or others."""
    file = tmp_path / "flagged.safetensors"
    save_file(load_file(FILE) | flags, file)
    return file


@pytest.mark.slow
def test_unwritten_memoryllm_is_refused(golden, tmp_path):
    config = dataclasses.replace(golden.config, num_retrieved=0)

    def load(**flags):
        return load_official(flagged(tmp_path, **flags), HF, config)

    one, none = np.ones((), np.uint8), np.zeros((), np.uint8)
    alone = load(initialized=one)
    chex.assert_trees_all_equal(
        parameters(alone), parameters(load_official(FILE, HF, config))
    )
    with pytest.raises(ValueError, match="initialized must not be 0: .*'memory' was n"):
        load(initialized=none)
    with pytest.raises(ValueError, match=r"'initialized' has the shape \[1\]"):
        load(initialized=one[None])
    with pytest.raises(ValueError, match=r"'other' has the number format U8.*'BF16'\)"):
        load(initialized=one, other=one)
    with pytest.raises(ValueError, match="'memory' has the number format U8"):
        load(memory=np.ones((3, 32, 64), np.uint8))
    with pytest.raises(ValueError, match="'initialized' has the number format I64"):
        load(initialized=np.ones((), np.int64))
    # Without the flag the program would not read what is saved.
    alone.save(tmp_path / "saved", dtype="bfloat16")
    found = load_file(tmp_path / "saved" / "model.safetensors")["initialized"]
    assert (found.dtype, found.shape, found) == (np.uint8, (), 1)
    for loaded in (
        load_mplus(tmp_path / "saved"),
        load_official(tmp_path / "saved", None, config),
    ):
        # Of the states, which begin with the checkpoint's pool.
        rounded = alone.init_state(1).pool.astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(loaded.init_state(1).pool, rounded)


def test_settings_that_do_not_fit_are_refused(tmp_path):
    config = mplus_config_from_hf(HF)
    with pytest.raises(ValueError, match="room for the 20 rows .* got 16"):
        load_official(FILE, HF, dataclasses.replace(config, store_size=16))
    with pytest.raises(ValueError, match=r"'memory' .*\[3, 32, 64\].*\[3, 40, 64\]"):
        load_official(FILE, HF, dataclasses.replace(config, pool_size=40))
    with pytest.raises(ValueError, match="stored must be 'output' in a checkpoint"):
        load_official(FILE, HF, dataclasses.replace(config, stored="input"))
    with pytest.raises(ValueError, match="hf_config must be given"):
        load_official(FILE)
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="is a pickle"):
        load_official(tmp_path / "model.pt", HF)


def test_store_tensors_are_ignored_without_a_store(golden):
    config = dataclasses.replace(golden.config, num_retrieved=0)
    model = load_official(FILE, HF, config)
    assert not hasattr(model, "query") and model.init_state(1).store is None
    np.testing.assert_array_equal(model.bos[...], golden.bos[...])


def test_single_adapter_is_used_for_writing_and_reading(tmp_path):
    tensors = load_file(FILE)
    one = {n.replace(".", "__"): None for n in tensors if "decoder_adapter" in n}
    model = load_official(official(tmp_path, **one), HF | {"add_decoder_lora": False})
    reads, writes = model.read_adapter, model.write_adapter
    chex.assert_trees_all_equal(as_arrays(reads), as_arrays(writes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, changes",
    [
        (add_mplus, {}),
        (add_memoryllm, {}),
        (
            add_mplus,
            dict(tied_head=True, architecture=Architecture(scale_embedding=False)),
        ),
        (add_mplus, dict(mechanisms=(dataclasses.replace(ATTENTION, qkv_bias=True),))),
        (add_mplus, dict(architecture=Architecture(norm="layer"))),
    ],
    ids=["mplus", "memoryllm", "tied", "qwen2", "own format"],
)
def test_a_saved_model_is_loaded_again(make, changes, tmp_path):
    model = build(make, **changes)
    model.save(tmp_path / "saved")
    loaded = load_mplus(tmp_path / "saved")
    assert loaded.config == model.config and loaded.initial is None
    chex.assert_trees_all_equal(parameters(loaded), parameters(model))
    assert loaded.backbone.config.dtype == "float32"
    half = load_mplus(tmp_path / "saved", dtype="bfloat16")
    assert half.backbone.config.dtype == "bfloat16"
    with pytest.raises(ValueError, match="not an empty folder"):
        model.save(tmp_path / "saved")


def test_folder_without_memory_config_is_refused(tmp_path):
    build().save(tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    record = json.loads(file.read_text())
    for wrong, message in [
        (None, "must hold config and initial_rows under memjax_mplus, got None"),
        ({"config": {}, "initial_rows": -1}, "initial_rows must be null or at least 0"),
        ({"config": {"other": 1}, "initial_rows": None}, "config.other is not a field"),
        # A memory that is not there.
        (record["memjax_mplus"] | {"initial_rows": 2}, "'memory' is missing"),
    ]:
        file.write_text(json.dumps(record | {"memjax_mplus": wrong}))
        with pytest.raises(ValueError, match=message):
            load_mplus(tmp_path / "saved")
