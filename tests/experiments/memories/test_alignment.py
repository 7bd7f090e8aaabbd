"""The alignment of memories in one layer: what is read, kept and compared."""

import functools
import json

import jax
import pytest

from experiments.lab import measure
from experiments.memories import alignment
from experiments.memories.alignment import WIDE, WIDE_SHARED, WINDOW, summary
from memjax.mechanisms import CELLS


@pytest.mark.slow
def test_memories_are_aligned_and_compared(small, tmp_path, capsys, monkeypatch):
    source, backbone = small
    # The other aligned window is another program.
    monkeypatch.setattr(alignment, "WINDOWS", alignment.WINDOWS[:4])
    config = alignment.Config(
        only=("Gated DeltaNet",),
        seeds=(0,),
        corpus=source,
        backbone=str(backbone),
        layer=1,
        window=5,
        sinks=2,
        more=4,
        tokens=24,
        texts=2,
        passes=2,
        least=2,
        output=tmp_path / "alignment",
    )
    alignment.main(config)
    together = config.output.with_suffix(".json")
    found = json.loads(together.read_text())
    trained = alignment.ALIGNED.format(WIDE)
    narrow, wide, shared, aligned, memory = found["summary"]
    assert [line["name"] for line in found["summary"]] == [
        *(WINDOW, WIDE, WIDE_SHARED, trained, "Gated DeltaNet")
    ]
    assert aligned["base"] == memory["base"] == trained
    for kind in ("proofs", "code", "prose"):
        # A longer window misses less, and is compared with itself.
        assert wide[kind]["missed"] < shared[kind]["missed"] < narrow[kind]["missed"]
        assert wide[kind]["mean"] == 0 > narrow[kind]["mean"]
        # Four updates at least do no harm, to adapters either.
        assert aligned[kind]["missed"] < 1.1 * wide[kind]["missed"]
        assert aligned[kind]["missed"] != wide[kind]["missed"]
        assert memory[kind]["missed"] < 1.1 * narrow[kind]["missed"]
    # Keys and values of four tokens, and of two; a matrix a head.
    sizes = {WINDOW: 0, WIDE: 4 * 64, WIDE_SHARED: 2 * 64, trained: 4 * 64}
    assert found["bytes"] == sizes | {"Gated DeltaNet": 2 * 64 * 4}
    capsys.readouterr()
    together.unlink()
    alignment.main(config)
    # Nothing is read or aligned again.
    assert "texts" not in capsys.readouterr().err
    assert json.loads(together.read_text())["summary"] == found["summary"]


def test_memories_have_as_many_bytes_as_their_window():
    for name, (memory, given) in alignment.MEMORIES.items():
        if "slots" not in given or name.endswith("equal width"):
            continue
        options: dict = given | {"model_dim": 576, "value_dim": 64}
        shared = options.pop("heads", "query") == "key_value"
        options |= {"num_heads": 3 if shared else 9}
        if memory != "lattice":
            options |= {"key_dim": 64}
        cell = CELLS[memory](**options).cell()
        size = measure.tree_bytes(jax.eval_shape(functools.partial(cell.init_state, 1)))
        # Tokens of SmolLM2's keys and values in a layer.
        budget = (33 if shared else 97) * 2 * 3 * 64 * 4
        assert 0.95 * budget < size <= budget, name


def test_summary_compares_documents_in_pairs():
    rows = [
        {"name": WIDE, "missed": [0.5, 0.7, 0.1, 0.3, 0.2, 0.2]},
        {"name": WIDE_SHARED, "missed": [0.6, 0.8, 0.2, 0.4, 0.3, 0.3]},
        {"name": "b", "missed": [0.2, 0.4, 0.1, 0.3, 0.3, 0.1]},
        {"name": "a", "missed": [0.2, 0.4, 0.1, 0.3, 0.3, 0.1]},
        {"name": "a", "missed": [0.4, 0.6, 0.1, 0.3, 0.3, 0.1]},
    ]
    kinds = ["proofs"] * 2 + ["code"] * 2 + ["prose"] * 2
    sizes = {WIDE: 10, WIDE_SHARED: 5, "a": 6, "b": 5}
    wide, _, smaller, line = summary(rows, kinds, sizes)
    # Each with the window of its bytes.
    assert (wide["base"], smaller["base"], line["base"]) == (WIDE, WIDE_SHARED, WIDE)
    assert smaller["proofs"]["mean"] == pytest.approx(0.4)
    assert line["name"] == "a" and line["seeds"] == 2
    assert line["proofs"]["missed"] == pytest.approx(0.4)
    # 0.2 in both documents, whose own difference does not count.
    assert line["proofs"]["mean"] == pytest.approx(0.2)
    assert line["proofs"]["low"] == pytest.approx(0.2)
    assert line["prose"]["low"] < 0 < line["prose"]["high"]
