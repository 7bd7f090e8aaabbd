"""The studies of HMT, whole at a tiny size: scores, trainings, resuming."""

import dataclasses
import json
from typing import Any
from unittest.mock import Mock

import pytest

from experiments.hmt import length, length_tables, rows
from experiments.lab import options
from memjax.training import LoopConfig, pretrain
from memjax.training.finetune.curricula import HMTStages
from tests import tiny
from tests.training.idle import idle_updates

SEGMENT = 8
BACKBONE = tiny.make_config(4096, capacity=64, num_layers=1)


def tiny_stages():
    def shrink(stage):
        memory = dataclasses.replace(
            stage.hmt, segment_length=SEGMENT, num_sensory_tokens=1, num_memories=4
        )
        data = dataclasses.replace(stage.data, batch_size=2)
        loop = LoopConfig(steps=2, save_every=50, keep=1)
        return dataclasses.replace(stage, hmt=memory, depth=2, data=data, loop=loop)

    return HMTStages(shrink(STAGES.stage1), shrink(STAGES.stage2))


STAGES = length.hmt_stages()


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(length, "hmt_stages", tiny_stages)
    monkeypatch.setattr(length, "TOGETHER", 4)


@pytest.fixture(name="path")
def _path(tmp_path):
    folder = tmp_path / "backbone"
    config = pretrain.RunConfig(
        model=BACKBONE,
        data=pretrain.DataConfig("embedded", context_length=64, batch_size=2),
        loop=LoopConfig(steps=1, save_every=1),
    )
    with idle_updates():
        pretrain.train(config, folder)
    return folder


@pytest.mark.slow
def test_length(path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rows, "TRUNCATED", 16)
    monkeypatch.setattr(length, "LENGTHS", (16, 64))
    monkeypatch.setattr(length, "RATES", (1e-2,))
    monkeypatch.setattr(length, "FIRST", 1e-2)
    trained = rows.TUNED.format(rows.APART)
    monkeypatch.setattr(length, "CURVE", (trained,))
    # Two seeds, for a mean over them.
    monkeypatch.setattr(options, "MIN_SEEDS", 2)
    only = (rows.SINK_WINDOW, rows.AGAIN, trained, rows.HIERARCHICAL)
    given: Any = dict(run_dir=tmp_path, output=tmp_path / "result", backbone=str(path))
    config = length.Config(only, (0, 1), targets=128, curve=(256,), **given)
    length.main(dataclasses.replace(config, plan=True))
    assert f"{trained}, 256 targets: 0 minutes" in capsys.readouterr().out
    with idle_updates(), monkeypatch.context() as patch:
        # It is drawn once, at the end.
        patch.setattr(length_tables, "plot", Mock())
        length.main(config)
    report = json.loads((tmp_path / "result.json").read_text())
    assert "training" in capsys.readouterr().err
    assert report["scored_from"] == SEGMENT // 2 and rows.RMT in report["missing"]
    assert set(report["perplexity"]) == {"all", "code", "manuals", "proofs", "prose"}
    # Two updates teach next to nothing of 4,096 tokens.
    for name, row in report["perplexity"]["all"].items():
        assert all(1000 < value < 8000 for value in row), (name, row)
    models = report["models"]
    hmt, window = (models[name] for name in (rows.HIERARCHICAL, rows.SINK_WINDOW))
    # A token of the window is two keys of 8 floats, and a mask.
    assert 0 <= window["state_bytes"] - hmt["state_bytes"] < 2 * 8 * 4 + 1
    again = models[rows.AGAIN]
    assert again["state_bytes"] < window["state_bytes"] / 10 and again["reads"] > 1
    assert window["reads"] == 1
    # A sensory token, a segment and two prompts, and half a segment and two prompts.
    assert hmt["reads"] == (1 + SEGMENT + 2 + SEGMENT // 2 + 2) / SEGMENT
    assert set(hmt["validation_perplexity"]) == {"0.01"} and hmt["seeds"] == 2
    # All score as many; of the form that reads ahead an update scores half.
    found = {row.name: row.targets for row in length.Study(config).rows}
    assert (*found,) == rows.NAMES
    for name in (rows.HIERARCHICAL, rows.CAUSAL, trained):
        assert found[name] == 128, name
    assert models[rows.HIERARCHICAL]["targets"] == 128
    (at, value), *_ = report["curve"][trained].items()
    assert at == "256" and 1000 < value < 8000
    gain = next(x for x in report["gains"] if x["model"] == rows.HIERARCHICAL)
    # There is one document of a kind.
    assert gain["documents"] == 4 and gain["low"] is None and gain["length"] == 64
    assert all(model["devices"] == [report["device"]] for model in models.values())

    # Finished rows are shown, and nothing of them is done again.
    monkeypatch.setattr(length, "score_text", None)
    length.main(dataclasses.replace(config, only=(rows.AGAIN,)))
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    same = json.loads((tmp_path / "result.json").read_text())
    assert "training" not in capsys.readouterr().err
    assert same["perplexity"] == report["perplexity"]
    assert same["gains"] == report["gains"] and same["curve"] == report["curve"]
    length.main(dataclasses.replace(config, plan=True))
    assert "0 missing" in capsys.readouterr().out
    with pytest.raises(ValueError, match="and curve must be at least 128, got 127"):
        dataclasses.replace(config, curve=(127,))
