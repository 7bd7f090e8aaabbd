"""The study of books runs whole, at a tiny size."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.memories import books
from experiments.memories.books import Config
from memjax.data import load_tokens
from tests.training.idle import idle_updates

TINY = Config(2, "embedded", context_length=64, test_texts=2)


@pytest.mark.slow
def test_models_are_equal_and_compared_by_seed(tmp_path, monkeypatch):
    # An n-gram of the whole corpus takes seconds to count.
    def beginnings(*given):
        return [x._replace(tokens=x.tokens[:2000]) for x in load_tokens(*given)]

    monkeypatch.setattr(books, "load_tokens", beginnings)
    with idle_updates():
        books.main(dataclasses.replace(TINY, run_dir=tmp_path))
    report = json.loads((tmp_path / "results.json").read_text())
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
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_wide_windows_have_the_bytes_and_batches_of_the_memory():
    made = books.models(64)
    short, wide, memory = map(books.state_bytes, made.values())
    tokens = [int(name.split()[-1]) for name in [*made][:2]]
    token = (wide - short) / (tokens[1] - tokens[0])
    assert wide >= memory > wide - token
    found = [books.run_config(TINY, model, 42) for model in made.values()]
    assert all((run.data, run.seed) == (found[0].data, 42) for run in found)


def test_baselines_have_the_bytes_of_the_memory():
    """Those of Infini-attention are fixed by its heads."""
    made = books.models(64, baselines=True)
    memory = books.state_bytes(made[books.MEMORY])
    found = {name: books.state_bytes(model) / memory for name, model in made.items()}
    assert found["Elastic Memory, uniform"] == found["Memorizing Transformer"] == 1
    assert 1 <= found["Melodi"] < 1.01 and 0.94 < found["Infini-attention"] < 1
