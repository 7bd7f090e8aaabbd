"""The comparison at equal bytes, tiny: rows, resumption, compared windows."""

import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np
import pytest

from experiments.gpu import fifteen_minutes
from experiments.gpu.fifteen_minutes import LONGER, MEMORIES, WINDOW
from experiments.lab import results, study
from experiments.lab.measure import state_bytes
from experiments.memories import equal_bytes, equal_bytes_report
from experiments.memories import equal_bytes_rows as rows
from experiments.memories.equal_bytes_rows import ROWS, Setup
from memjax.training import LoopConfig, pretrain
from memjax.training.finetune.retrofit_stage import RetrofitStage
from tests import tiny
from tests.training.idle import idle_updates


@pytest.fixture(scope="module", name="setup")
def _setup():
    backbone = tiny.drawn(lambda: tiny.make_llama(num_layers=2, vocab_size=400))
    sizes: Any = dict(window=4, sinks=1, layers=(1,), more=3, context=8, tokens=64)
    sizes |= dict(corpus="embedded", updates=6, rate=1e-3, seed=3)
    return Setup(backbone=backbone, **sizes)


def test_windows_have_equal_bytes(setup):
    kept = functools.partial(state_bytes, tokens=64)

    def scored(name):
        make = ROWS[name].scored
        assert make is not None
        return make(setup.backbone, setup)

    wide, window, shared = map(scored, ("wide", "window", "wide-shared"))
    assert [mechanism.window for mechanism in wide.config.layers] == [4, 7]
    # Keys and values of two heads of 4 in float32, and whether they are seen.
    assert kept(wide) - kept(window) == 3 * (2 * 2 * 4 * 4 + 1)
    # Two query heads share keys and values: half of the three tokens, rounded up.
    assert [mechanism.window for mechanism in shared.config.layers] == [4, 6]
    assert kept(scored("reread")) < kept(window)
    full = rows.full_attention(window, setup)
    assert full.config.capacity == 64 and kept(full) > kept(wide)


def test_rows_are_trained_on_as_many_tokens(setup):
    setup = dataclasses.replace(setup, window=32, context=64, updates=16)
    for name in ROWS.keys() - {"wide-shared-longer"}:
        stages = ROWS[name].stages
        made = stages(setup) if stages else ()
        # A distillation sees texts of the tuning.
        tuned = [stage for _, stage in made if getattr(stage, "part", "") != "distill"]
        read = [s.loop.steps * s.data.batch_size * s.tokens_read for s in tuned]
        assert sum(read) == (16 * setup.context if made else 0), name
        assert all(stage.seed == 3 for _, stage in made), name
        assert all(s.optimizer.learning_rate == 1e-3 for s in tuned), name
        # Adapters in all layers, of every row.
        assert all(getattr(s, "first_adapter", 0) == 0 for s in tuned), name
    # The window that has the updates of a memory's alignment too.
    steps = []
    for name in ("wide-shared-longer", "lattice-shared"):
        stages = ROWS[name].stages
        assert stages is not None
        steps.append(sum(stage.loop.steps for _, stage in stages(setup)))
    assert steps[0] == steps[1]


def test_a_memory_is_tuned_on_the_texts_of_a_window(setup):
    ((_, window),) = rows.tune_hybrid(setup, "none")
    (_, distilled), (_, tuned) = rows.tune_hybrid(setup, "gated_deltanet")
    for stage in (window, tuned):
        assert (stage.loop.steps, stage.seed) == (6, 3)
        assert stage.optimizer == window.optimizer and stage.data == window.data
    # Half of the texts, each as often as there are passes.
    assert isinstance(distilled, RetrofitStage) and distilled.part == "distill"
    assert distilled.loop.steps == 6 * 3 and distilled.passes == 6


def _result(name, nats, seed=0, changes=None):
    documents = [
        dict(name=f"{kind}{i}", kind=kind, nats=[50.0, nats + i], targets=[5, 10])
        for kind in ("proofs", "code", "prose")
        for i in range(5)
    ]
    trained = {"updates": 2, "tokens": 16, "rate": 1e-3}
    return {
        "name": name,
        "label": ROWS[name].label,
        "seed": seed,
        "layers": [1],
        "bytes": 10,
        "texts_digest": "a",
        "edges": [0, 5, 15],
        "bins": [1, 2],
        "documents": documents,
        "training": trained if ROWS[name].stages else None,
    } | (changes or {})


def _store(folder, result):
    file = study.run_folder(folder, result["name"], result["seed"]) / study.SCORE
    study.once(file, lambda: result)


def test_rows_are_put_together(tmp_path):
    folder = tmp_path / "results"
    given = (("wide", 30.0, 0), ("window", 40.0, 0))
    given += (("lattice", 20.0, 1), ("wide-tuned", 25.0, 1), ("wide-tuned", 9.0, 0))
    for name, nats, seed in given:
        _store(folder, _result(name, nats, seed))
    equal_bytes_report.write(folder)
    found = json.loads((tmp_path / "results.json").read_text())
    by_row = {(row["row"], row["seed"]): row for row in found["rows"]}
    assert by_row["lattice", 1]["saved"]["code"]["nats"] == pytest.approx(0.5)
    assert by_row["window", 0]["saved"]["prose"]["nats"] == pytest.approx(-1.0)
    assert "saved" not in by_row["wide-tuned", 1]
    assert by_row["wide", 0]["perplexity"]["proofs"] == pytest.approx(math.exp(3.2))
    for one in ("perplexity", "saved"):
        made = getattr(equal_bytes_report, one).rows(found)
        assert all(row[-1] for row in results.arranged(made, one).rows)
    _store(folder, _result("infini", 1.0, 0, {"texts_digest": "b"}))
    with pytest.raises(ValueError, match="cannot be compared: texts_digest must"):
        equal_bytes_report.write(folder)


def test_rows_are_compared_with_the_window_of_their_bytes():
    sizes = {"window": 8, "wide-shared": 10, "infini": 10, "wide": 20, "full": 90}
    given = [_result(name, 20.0, 0, {"bytes": size}) for name, size in sizes.items()]
    found = {row["row"]: row for row in equal_bytes_report.summary(given)["rows"]}
    # Infini-attention is tuned, and no tuned window is there.
    with_base = {name: row.get("saved_over") for name, row in found.items()}
    assert with_base == {
        "window": ROWS["wide-shared"].label,
        "wide-shared": None,
        "infini": None,
        "wide": None,
        "full": ROWS["wide"].label,
    }


def test_the_plan_leaves_out_finished_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(equal_bytes, "prepare", lambda config: (None, None, None))
    config = equal_bytes.Config(
        rows=("window", "lattice"), seeds=(0, 1), output=tmp_path
    )
    assert config.runs() == [("window", 0), ("lattice", 0), ("lattice", 1)]
    _store(tmp_path, _result("lattice", 1.0))
    equal_bytes.main(dataclasses.replace(config, plan=True))
    said = capsys.readouterr().out
    assert "lattice, seed 1: " in said and "2 missing: " in said


def test_more_training_is_falsified_by_either_window(tmp_path):
    config = fifteen_minutes.Config(output=tmp_path, budgets=(40_000,))
    window, longer, memory, other = (WINDOW, LONGER, *MEMORIES)
    # Sums over ten tokens: 0.3 and 0.1 nats a token are saved, and 0.1.
    given = ((window, 20.0), (longer, 18.0), (memory, 17.0))
    for name, nats in given:
        _store(tmp_path / "40000", _result(name, nats))
    assert list(fifteen_minutes.verdict(config))[-1].startswith("not decided")
    _store(tmp_path / "40000", _result(other, 19.0))
    *lines, last = fifteen_minutes.verdict(config)
    assert last == "holds" and len(lines) == 4 and "+0.300 nats" in lines[0]
    changed = tmp_path / "more" / "40000"
    for name, nats in ((window, 20.0), (longer, 16.9), (memory, 17.0), (other, 19.9)):
        _store(changed, _result(name, nats))
    config = dataclasses.replace(config, output=changed.parent)
    assert list(fifteen_minutes.verdict(config))[-1] == "falsified"


def make_small(tmp_path):
    """A corpus of five documents a kind and split, and the folder of a backbone."""
    words = np.array(["memory", "window", "block", "state", "It rained."])
    rng = np.random.default_rng(0)
    for split in ("train", "validation", "test"):
        for kind in ("proofs", "code", "prose"):
            for i in range(5):
                file = tmp_path / "corpus" / split / kind / f"{i}.txt"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(" ".join(rng.choice(words, 60)))
    source, backbone = f"folder:{tmp_path}/corpus", tmp_path / "backbone"
    run = pretrain.RunConfig(
        model=tiny.make_config(4096, capacity=1024),
        data=pretrain.DataConfig(source, "bpe4k", context_length=16, batch_size=2),
        loop=LoopConfig(steps=1, save_every=1),
    )
    with idle_updates():
        pretrain.train(run, backbone)
    return {"corpus": source, "backbone": str(backbone)}


@pytest.mark.slow
def test_rows_are_trained_scored_and_not_run_again(tmp_path, capsys):
    given: Any = dict(window=5, layers=(1,), more=4, context=20, tokens=20, first=5)
    given |= dict(least=5, budgets=(4 * 20 + 1,), dtype="float32")
    given |= dict(run_dir=tmp_path / "runs", output=tmp_path / "results")
    given |= dict(rows=("window", WINDOW, MEMORIES[0])) | make_small(tmp_path)
    config = fifteen_minutes.Config(**given)
    fifteen_minutes.main(dataclasses.replace(config, plan=True))
    assert "3 missing" in capsys.readouterr().out
    for changes in ({"layers": (99,)}, {"sinks": 6}, {"corpus": "folder:/lost"}):
        with pytest.raises(ValueError):
            fifteen_minutes.main(dataclasses.replace(config, plan=True, **changes))
    with idle_updates():
        fifteen_minutes.main(config)
    found = json.loads((tmp_path / "results" / "81.json").read_text())
    assert [row["row"] for row in found["rows"]] == list(config.rows)
    assert found["edges"] == [0, 5, 10, 20] and found["bins"] == [1, 3]
    memory = found["rows"][2]
    assert memory["training"]["tokens"] == 4 * 20
    assert memory["training"]["skipped_updates"] == 0
    assert set(memory["saved"]) == {"proofs", "code", "prose"}
    # Idle updates leave the gate shut: the narrow window loses to the wide one.
    assert memory["perplexity"] == pytest.approx(found["rows"][0]["perplexity"])
    fifteen_minutes.main(config)
    assert "every row has its result" in capsys.readouterr().out
