"""A memory file holds what the memory holds, of any kind of state."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from memjax.mechanisms import AttentionConfig
from memjax.models import HMTConfig, add_hmt, add_mplus
from memjax.models.checkpoints import memory_state
from memjax.models.checkpoints.memory_state import load_memory, read_note, save_memory
from memjax.models.mplus.config import MPlusConfig
from tests import tiny

B = 2
HMT = HMTConfig(segment_length=4, num_sensory_tokens=0, num_memories=64)
MEMORY = MPlusConfig(
    num_memory_tokens=2,
    pool_size=64,
    chunk_size=4,
    min_chunk_size=1,
    num_retrieved=2,
    store_size=256,
    key_dim=2,
    rank=2,
)


def build(name: str) -> Any:
    key = jax.random.key(1)
    if name == "hmt":
        return tiny.drawn(lambda: add_hmt(tiny.make_llama(), HMT, key=key))
    return tiny.drawn(lambda: add_mplus(tiny.make_llama(), MEMORY, key=key))


def size(folder):
    return sum(file.stat().st_size for file in folder.iterdir())


def rewrite(file, record):
    """Changes a record as one who knows its digest does."""
    digest = {"record_sha256": memory_state._record_digest(record)}
    file.write_text(json.dumps(record | digest))


def same_bits(found, expected):
    tiny.assert_equal(found, expected)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_masked_state_is_restored(tmp_path):
    model = build("hmt")
    state = model.init_state(B, masked=True)
    state = state._replace(visible=state.visible.at[1, 2].set(True))
    save_memory(tmp_path / "memory", model, state)
    same_bits(load_memory(tmp_path / "memory", model), state)
    without = model.init_state(B)
    save_memory(tmp_path / "other", model, without)
    assert load_memory(tmp_path / "other", model).visible is None


@pytest.mark.slow
def test_file_size_follows_content(tmp_path):
    model = build("mplus")
    empty = model.init_state(B)
    # Negative zeros, and numbers in the middle of a leaf.
    pool = empty.pool.at[1, 0, 60:62].set(1.0).at[0, 1, 63, 3].set(-0.0)
    rows = empty.store.layers[1].rows.at[:, :3].set(2.0)
    layers = (empty.store.layers[0], empty.store.layers[1]._replace(rows=rows))
    full = jax.tree.map(jnp.ones_like, empty)
    states = {
        "empty": empty,
        "some": empty._replace(pool=pool, store=empty.store._replace(layers=layers)),
        "full": full,
    }
    for name, state in states.items():
        save_memory(tmp_path / name, model, state)
        same_bits(load_memory(tmp_path / name, model), state)
    sizes = [size(tmp_path / name) for name in states]
    # Two layers of four rows [2, 2, 4, 16], and three of the store.
    assert 0 < sizes[1] - sizes[0] < 2 * 2 * 4 * 16 * 4 + 2 * 3 * 16 * 4 + 200
    assert sizes[0] < 8_000 < 100_000 < sizes[2]


def test_caches_that_have_grown_are_restored(tmp_path):
    """With as many slots; the file has those that are filled."""
    attention = AttentionConfig(16, 4, 2, 4, capacity=4096, initial_slots=8)
    model = tiny.llama(mechanisms=(attention,))
    for slots, filled in ((300, 3), (4096, 3), (4096, 4096)):
        state = model.reserve(model.init_state(B), slots)
        held = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(state)]
        for leaf in held:
            (leaf[:, :filled] if leaf.ndim > 1 else leaf)[...] = 1
        state = jax.tree.unflatten(jax.tree.structure(state), held)
        folder = tmp_path / f"{slots} {filled}"
        save_memory(folder, model, state, note={"read": filled})
        same_bits(load_memory(folder, model), state)
        assert read_note(folder) == {"read": filled}
    sizes = [size(folder) for folder in sorted(tmp_path.iterdir())]
    # 300 slots, 4,096 slots, 4,096 tokens.
    assert abs(sizes[0] - sizes[1]) < 20 and sizes[0] < 4_000 < 1_000_000 < sizes[2]


@pytest.mark.parametrize("starts", [None, [0], [0, -1, 0, 0], [0, 0, 63, 0], [0] * 5])
def test_part_outside_its_leaf_is_refused(starts, tmp_path):
    model = build("mplus")
    state = model.init_state(B)
    state = state._replace(pool=state.pool.at[:, :, 62:].set(1.0))
    save_memory(tmp_path / "memory", model, state)
    file = tmp_path / "memory" / "memory.json"
    record = json.loads(file.read_text())
    assert record["starts"]["pool"] == [0, 0, 62, 0]
    record["starts"]["pool"] = starts
    rewrite(file, record)
    with pytest.raises(
        ValueError, match=r"'pool' has the shape .* not inside of \[2, "
    ):
        load_memory(tmp_path / "memory", model)


def test_a_part_of_fewer_batch_elements_is_refused(tmp_path):
    model = build("hmt")
    save_memory(tmp_path / "memory", model, model.init_state(B))
    file = tmp_path / "memory" / "memory.safetensors"
    tensors = load_file(file)
    tensors["memories.num_valid"] = tensors["memories.num_valid"][:1]
    save_file(tensors, file)
    record = tmp_path / "memory" / "memory.json"
    content = json.loads(record.read_text()) | {"sha256": memory_state._digest(file)}
    rewrite(record, content)
    with pytest.raises(ValueError, match="num_valid' has the shape .* not inside of"):
        load_memory(tmp_path / "memory", model)
