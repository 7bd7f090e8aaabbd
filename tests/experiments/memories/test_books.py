"""The study of books runs whole, at a tiny size, and continues where it stopped."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.memories import books
from experiments.memories.books import Config
from memjax.training import run_data
from tests.training.idle import idle_updates

TINY = Config(2, "embedded", context_length=64, test_texts=2)


@pytest.fixture(scope="module", name="run_dir")
def _run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    with idle_updates():
        books.main(dataclasses.replace(TINY, run_dir=folder))
    return folder


@pytest.mark.slow
def test_models_are_equal_and_compared_by_seed(run_dir):
    report = json.loads((run_dir / "results.json").read_text())
    *trained, counted = report["models"].values()
    short, wide, memory = trained
    assert short["parameters"] == wide["parameters"] == memory["parameters"] > 1_000_000
    assert short["state_bytes"] < memory["state_bytes"] <= wide["state_bytes"]
    assert list(report["gains"]) == list(report["models"])[:2]
    for found in report["gains"].values():
        assert set(found) == {"all", "code", "manuals", "proofs", "prose"}
        # There is one document of a kind: no interval.
        assert all(x["low"] is None and len(x["by_seed"]) == 2 for x in found.values())
        mean = np.mean(found["all"]["by_seed"])
        assert found["all"]["nats"] == pytest.approx(mean, rel=1e-4)
    # Nothing is learned: all are near the uniform 4096.
    for model in trained:
        assert 1000 < model["perplexity"] < 6000
    assert 50 < counted["perplexity"] < 500
    assert (run_dir / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_rerun_trains_no_further_and_keeps_its_numbers(run_dir, capsys):
    before = json.loads((run_dir / "results.json").read_text())
    metrics = (run_dir / "Elastic_Memory" / "seed42" / "metrics.jsonl").read_text()
    books.main(dataclasses.replace(TINY, run_dir=run_dir))
    after = json.loads((run_dir / "results.json").read_text())
    assert (
        run_dir / "Elastic_Memory" / "seed42" / "metrics.jsonl"
    ).read_text() == metrics
    assert "seed 42\n" not in capsys.readouterr().out
    assert after["models"] == before["models"]


@pytest.mark.parametrize("window", [8, 64])
def test_wide_windows_are_the_shortest_with_as_many_bytes(window):
    short, wide, memory = map(books.state_bytes, books.models(window).values())
    tokens = [int(name.split()[-1]) for name in [*books.models(window)][:2]]
    token = (wide - short) / (tokens[1] - tokens[0])
    assert wide >= memory > wide - token


@pytest.mark.slow
def test_all_models_see_the_same_batches():
    found = []
    for model in books.models(TINY.window).values():
        settings = books.run_config(TINY, model, 42)
        documents = run_data.load_split(settings, books.TOKENIZER, "train")
        found.append(next(run_data.batches(settings, [documents])).tokens)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
