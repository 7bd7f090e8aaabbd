"""The program on books runs whole, at a tiny size, and goes on where it stands."""

import json

import numpy as np
import pytest

from experiments import books
from experiments.elastic import cost


@pytest.fixture(scope="module", name="run_dir")
def _run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    config = books.Config(
        steps=2,
        context_length=128,
        batch_size=2,
        test_texts=2,
        sample_tokens=4,
        run_dir=folder,
    )
    books.main(config)
    return folder


@pytest.mark.slow
def test_it_reports_both_models_fairly(run_dir):
    report = json.loads((run_dir / "results.json").read_text())
    plain, memory = report["models"].values()
    assert plain["parameters"] == memory["parameters"] > 1_000_000
    assert memory["state_bytes"] != plain["state_bytes"]
    assert report["steps"] == 2
    assert set(report["gain"]) == {"all", "code", "manuals", "proofs", "prose"}
    # There is one document of a kind: no interval.
    assert all(found["low"] is None for found in report["gain"].values())
    # Two steps teach next to nothing: both are near the uniform 4096.
    for model in (plain, memory):
        assert 1000 < model["perplexity"] < 6000
    assert ">>>" in report["sample"]
    assert (run_dir / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"minutes": 0.0}, "minutes"),
        ({"test_texts": 0}, "test_texts must be at least 1"),
        ({"context_length": 8}, "context_length=8"),
    ],
)
def test_bad_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        books.Config(**fields)


@pytest.mark.slow
def test_both_models_see_the_same_batches(run_dir):
    del run_dir
    first, second = (
        next(books.run_data.batches(settings, [documents]))
        for settings, documents in _data()
    )
    np.testing.assert_array_equal(first.tokens, second.tokens)


@pytest.mark.slow
def test_a_rerun_trains_no_further(run_dir, capsys):
    before = (run_dir / "elastic" / "metrics.jsonl").read_text()
    config = books.Config(
        minutes=0.1,
        context_length=128,
        batch_size=2,
        test_texts=2,
        sample_tokens=4,
        run_dir=run_dir,
    )
    books.main(config)
    assert (run_dir / "elastic" / "metrics.jsonl").read_text() == before
    assert "Elastic Memory: 2 steps" in capsys.readouterr().out


@pytest.mark.slow
def test_the_benchmark_counts_lengths_and_steps(tmp_path):
    config = cost.Config(
        model_dim=64,
        layers=1,
        window=16,
        order=4,
        context=32,
        lengths=(32, 64),
        longest_full=32,
        repeats=1,
        output=tmp_path / "cost",
    )
    rows = cost.lengths(config)
    state = {row["state_bytes"] for row in rows if row["mixer"] == "elastic_memory"}
    assert len(rows) == 3 and len(state) == 1


def _data():
    for family in books.MODELS:
        settings = books.run_config(books.Config(context_length=64), family, 1)
        tokenizer = books.load_tokenizer(settings.data.tokenizer)
        yield settings, books.run_data.load_split(settings, tokenizer, "train")
