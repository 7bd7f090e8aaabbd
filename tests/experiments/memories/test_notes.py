"""Notes in real text: the task leaks no answer, and baselines keep what they can."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.memories import mqar
from experiments.memories import notes as program
from experiments.memories import notes_task as notes
from memjax.models import LanguageModel

TEXT = np.arange(5000, dtype=np.uint8)
FIRST_NUMBER = notes.FIRST_NUMBER
#: Of a training: both stages compile one program.
SHORT = mqar.SMALL.scale._replace(layers=1, context_length=64, tokens_per_update=64)


@pytest.fixture(name="test", scope="module")
def _test():
    return notes.draw_test("validation", rows=2, count=3, distance=128, seed=5)


def test_the_number_of_an_asked_name_stands_after_it_in_the_first_half():
    draw = jax.jit(notes.training_batch, static_argnums=(1, 2, 3))
    batch = draw(jnp.asarray(TEXT), 8, (2, 4), 64, jax.random.key(0))
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask) > 0
    assert mask.sum(axis=1).tolist() == [2] * 4 + [4] * 4
    assert not mask[:, :32].any()
    assert (tokens[:, 32:] < FIRST_NUMBER).all()
    for row, targets, asked in zip(tokens, batch.targets, mask, strict=True):
        for place in np.flatnonzero(asked):
            (noted,) = np.flatnonzero(row[:32] == row[place])
            assert row[noted + 1] == targets[place]


def test_texts_of_a_test_are_the_documents_but_for_the_notes(test):
    document = notes.text_of("validation").tobytes()
    for text, first in zip(np.asarray(test.text), np.asarray(test.first), strict=True):
        assert np.uint8(text).tobytes() in document
        # Two ids a note.
        assert (first >= notes.BYTES).sum() == 6
    assert (np.asarray(test.questions) >= FIRST_NUMBER).sum() == 0
    rows = np.arange(len(test.first))[:, None]
    for part, places in (
        (test.first, test.notes.noted),
        (test.questions, test.notes.asked),
    ):
        np.testing.assert_array_equal(part[rows, places], test.notes.names)
    np.testing.assert_array_equal(
        test.first[rows, test.notes.noted + 1], test.notes.numbers
    )


def test_text_keeps_a_note_until_its_bytes_are_full_and_compressed_text_more(test):
    since = notes.PART - test.notes.noted + 128 + test.notes.asked
    for budget in (int(since[0, 0]) - 1, int(since[0, 0])):
        kept = notes.fits_as_text(test, 128, budget)
        np.testing.assert_array_equal(kept, since <= budget)
    assert kept[0, 0]
    budget = 110
    assert not notes.fits_as_text(test, 128, budget).any()
    kept = notes.fits_as_compressed_text(test, 128, budget)
    assert kept.any() and (kept == kept[:, :1]).all()
    assert not notes.fits_as_compressed_text(test, 128, 20).any()


def test_query_mid_text_equals_reading_the_prefix(test):
    config = program.models(program.Config())["DeltaNet"]
    model = LanguageModel(config, key=jax.random.key(0))
    found = program.answer(model, test, (64, 128))
    rows = np.arange(len(test.first))[:, None]
    for distance, answers in zip((64, 128), found, strict=True):
        parts = [test.first, test.text[:, :distance], test.questions]
        tokens = jnp.concatenate(parts, axis=1)
        _, logits = model(model.init_state(len(tokens)), tokens)
        likeliest = np.asarray(logits.argmax(axis=-1)) - FIRST_NUMBER
        places = notes.PART + distance + np.asarray(test.notes.asked)
        np.testing.assert_array_equal(answers, likeliest[rows, places])


def test_tables_show_the_seeds_that_learned(test):
    right = np.asarray(test.notes.numbers)[None] - FIRST_NUMBER
    wrong = (right + 1) % notes.NUMBERS
    made = program.models(program.Config(models=("DeltaNet",)))

    def runs(name, *answers):
        return [
            {"name": name, "seconds": 1.0, "answers": {"3": np.tile(x, (2, 1, 1))}}
            for x in answers
        ]

    found = runs(program.WINDOW, wrong, wrong) + runs("DeltaNet", right, wrong)
    result = program.report(made, found, {3: test}, (64, 128))
    assert result["models"]["DeltaNet"]["seeds"]["3"] == [[1.0, 1.0], [0.0, 0.0]]
    (mean, _) = result["models"]["DeltaNet"]["right"]["3"]
    assert mean["mean"] == 0.5
    result["config"] = {"counts": [3], "distances": [64, 128]}
    shown = program.right.rows(result)
    rows = {row[""]: row for row in shown if isinstance(row, dict)}
    first = "3 notes, 64 later"
    assert rows["DeltaNet"]["learned"] == "1 of 2"
    assert rows["DeltaNet"][first] == "1.00"
    assert rows[program.WINDOW]["learned"] == "0 of 2"
    # All of it fits the bytes, and is read again without a mistake.
    assert rows[program.WINDOW][first] == "" and rows[program.TEXT][first] == "1.00"


def test_gates_start_where_they_hardly_forget():
    for name in program.SLOW:
        config = program.models(program.Config(models=(name,)))[name]
        slow = program.slow_gates(config, 0)
        fast = LanguageModel(config, key=jax.random.key(0))
        pairs = zip(*(jax.tree.leaves(nnx.state(x)) for x in (slow, fast)), strict=True)
        # A bias, or a rate, in each of two layers.
        assert 2 <= sum(not np.array_equal(a, b) for a, b in pairs) <= 4


@pytest.mark.slow
def test_the_program_runs_and_keeps_what_it_trained(tmp_path, capsys, monkeypatch):
    beginnings = {name: notes.text_of(name)[:10_000] for name in ("train", "test")}
    monkeypatch.setattr(notes, "text_of", beginnings.get)
    monkeypatch.setattr(program, "STAGES", (SHORT, SHORT))
    monkeypatch.setattr(mqar, "SMALL", mqar.SMALL._replace(scale=SHORT, pairs=(2,)))
    config = program.Config(
        models=("DeltaNet",),
        updates=(1, 1),
        counts=(2,),
        distances=(64, 128),
        texts=1,
        run_dir=tmp_path,
    )
    program.main(config)
    result = json.loads((tmp_path / "results.json").read_text())
    baselines = {program.WINDOW, program.TEXT, program.COMPRESSED}
    assert result["models"].keys() == {"DeltaNet", *baselines}
    sizes = [row["parameters"] for row in [*result["models"].values()][:2]]
    assert abs(sizes[0] - sizes[1]) < 100
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "DeltaNet, seed 0" in capsys.readouterr().err
    program.main(config)
    assert "DeltaNet, seed 0" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds the result of other settings"):
        program.main(dataclasses.replace(config, updates=(2, 1)))
