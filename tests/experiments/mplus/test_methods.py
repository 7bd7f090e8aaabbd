"""Methods that answer questions: their memories, their sizes, their positions."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.lab.measure import tree_bytes
from experiments.mplus import methods, models
from tests.experiments.mplus.tiny import (
    ANSWER,
    BYTES,
    CHUNK,
    MEMORY,
    ROWS,
    backbone,
    memory_model,
    samples,
)


def test_bm25_reads_the_best_chunks_in_their_order():
    method = methods.BM25(backbone(), BYTES, CHUNK, 2, 60)
    chunks = ["the cat sat", "Arda is old", "dogs run", "rivers: a river of Arda"]
    memory = method.start(1)
    for text in chunks:
        memory = method.inject(memory, BYTES.encode(text.ljust(CHUNK))[None])
    found = method.best_chunks(memory[0], "Which river has Arda?")
    assert BYTES.decode(found).split() == f"{chunks[1]} {chunks[3]}".split()
    assert method.best_chunks((), "Which?").size == 0
    # Nothing to go by: the first.
    assert BYTES.decode(method.best_chunks(memory[0], "?")).startswith("the cat")


@pytest.mark.slow
def test_methods_with_the_whole_text_in_view_equal_full_attention():
    (batch,) = samples(samples=2, num_chunks=1)
    sizes = methods.Sizes(400, 250, CHUNK, 60, 2 * CHUNK)
    names = ("full attention", "window, device", "SnapKV, device", "re-read, device")
    built = [methods.baseline(name, backbone(), BYTES, sizes)[1] for name in names]
    # The best two chunks of two are all of them.
    built.append(methods.BM25(backbone(), BYTES, CHUNK, 2, 60))

    def answers(method):
        memory = method.start(2)
        for chunk in (batch.context, batch.chunks[0]):
            memory = method.inject(memory, chunk)
        return method.query(memory, batch.prompts, ANSWER).tolist()

    texts = [answers(method) for method in built]
    assert all(text == texts[0] for text in texts)
    _, closed = methods.baseline("closed book", backbone(), BYTES, sizes)
    assert answers(closed) != texts[0]
    assert answers(methods.ReRead(backbone(), CHUNK, CHUNK, 60)) != texts[0]
    found = [method.state_bytes(2 * CHUNK) for method in built]
    assert [x.host for x in found] == [0, 0, 0, 8 * CHUNK, 8 * CHUNK]
    assert found[0].device < found[1].device


def test_full_attention_answers_up_to_its_positions():
    method = methods.FullAttention(backbone(), CHUNK, 2 * CHUNK + 60, 60)
    cache = method.start(1)[0]
    short = method.inject((cache, 2 * CHUNK), np.zeros((1, CHUNK), np.int32))
    assert short == (None, 3 * CHUNK)
    assert method.query(short, np.zeros((1, 4), np.int32), ANSWER) is None
    one, two, three = (method.state_bytes(n * CHUNK).device for n in (1, 2, 3))
    # A slot a token, and no more slots than positions.
    assert one < two == three


def test_reread_text_is_as_long_as_the_positions_allow():
    with pytest.raises(ValueError, match="last must be at most 340, .* got 341"):
        methods.ReRead(backbone(), CHUNK, 341, 60)
    method = methods.ReRead(backbone(), CHUNK, 5, 60)
    memory = method.start(1)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        memory = method.inject(memory, np.asarray([tokens], np.int32))
    assert memory.tolist() == [[2, 3, 4, 5, 6]]
    assert method.state_bytes(2) == (0, 8) and method.state_bytes(99) == (0, 20)


@pytest.mark.slow
def test_query_reads_the_memory_and_leaves_it():
    batch, *_ = samples()
    method = methods.LatentMemory(memory_model())
    memory = method.inject(method.start(2), batch.context)
    assert memory.clock.tolist() == [ROWS] * 2
    before = jax.tree.map(np.asarray, memory)
    found = method.query(memory, batch.prompts, ANSWER)
    assert found.shape == (2, ANSWER)
    first = jax.jit(memory_model().read)(memory, jnp.asarray(batch.prompts))[1][:, -1]
    np.testing.assert_array_equal(found[:, 0], first.argmax(axis=-1))
    jax.tree.map(np.testing.assert_array_equal, before, memory)


def test_baselines_have_the_bytes_of_the_memory():
    model = memory_model()
    size = methods.LatentMemory(model).state_bytes()
    # Rows of the store are on the host, in float32.
    assert size.host == 2 * MEMORY.store_size * 16 * 4
    sizes = methods.sizes_for(model, chunk=CHUNK, question=60, longest=3 * CHUNK)
    assert sizes.device < sizes.all <= 400
    built = {
        name: methods.baseline(name, backbone(), BYTES, sizes)
        for name in methods.get_args(methods.Baseline)
    }
    assert len({label for label, _ in built.values()}) == len(built)
    for name, wanted in (("window, device", size.device), ("window, all", size.total)):
        label, method = built[name]
        tokens = sizes.device if wanted == size.device else sizes.all
        assert label == f"window of {tokens - 4} tokens and 4 sinks"
        # A token is a key and a value of 8 floats in two layers, and a mask.
        assert 0 <= method.state_bytes(CHUNK).device - wanted < 2 * 2 * 8 * 4 + 1


def test_stores_of_other_sizes():
    large = models.with_store(memory_model(), 96, retrieved=3)
    assert (large.config.store_size, large.config.num_retrieved) == (96, 3)
    store = jax.eval_shape(lambda: large.init_state(1)).store
    assert store.layers[0].rows.shape == (1, 96, 16)
    assert memory_model().config == MEMORY
    alone = memory_model(num_retrieved=0)
    assert methods.LatentMemory(alone).state_bytes().host == 0
    with pytest.raises(ValueError, match="store=96 .* need a model with a store"):
        models.with_store(alone, 96)


def test_attention_retrieval_replaces_the_retriever():
    model = memory_model()
    found = models.with_attention_retrieval(model)
    before, after = (nnx.to_pure_dict(nnx.state(x)) for x in (model, found))
    for name in ("query", "key", "encoder_query"):
        del before[name]
    chex.assert_trees_all_equal(after, before)
    expected = dataclasses.replace(model.config, retrieval="attention")
    assert found.config == expected
    # All of the store is on the device, keys and values.
    size = methods.LatentMemory(found).state_bytes()
    assert size.host == 0 and size.device == tree_bytes(
        jax.eval_shape(lambda: found.init_state(1))
    )
    for other in (memory_model(num_retrieved=0), found):
        with pytest.raises(ValueError, match="must have a learned retriever"):
            models.with_attention_retrieval(other)
