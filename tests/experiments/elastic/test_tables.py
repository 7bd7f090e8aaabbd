"""Elastic Memory's tables run whole at a tiny size, and noise spares the memory."""

import dataclasses
import functools
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memjax
from experiments.elastic import probes, tables
from experiments.lab.intervals import against_paper
from experiments.lab.results import arranged
from experiments.memories import books
from memjax import data
from memjax.evaluation import key_alignment
from memjax.models import LanguageModel
from memjax.models.language_model.presets import TINY
from tests.training.idle import idle_updates

SMALL = dataclasses.replace(TINY, num_layers=1, window=8, model_dim=16, hidden_dim=16)


@pytest.mark.slow
def test_tables_share_the_models_of_books_and_have_all_cells(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RATES", (0.5,))
    monkeypatch.setattr(tables, "ROWS", (books.MEMORY,))
    monkeypatch.setattr(tables, "ALONE", ("windows of {}",))
    model = LanguageModel(SMALL.with_memory("melodi", 256), key=jax.random.key(0))
    reference = SimpleNamespace(model=model, tokenizer=data.load_tokenizer("bytes"))
    monkeypatch.setattr(memjax, "load", lambda path: reference)
    # Every token behind the first contexts is a key, of a reference that knows nothing.
    find = functools.partial(key_alignment.find_key_tokens, alpha=-1e9, beta=-1e9)
    monkeypatch.setattr(key_alignment, "find_key_tokens", find)
    toy: dict[str, Any] = dict(steps=2, window=16, context_length=64, test_texts=2)
    toy |= dict(source="embedded", run_dir=tmp_path, output=tmp_path)
    with idle_updates():
        tables.main(tables.Config(**toy, sizes=("1x",)))
    assert (tmp_path / "Elastic_Memory" / "seed44" / "spent.json").is_file()
    result = json.loads((tmp_path / "tables.json").read_text())
    for at, (*others, (_, second)) in result["cells"].items():
        assert len(others) == 2 and (second > 1000 or "table13" in at), at
    assert {*result["added"].values()} == {0}
    known = [at for at in tables.PAPER if "| 1x" in at or "proofs" in at or "50%" in at]
    known = [at for at in known if "Elastic Memory" in at and ", uniform" not in at]
    known += [f"table2 | {kind} | Transformer++" for kind in ("prose", "proofs")]
    assert len(known) == 11 and not {*known} - result["cells"].keys()
    shown = arranged(tables.compared("table7", result), "")
    assert "2.91" in shown.rows[0] and "LongPPL, none: " in shown.notes[1]


@pytest.mark.parametrize("name", ["elastic_memory", "memorizing"])
def test_noise_changes_what_is_read_and_not_what_the_memory_keeps(name):
    model = LanguageModel(SMALL.with_memory(name, 64), key=jax.random.key(0))

    def read(model):
        return model(model.init_state(2), jnp.arange(16).reshape(2, 8))

    (state,), logits = read(model)
    same = read(probes.with_noise(model, 0.0, everywhere=True))[1]
    np.testing.assert_allclose(same, logits, atol=1e-5)
    (noisy,), other = read(probes.with_noise(model, 0.5, everywhere=False))
    assert abs(other - logits).max() > 1e-3
    for one, two in zip(state, noisy, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_larger_state_has_a_smaller_error():
    def error(order):
        read = {"elastic_memory": dict(order=order, memory_tokens=4)}
        size = dataclasses.replace(SMALL, options=read).with_memory(
            "elastic_memory", 64
        )
        model = LanguageModel(size, key=jax.random.key(0))
        return probes.reconstruction_error(model, np.arange(32).reshape(2, 16))

    assert 1 > error(2) > 1.5 * error(16) > 0


def test_pairs_in_another_order_than_the_papers_are_named():
    paper = {"a": 1.0, "b": 2.0, "c": 2.0}
    ours = {"a": [5, 1, 1], "b": [3, 3, 0], "c": [1, 1, 9]}
    found = "a < b = c in the paper; differs here: c is not above a"
    assert against_paper(paper, ours) == found
    assert "the same here" in against_paper(paper, ours | {"c": [4, 2, 2]})


def test_a_text_longer_than_every_document_is_refused():
    with pytest.raises(ValueError, match="context_length must be below"):
        books.test_texts(books.Config(source="embedded", context_length=10**7))
