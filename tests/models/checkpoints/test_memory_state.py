"""A restored memory state has the same bits, and so does all that follows from it."""

import dataclasses
import inspect
import json
import os
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.data.documents.tokenizer import ByteTokenizer
from memjax.mechanisms import AttentionConfig, GatedDeltaNetConfig
from memjax.models import HMTConfig, LanguageModel, ModelConfig, add_hmt
from memjax.models.checkpoints import memory_state
from memjax.models.checkpoints.memory_state import load_memory, save_memory
from memjax.models.mplus.build import add_memoryllm, add_mplus
from tests import tiny

SIZES = ModelConfig(
    mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=32),),
    num_layers=2,
    vocab_size=19,
    model_dim=8,
    hidden_dim=12,
    dtype="float32",
    tied_head=False,
)
CONFIG = dataclasses.replace(
    tiny.MPLUS, chunk_size=3, num_retrieved=3, store_size=6, key_dim=5
)


def backbone(**changes):
    sizes = dataclasses.replace(SIZES, **changes)
    return tiny.drawn(lambda: LanguageModel(sizes, key=jax.random.key(0)))


def build(config: Any = CONFIG, make: Any = add_mplus, **changes):
    sizes, key = dataclasses.replace(SIZES, **changes), jax.random.key(0)
    return tiny.drawn(lambda: make(LanguageModel(sizes, key=key), config, key=key))


# Functions: nothing is computed before a test needs it.
OTHERS = {
    "memoryllm": lambda: build(make=add_memoryllm),
    "hmt": lambda: build(
        HMTConfig(segment_length=6, num_sensory_tokens=2, num_memories=3), add_hmt
    ),
    "language model": lambda: backbone(
        mechanisms=(*SIZES.mechanisms, GatedDeltaNetConfig(8, 2, 4, 4))
    ),
}


def rewrite(folder, changes):
    """Changes a record as one who knows its digest does; `...` removes a field."""
    file = folder / "memory.json"
    record = json.loads(file.read_text()) | changes
    record = {name: value for name, value in record.items() if value is not ...}
    if "record_sha256" not in changes:
        record["record_sha256"] = memory_state._record_digest(record)
    file.write_text(json.dumps(record))


def tokens(count, seed=0):
    return jax.random.randint(jax.random.key(seed), (2, count), 0, 19)


@pytest.fixture(scope="module", name="model")
def _model():
    return build()


def any_bits(state):
    """A state of the same shapes and types."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.integers(0, 100, x.shape), x.dtype), state
    )


@pytest.fixture(scope="module", name="state")
def _state(model):
    return any_bits(model.init_state(2))


@pytest.fixture(name="saved")
def _saved(model, state, tmp_path):
    save_memory(tmp_path / "memory", model, state)
    return tmp_path / "memory"


@pytest.mark.slow
def test_restored_memory_continues_bit_exactly(tmp_path):
    model, saved = build(num_layers=1), tmp_path / "memory"
    read = jax.jit(model)
    # Entries in the store, an open chunk, and a cache of what was read last.
    state, _ = read(model.init_state(2, key=jax.random.key(5)), tokens(20))
    save_memory(saved, model, state)
    assert state.store.num_valid.tolist() == [6, 6] and state.length.tolist() == [2, 2]
    loaded = load_memory(saved, model)
    chex.assert_trees_all_equal_shapes_and_dtypes(loaded, state)
    chex.assert_trees_all_equal(loaded, state)
    # Which entries are dropped next follows from the same random key.
    more = tokens(20, 1)
    chex.assert_trees_all_equal(read(loaded, more), read(state, more))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_round_trip_of_every_model(name, tmp_path):
    model = OTHERS[name]()
    state = any_bits(model.init_state(2))
    save_memory(tmp_path / "memory", model, state)
    loaded = load_memory(tmp_path / "memory", model)
    chex.assert_trees_all_equal_shapes_and_dtypes(loaded, state)
    chex.assert_trees_all_equal(loaded, state)


@pytest.mark.slow
def test_settings_without_effect_may_differ(state, saved):
    same = tiny.drawn(lambda: build(remat=False))
    chex.assert_trees_all_equal(load_memory(saved, same), state)


def test_a_memory_of_other_parameters_or_tokens_is_refused(model, state, tmp_path):
    folder, tokenizer = tmp_path / "memory", ByteTokenizer()
    other = nnx.clone(model)
    save_memory(folder, model, state, tokenizer=tokenizer)
    chex.assert_trees_all_equal(load_memory(folder, other), state)
    chex.assert_trees_all_equal(load_memory(folder, other, tokenizer=tokenizer), state)
    with pytest.raises(ValueError, match="of another tokenizer: the digests are "):
        load_memory(folder, model, tokenizer=ByteTokenizer(digest="other"))
    parameter = jax.tree.leaves(nnx.state(other), is_leaf=_is_variable)[-1]
    parameter[...] = parameter[...] + 1
    with pytest.raises(ValueError, match="with other parameters: their fingerprints"):
        load_memory(folder, other)


def _is_variable(leaf):
    return isinstance(leaf, nnx.Variable)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other,message",
    [
        (
            lambda: build(dataclasses.replace(CONFIG, pool_size=8)),
            "config.pool_size is 4 in the memory and 8 in the model$",
        ),
        (
            lambda: build(dataclasses.replace(CONFIG, legacy=True, store_size=2000)),
            "config.legacy is False .* True .*; config.store_size is 6 .* 2000 in the "
            "model",
        ),
        (
            lambda: build(hidden_dim=13),
            "backbone.config.hidden_dim is 12 .* 13 in the model",
        ),
        (
            lambda: build(num_layers=3),
            "backbone.config.num_layers is 2 .* 3 in the model",
        ),
        (
            OTHERS["hmt"],
            "class is 'MPlus' .* 'HMT'.* config.chunk_size is 3 .* 'absent' in",
        ),
    ],
    ids=["pool", "legacy", "backbone", "layers", "class"],
)
def test_a_memory_of_another_model_is_refused_by_field(saved, other, message):
    with pytest.raises(ValueError, match=message):
        load_memory(saved, other())


@pytest.mark.slow
def test_a_state_of_another_model_is_not_saved(model, state, tmp_path):
    with pytest.raises(ValueError, match=r"'store.num_valid' is not of this model"):
        save_memory(tmp_path / "memory", OTHERS["memoryllm"](), state)
    wrong = state._replace(pool=state.pool.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"1 wrong .*'pool' is bfloat16\[2, 2, 4, 8\]"):
        save_memory(tmp_path / "memory", model, wrong)
    with pytest.raises(ValueError, match="leaves with the batch first"):
        save_memory(tmp_path / "memory", model, ())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("version", 3, "version must be 4, .* got 3"),
        ("format", "other", "format must be 'memjax memory', got 'other'"),
        ("sha256", 1, "of another type: 'sha256'"),
        ("sha256", "0", "is not what was written"),
        ("model", {}, "class is 'absent' in the memory and 'MPlus' in the model"),
        ("more", 1, "unknown or of another type: 'more'"),
        ("slots", 0, "slots must be at least 1, got 0"),
        ("slots", True, "of another type: 'slots'"),
        ("slots", ..., "missing, unknown or of another type: 'slots'"),
        ("record_sha256", "0", "memory.json is not what was written"),
    ],
)
def test_a_wrong_record_is_refused(model, saved, field, value, message):
    rewrite(saved, {field: value})
    with pytest.raises(ValueError, match=message):
        load_memory(saved, model)


@pytest.mark.parametrize("byte", [3, 40, -1])
def test_a_flipped_bit_is_refused(model, saved, byte):
    file = saved / "memory.safetensors"
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="memory.safetensors is not what was written"):
        load_memory(saved, model)
    (saved / "memory.json").write_text("{")
    with pytest.raises(ValueError, match="memory.json is not JSON"):
        load_memory(saved, model)


@pytest.mark.parametrize("name", ["memory.json", "memory.safetensors"])
def test_pipes_and_devices_are_refused(model, saved, name):
    """A pipe would be waited on for ever, and /dev/zero has no end."""
    (saved / name).unlink()
    (saved / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        load_memory(saved, model)
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        load_memory(saved, model)


@pytest.mark.parametrize("folder", ["gs://bucket/memory", None])
def test_a_memory_is_on_a_disk(folder):
    for call in map(inspect.unwrap, (load_memory, memory_state.write_memory)):
        with pytest.raises(ValueError, match="folder must be on a disk, got "):
            call(folder, None)


def test_messages_are_bounded(model, saved):
    record = json.loads((saved / "memory.json").read_text())
    settings = {f"{i}" * 1000: "x" * 1000 for i in range(1000)}
    rewrite(saved, {"model": record["model"] | settings})
    with pytest.raises(ValueError, match="and 990 more") as error:
        load_memory(saved, model)
    assert len(str(error.value)) < 5000


def test_tensors_of_other_formats_than_the_model_are_refused(model, saved):
    """The file is intact and its record is that of the model."""
    import safetensors.numpy

    file = saved / "memory.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["pool"] = tensors["pool"].astype(np.float16)
    tensors["num_valid"] = tensors["num_valid"].astype(np.float32)
    del tensors["clock"]
    safetensors.numpy.save_file(tensors, file)
    rewrite(saved, {"sha256": memory_state._digest(file)})
    message = r"3 wrong .*'clock' is missing; 'pool' is .*'num_valid' is float32, exp"
    with pytest.raises(ValueError, match=message):
        load_memory(saved, model)


def test_a_failed_write_leaves_nothing(model, state, saved, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="not an empty folder"):
        save_memory(saved, model, state)
    monkeypatch.setattr(memory_state, "_digest", lambda file: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_memory(tmp_path / "other", model, state)
    assert [file.name for file in tmp_path.iterdir()] == ["memory"]
    monkeypatch.undo()
    chex.assert_trees_all_equal(load_memory(saved, model), state)
