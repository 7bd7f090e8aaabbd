"""Retrieval quality: rows are counted by birth, and here by their values."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mplus import models, retrieval
from experiments.mplus.methods import LatentMemory
from memjax.models.mplus.read import ReadOptions
from tests.experiments.mplus.tiny import (
    BYTES,
    CHUNK,
    FACTS,
    MEMORY,
    PASSAGES,
    ROWS,
    memory_model,
    samples,
)


@pytest.mark.slow
def test_rows_of_the_context_are_found_by_their_values():
    """The count goes by birth; here by what `compress` made of the context."""
    batch, after = samples(num_chunks=6)[0], (0, 2, 4, 6)
    model = memory_model()
    found = retrieval.inject_and_count(model, batch, after)
    method = LatentMemory(model)
    compress = jax.jit(model.compress)
    whole = ReadOptions(prompt_length=batch.prompts.shape[1])
    choose = jax.jit(lambda *given: model.trace_read(*given, whole)[1].chosen)
    made = np.asarray(compress(method.start(2), jnp.asarray(batch.context)))
    state, seen = method.start(2), 0
    for count, chunk in enumerate([batch.context, *batch.chunks]):
        state = method.inject(state, chunk)
        if count not in after:
            continue
        places = np.asarray(choose(state, jnp.asarray(batch.prompts)))
        for row, layer in np.ndindex(2, 2):
            held = int(state.store.num_valid[row])
            assert found[count].held[row] == held == min(max(0, count - 1) * ROWS, 32)
            own = {vector.tobytes() for vector in made[row, layer]}

            def among(rows, own=own):
                return sum(np.asarray(x).tobytes() in own for x in rows)

            stored = np.asarray(state.store.layers[layer].rows[row, :held])
            chosen = [i for i in places[layer, row] if i < held]
            counts = (
                among(stored),
                among(stored[chosen]) if held else 0,
            )
            assert counts == tuple(int(x[row, layer]) for x in found[count][:2])
            seen += counts[1]
    assert (found[0].store == 0).all()
    assert seen > 0 and (found[4].store > found[4].retrieved).any()
    # The oldest rows have left the full store.
    assert (found[6].store < found[4].store).any()


@pytest.mark.slow
def test_rows_of_the_answer_are_those_of_its_tokens():
    """A chunk's last tokens have a row each, in the order of the tokens."""
    batch, model = samples(num_chunks=6)[0], memory_model()
    first, end = CHUNK - ROWS, CHUNK
    for span, rows in (
        ((first, end), 8),
        ((end - 3, end), 3),
        ((0, first), 0),
        ((41, 44), 3),
    ):
        placed = batch._replace(answers=np.array([span] * 2))
        found = retrieval.inject_and_count(model, placed, (5,))[5]
        assert (found.store == ROWS).any() and (found.answer_store <= rows).all()
        full = found.store == ROWS
        assert (found.answer_store[full] == rows).all()
        assert (found.answer_retrieved <= found.retrieved).all()
        if rows == ROWS:
            np.testing.assert_array_equal(found.answer_retrieved, found.retrieved)


def test_shares_are_of_the_rows_in_the_store():
    first = retrieval.Found(
        store=jnp.array([[4, 6]]),
        retrieved=jnp.array([[2, 1]]),
        answer_store=jnp.array([[1, 3]]),
        answer_retrieved=jnp.array([[1, 1]]),
        held=jnp.array([16]),
    )
    zeros = jnp.zeros((1, 2), int)
    empty = retrieval.Found(zeros, zeros, zeros, zeros, jnp.array([0]))
    row = retrieval.summary(MEMORY, [first, empty])
    # Half of the store is retrieved.
    assert (row["share"], row["share_random"], row["times_random"]) == (0.3, 0.5, 0.6)
    answer = row["answer"]
    assert answer["share"] == 0.5 and answer["times_random"] == 1.0
    assert row["facts_with_rows"] == answer["facts_with_rows"] == 1
    assert math.isnan(row["standard_error"])
    assert math.isnan(retrieval.summary(MEMORY, [empty])["share"])
    # A store of fewer rows than a read takes.
    small = first._replace(held=jnp.array([6]))
    assert retrieval.summary(MEMORY, [small])["share_random"] == 1.0


@pytest.mark.slow
def test_untrained_retrievers_find_what_chance_does():
    batch = samples(num_chunks=5)[0]
    found = [
        retrieval.inject_and_count(memory_model(seed), batch, (5,))[5]
        for seed in range(12)
    ]
    assert all((x.retrieved <= x.store).all() for x in found)
    row = retrieval.summary(MEMORY, found)
    # 8 of 32 rows; 24 facts, whose layers draw apart.
    assert row["share_random"] == 0.25
    assert abs(row["share"] - 0.25) < 4 * row["standard_error"]


@pytest.mark.slow
def test_study_runs_whole(monkeypatch, tmp_path):
    for name, value in (
        ("load_trained", lambda name, folder: (memory_model(), BYTES)),
        ("load_facts_of", lambda split: FACTS),
        ("passages", lambda: PASSAGES),
        ("recipe", lambda folder: []),
    ):
        monkeypatch.setattr(models, name, value)
    config = retrieval.Config(
        model=tmp_path,
        samples=4,
        batch=2,
        lengths=0,
        after=(0, 2, 4),
        chunk=CHUNK,
        output=tmp_path / "result",
    )
    retrieval.main(config)
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["distances"] == [0, 2 * CHUNK, 4 * CHUNK]
    assert [row["facts"] for row in report["after"].values()] == [4] * 3
    assert report["after"]["0"]["rows_in_store"] == 0
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="chunk must be a multiple of the memory's 48"):
        retrieval.check(dataclasses.replace(config, chunk=50), memory_model())
    with pytest.raises(ValueError, match=r"M\+ with a retriever .* num_retrieved=0"):
        retrieval.check(config, memory_model(num_retrieved=0))
    for changes, message in (
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"after": (2, 1)}, "after must rise"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **changes)
