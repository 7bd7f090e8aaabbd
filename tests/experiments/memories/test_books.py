"""The program on books runs whole, at a tiny size, and goes on where it stands."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.memories import books
from experiments.memories.books_models import (
    FAMILIES,
    Config,
    model_config,
    run_config,
    state_bytes,
    wide_window,
)
from memjax.data import load_tokenizer
from memjax.training import run_data

TINY = Config(
    steps=2, seeds=2, context_length=128, batch_size=2, test_texts=2, sample_tokens=4
)


@pytest.fixture(scope="module", name="run_dir")
def _run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    books.main(dataclasses.replace(TINY, run_dir=folder))
    return folder


@pytest.mark.slow
def test_it_reports_all_models_fairly(run_dir):
    report = json.loads((run_dir / "results.json").read_text())
    *trained, counted = report["models"].values()
    short, wide, memory = trained
    assert short["parameters"] == wide["parameters"] == memory["parameters"] > 1_000_000
    assert short["state_bytes"] < memory["state_bytes"] <= wide["state_bytes"]
    assert report["steps"] == 2
    assert list(report["gains"]) == list(report["models"])[:2]
    for found in report["gains"].values():
        assert set(found) == {"all", "code", "manuals", "proofs", "prose"}
        # There is one document of a kind: no interval.
        assert all(x["low"] is None and len(x["by_seed"]) == 2 for x in found.values())
        mean = np.mean(found["all"]["by_seed"])
        assert found["all"]["nats"] == pytest.approx(mean, rel=1e-4)
    # Two steps teach next to nothing: all are near the uniform 4096.
    for model in trained:
        assert 1000 < model["perplexity"] < 6000
    assert 50 < counted["perplexity"] < 300
    assert ">>>" in report["sample"]
    assert (run_dir / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("window", [8, 64])
def test_the_longer_windows_are_the_shortest_that_keep_as_many_bytes(window):
    memory = state_bytes(model_config("elastic", window))
    wide = wide_window(window)
    size = lambda window: state_bytes(model_config("wide", window))
    assert size(wide) >= memory > size(wide - 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"minutes": 0.0}, "minutes"),
        ({"test_texts": 0}, "test_texts must be at least 1"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"context_length": 8}, "context_length=8"),
    ],
)
def test_bad_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Config(**fields)


@pytest.mark.slow
def test_all_models_see_the_same_batches():
    first, *others = (
        next(run_data.batches(settings, [documents])) for settings, documents in _data()
    )
    for other in others:
        np.testing.assert_array_equal(first.tokens, other.tokens)


@pytest.mark.slow
def test_a_rerun_trains_no_further(run_dir, capsys):
    before = (run_dir / "elastic-42" / "metrics.jsonl").read_text()
    books.main(dataclasses.replace(TINY, steps=0, minutes=0.1, run_dir=run_dir))
    assert (run_dir / "elastic-42" / "metrics.jsonl").read_text() == before
    assert "Elastic Memory, seed 43: 2 steps" in capsys.readouterr().out


def _data():
    for family in FAMILIES:
        settings = run_config(Config(context_length=64), family, 1, 42)
        tokenizer = load_tokenizer(settings.data.tokenizer)
        yield settings, run_data.load_split(settings, tokenizer, "train")
