"""Saved memories are shown, copied and removed without their model."""

import jax
import jax.numpy as jnp
import pytest

from memjax.config_io import to_record
from memjax.conversation import Entry, MemoryFolder, Record
from memjax.mechanisms import (
    AttentionConfig,
    Mamba2Config,
    ParallelConfig,
    RecurrentStyle,
)
from memjax.models.checkpoints.memory_state import read_note, save_memory
from memjax.status import size
from tests import tiny
from tests.cli.commands import command, refused


@pytest.fixture(name="saved")
def _saved(tmp_path):
    model = tiny.llama()
    entries = (Entry("text", "book.txt", 9), Entry("user", "\x1b[2Jwho", 5))
    record = Record("owner/name", "", entries)
    with MemoryFolder(tmp_path / "mem") as folder:
        state, note = model.init_state(1, 1), to_record(record)
        folder.save(lambda path: save_memory(path, model, state, note=note))
    return tmp_path / "mem"


def test_memory_is_shown_without_control_characters(saved):
    code, out, err = command("memory", "show", saved)
    assert (code, err) == (0, []) and "owner/name" in out and "14 tokens" in out
    assert "text, 9 tokens: book.txt" in out and "KiB" in out
    assert "state   8 B attention cache" in out
    assert r"user, 5 tokens: \x1b[2Jwho" in out and "\x1b" not in out


def test_bytes_of_a_hybrid_are_shown_by_kind(tmp_path):
    memory = Mamba2Config(16, 2, 4, 4, style=RecurrentStyle(conv_value=True))
    layer = ParallelConfig(AttentionConfig(16, 4, 2, 4, capacity=64), memory)
    model = tiny.drawn(lambda: tiny.make_llama(mechanisms=(layer,), num_layers=1))
    full = jax.tree.map(jnp.ones_like, model.init_state(1))
    note = to_record(Record("owner/name", "", ()))
    with MemoryFolder(tmp_path / "mem") as folder:
        folder.save(lambda path: save_memory(path, model, full, note=note))
    # Two heads of 4 x 4; 64 slots of keys and values, seen or not, and their number;
    # three inputs of queries, keys and values.
    memory, cache, inputs = 2 * 4 * 4 * 4, 64 * (2 * 8 * 4 + 1) + 4, 3 * (16 + 8) * 4
    shown = f"state   {memory} B memory, {size(cache)} attention cache, {inputs} B con"
    assert shown in command("memory", "show", tmp_path / "mem")[1]


def test_copy_is_the_memory_and_remove_leaves_what_is_not(saved, tmp_path):
    other = tmp_path / "other"
    assert command("memory", "copy", saved, other)[0] == 0
    notes = [MemoryFolder(path).load(read_note) for path in (saved, other)]
    assert notes[0] == notes[1]
    assert "has content" in refused("memory", "copy", saved, other)
    (other / "mine.txt").write_text("")
    assert "'mine.txt'" in command("memory", "remove", other)[1]
    assert [path.name for path in other.iterdir()] == ["mine.txt"]
    assert command("memory", "remove", saved)[0] == 0 and not saved.exists()


def test_only_a_memory_is_removed(saved, tmp_path):
    assert "holds no memory" in refused("memory", "remove", tmp_path / "none")
    # A folder of that name is not enough.
    fake = tmp_path / "fake" / "saved-000001"
    fake.mkdir(parents=True)
    refused("memory", "remove", fake.parent)
    assert fake.is_dir()
    with MemoryFolder(saved) as writing:
        writing.lock()
        refused("memory", "remove", saved)
    assert saved.is_dir()
    for words in (["show", saved, "x"], ["copy", saved]):
        assert "destination is for copy alone" in refused("memory", *words)
