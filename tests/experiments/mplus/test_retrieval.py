"""Retrieval quality: rows are counted by birth, and here by their values."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mplus import retrieval
from experiments.mplus.methods import LatentMemory
from memjax.models.mplus.read import ReadOptions
from tests.experiments.mplus.tiny import (
    CHUNK,
    MEMORY,
    ROWS,
    memory_model,
    samples,
    use_tiny,
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
            counts = (among(stored), among(stored[chosen]) if held else 0)
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
    assert (CHUNK - ROWS, CHUNK) == (40, 48)
    for span, rows in (((40, 48), 8), ((45, 48), 3), ((0, 40), 0), ((41, 44), 3)):
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
    assert math.isnan(retrieval.summary(MEMORY, [empty])["share"])
    # A store of fewer rows than a read takes.
    small = first._replace(held=jnp.array([6]))
    assert retrieval.summary(MEMORY, [small])["share_random"] == 1.0


@pytest.mark.slow
def test_study_runs_whole(monkeypatch, tmp_path):
    use_tiny(monkeypatch, retrieval, AFTER=(0, 2, 4))
    retrieval.main(retrieval.Config(tmp_path, output=tmp_path))
    learned, fitted = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in retrieval.SOURCES
    )
    assert learned["distances"] == [0, 2 * CHUNK, 4 * CHUNK]
    assert math.isnan(learned["after"]["0"]["share"])
    assert learned["after"] != fitted["after"]
