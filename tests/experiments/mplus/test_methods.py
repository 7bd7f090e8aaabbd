"""Methods that answer questions: their memories, their sizes, their positions."""

import functools
from typing import get_args

import jax
import numpy as np
import pytest

from experiments.lab.measure import tree_bytes
from experiments.mplus import methods, models
from tests.experiments.mplus.tiny import (
    ANSWER,
    BYTES,
    CHUNK,
    MEMORY,
    backbone,
    memory_model,
    samples,
)
from tests.tiny import assert_close


def test_bm25_reads_the_best_chunks_in_their_order():
    chunks = ["the cat sat", "Arda is old", "dogs run", "rivers: a river of Arda"]
    text = np.concatenate([BYTES.encode(x.ljust(CHUNK)) for x in chunks])[None]

    def best(question):
        found = methods.bm25(BYTES, CHUNK, 2, text, BYTES.encode(question)[None])
        return BYTES.decode(found[0])

    found = best("Which river has Arda?").split()
    assert found == f"{chunks[1]} {chunks[3]}".split()
    # Nothing to go by: the first.
    assert best("?").startswith("the cat")


@pytest.mark.slow
def test_methods_with_the_whole_text_in_view_equal_full_attention(monkeypatch):
    # Tokens alone tell little: random models repeat one whatever they read.
    scores, real = [], methods.generate

    def generate(*args, **options):
        found = real(*args, **options)
        scores.append(found.log_probs)
        return found

    monkeypatch.setattr(methods, "generate", generate)
    (batch,) = samples(samples=2, num_chunks=1)
    sizes = methods.Sizes(400, 250, CHUNK, 60, 2 * CHUNK)
    names = ("full attention", "window, device", "SnapKV, device", "re-read, device")
    built = [methods.baseline(name, backbone(), BYTES, sizes)[1] for name in names]
    # The best two chunks of two are all of them.
    both = functools.partial(methods.bm25, BYTES, CHUNK, 2)
    built.append(methods.ReRead(backbone(), CHUNK, 2 * CHUNK, 60, both))

    def answers(method):
        memory = method.start(2)
        for chunk in (batch.context, batch.chunks[0]):
            memory = method.inject(memory, chunk)
        tokens = method.query(memory, batch.prompts, ANSWER)
        return tokens, scores.pop()

    full, *others = (answers(method) for method in built)
    for found in others:
        assert_close(found, full)
    _, closed = methods.baseline("closed book", backbone(), BYTES, sizes)
    for method in (closed, methods.ReRead(backbone(), CHUNK, CHUNK, 60)):
        assert np.abs(answers(method)[1] - full[1]).max() > 1e-3
    found = [method.state_bytes(2 * CHUNK) for method in built]
    assert [x.host for x in found] == [0, 0, 0, 8 * CHUNK, 8 * CHUNK]
    assert found[0].device < found[1].device


def test_full_attention_answers_up_to_its_positions():
    sizes = methods.Sizes(400, 250, CHUNK, 60, 2 * CHUNK)
    _, method = methods.baseline("full attention", backbone(), BYTES, sizes)
    cache, _ = method.start(1)
    short = method.inject((cache, 2 * CHUNK), np.zeros((1, CHUNK), np.int32))
    assert short == (None, 3 * CHUNK)
    assert method.query(short, np.zeros((1, 4), np.int32), ANSWER) is None
    one, two, three = (method.state_bytes(n * CHUNK).device for n in (1, 2, 3))
    # A slot a token, and no more slots than positions.
    assert one < two == three


def test_reread_text_is_the_last_or_all():
    select = functools.partial(methods.bm25, BYTES, 3, 1)
    for again, chosen, expected in ((5, None, 5), (0, None, 0), (3, select, 6)):
        method = methods.ReRead(backbone(), CHUNK, again, 60, chosen)
        memory = method.start(1)
        for tokens in ([1, 2, 3], [4, 5, 6]):
            memory = method.inject(memory, np.asarray([tokens], np.int32))
        assert memory.tolist() == [[1, 2, 3, 4, 5, 6][6 - expected :]]
        assert method.state_bytes(6) == (0, 4 * expected)


def test_baselines_have_the_bytes_of_the_memory(monkeypatch):
    monkeypatch.setattr(methods, "read_as_long", lambda *_: 7)
    model = memory_model()
    size = methods.LatentMemory(model).state_bytes()
    # Rows of the store are on the host, in float32.
    assert size.host == MEMORY.store_size * 16 * 4
    sizes = methods.sizes_for(model, chunk=CHUNK, question=60, longest=3 * CHUNK)
    assert sizes.device < sizes.all <= 400
    given = backbone(), BYTES, sizes
    built = {x: methods.baseline(x, *given) for x in get_args(methods.Baseline)}
    assert len({label for label, _ in built.values()}) == len(built)
    for name, wanted in (("window, device", size.device), ("window, all", sum(size))):
        label, method = built[name]
        tokens = sizes.device if wanted == size.device else sizes.all
        assert label == f"window of {tokens - 4} tokens and 4 sinks"
        # A token is a key and a value of 8 floats, and a mask.
        assert 0 <= method.state_bytes(CHUNK).device - wanted < 2 * 8 * 4 + 1


def test_dense_search_reads_the_chunk_that_is_like_the_question():
    (batch,) = samples(samples=2, num_chunks=1)
    chunks, room = (batch.context, batch.chunks[0]), CHUNK + ANSWER
    method = methods.DenseSearch(backbone(), CHUNK, room)
    memory = method.start(2)
    for chunk in chunks:
        memory = method.inject(memory, chunk)
    read_again = methods.ReRead(backbone(), CHUNK, CHUNK, room)
    for chunk in chunks:
        wanted = read_again.query(chunk, chunk, ANSWER)
        np.testing.assert_array_equal(method.query(memory, chunk, ANSWER), wanted)
    # Ids, and a mean of 16 floats a chunk.
    assert method.state_bytes(2 * CHUNK) == (0, 4 * (2 * CHUNK + 2 * 16))


def test_store_of_attention_is_on_the_device():
    found = models.with_attention_retrieval(memory_model())
    size = methods.LatentMemory(found).state_bytes()
    whole = tree_bytes(jax.eval_shape(lambda: found.init_state(1)))
    assert size == (whole, 0)
