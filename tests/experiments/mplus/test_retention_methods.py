"""Methods of knowledge retention: what they keep, and that they are what they say."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mplus import memories as methods
from experiments.mplus import models
from experiments.mplus.retention import (
    rows,
    text_methods,
    variants,
)
from experiments.mplus.retention.config import NAMES as METHODS
from experiments.mplus.retention.config import SCALES, Config
from memjax.models.mplus.build import add_mplus
from memjax.training.finetune import finetune
from tests.experiments.mplus.facts import (
    BYTES,
    MEMORY,
    C,
    N,
    samples,
    tiny_backbone,
    tiny_memory,
)


def test_bm25_puts_the_best_pieces_in_front_in_their_order():
    method = text_methods.Retriever(tiny_backbone(), BYTES, C, 2)
    chunks = ["the cat sat", "Arda is old", "dogs run", "rivers: a river of Arda"]
    memory = method.start(1)
    for text in chunks:
        memory = method.inject(memory, BYTES.encode(text.ljust(C))[None])
    found = method._best_chunks(memory[0], "Which river has Arda?")
    assert BYTES.decode(found).split() == f"{chunks[1]} {chunks[3]}".split()
    assert method._best_chunks((), "Which?").size == 0
    # Nothing to go by: the first.
    assert BYTES.decode(method._best_chunks(memory[0], "?")).startswith("the cat")


@pytest.mark.slow
def test_equal_methods_answer_alike():
    """Where all that was injected is seen, every method is full attention."""
    (batch,) = samples(samples=2, num_chunks=1)
    built = (
        methods.Full(tiny_backbone(), C, 400, 60),
        methods.window(tiny_backbone(), C, 396, 4),
        methods.snapkv(tiny_backbone(), C, 250, 60),
        text_methods.ReRead(tiny_backbone(), C, 2 * C, 60),
        # The best two pieces of two are all of them.
        text_methods.bm25(tiny_backbone(), BYTES, C, 2, 60),
    )

    def answers(method):
        memory = method.start(2)
        for chunk in (batch.context, batch.chunks[0]):
            memory = method.inject(memory, chunk)
        return method.query(memory, batch.prompts, N).tolist()

    texts = [answers(method) for method in built]
    assert all(text == texts[0] for text in texts)
    closed = text_methods.closed_book(tiny_backbone(), BYTES, 60)
    assert answers(closed) != texts[0]
    shorter = text_methods.ReRead(tiny_backbone(), C, C, 60)
    assert answers(shorter) != texts[0]
    kept = [method.kept(2 * C) for method in built]
    assert [x.host for x in kept] == [0, 0, 0, 8 * C, 8 * C]
    assert kept[0].device < kept[1].device


def test_text_that_is_read_again_has_positions():
    with pytest.raises(ValueError, match="last must be at most 340, .* got 341"):
        text_methods.ReRead(tiny_backbone(), C, 341, 60)
    method = text_methods.ReRead(tiny_backbone(), C, 5, 60)
    memory = method.start(1)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        memory = method.inject(memory, np.asarray([tokens], np.int32))
    assert memory.tolist() == [[2, 3, 4, 5, 6]]
    assert method.kept(2) == (0, 8) and method.kept(99) == (0, 20)


@pytest.mark.slow
def test_m_plus_writes_what_is_injected_and_reads_the_question():
    batch, *_ = samples()
    method = methods.LatentMemory(tiny_memory())
    memory = method.inject(method.start(2), batch.context)
    assert memory.clock.tolist() == [MEMORY.num_memory_tokens] * 2
    before = jax.tree.map(np.asarray, memory)
    found = method.query(memory, batch.prompts, N)
    assert found.shape == (2, N)
    first = jax.jit(tiny_memory().read)(memory, jnp.asarray(batch.prompts))[1][:, -1]
    np.testing.assert_array_equal(found[:, 0], first.argmax(axis=-1))
    jax.tree.map(np.testing.assert_array_equal, before, memory)


@pytest.mark.slow
@pytest.mark.parametrize("store", [MEMORY.store_size, 1024])
def test_memoryllm_is_as_large_on_the_device_without_a_store(store):
    model = variants.with_store(tiny_memory(), store)
    small = variants.without_store(model)
    assert small.config.num_retrieved == 0 and small.init_state(1).store is None
    size = variants.device_bytes(model)
    assert variants.device_bytes(small) >= size
    pool = small.config.pool_size - MEMORY.num_memory_tokens
    less = add_mplus(
        tiny_backbone(),
        dataclasses.replace(small.config, pool_size=pool),
        key=jax.random.key(0),
    )
    assert variants.device_bytes(less) < size
    assert tiny_memory().config == MEMORY


@pytest.mark.slow
def test_rows_of_the_store_are_not_on_the_device():
    model = tiny_memory()
    state = jax.eval_shape(lambda: model.init_state(1))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert size - variants.device_bytes(tiny_memory()) == 64 * 16 * 4


def test_a_store_can_be_larger_than_in_training():
    large = variants.with_store(tiny_memory(), 96)
    assert large.config.num_retrieved == MEMORY.num_retrieved
    assert variants.with_store(tiny_memory(), retrieved=3).config.num_retrieved == 3
    store = jax.eval_shape(lambda: large.init_state(1)).store
    assert store.layers[0].rows.shape == (1, 96, 16) and tiny_memory().config == MEMORY
    with pytest.raises(ValueError, match="store=96 .* need a model with a store"):
        variants.with_store(variants.without_store(tiny_memory()), 96)


def test_every_method_can_be_built():
    model = tiny_memory()
    sized = functools.partial(rows.sizes, model, chunk=C, question=60, longest=3 * C)
    sizes = sized(found=2)
    kept = variants.kept_bytes(model)
    assert sizes.device < sizes.all <= 400 and kept.total > kept.device
    build = lambda name: rows.build(
        name, model, tiny_backbone(), BYTES, sizes, variants.without_store(model)
    )
    labels = {build(name).label for name in METHODS}
    # Sizes stand in the labels: no two rows are called alike.
    assert len(labels) == len(METHODS)
    assert f"window of {sizes.device - 4} tokens and 4 sinks" in labels
    assert build("M+").method.kept(C) == kept
    alone = build("M+'s weights without the store").method.kept(C)
    assert alone.host == 0 and alone.device >= kept.device


def test_fine_tuned_models_are_loaded(monkeypatch, tmp_path):
    stored = lambda name, model: (
        lambda folder: (
            SimpleNamespace(data=SimpleNamespace(tokenizer=name)),
            model,
        )
    )
    config = Config(model=tmp_path, memoryllm=tmp_path)
    monkeypatch.setattr(finetune, "load_model", stored("bytes", tiny_memory()))
    model, tokenizer, trained = models.load(config)
    assert model is tiny_memory() and trained and tokenizer.digest == BYTES.digest
    with pytest.raises(ValueError, match="must be a MemoryLLM, got an M"):
        models.load_memoryllm(tmp_path, BYTES)
    other = variants.without_store(tiny_memory())
    monkeypatch.setattr(finetune, "load_model", stored("bytes", other))
    assert models.load_memoryllm(tmp_path, BYTES) is other
    monkeypatch.setattr(finetune, "load_model", stored("bpe4k", other))
    with pytest.raises(ValueError, match="memoryllm=.* must have the tokenizer"):
        models.load_memoryllm(tmp_path, BYTES)
    monkeypatch.setattr(finetune, "load_model", stored("bytes", tiny_backbone()))
    with pytest.raises(ValueError, match="model=.* must be a fine-tuned M"):
        models.load(config)


def test_a_backbone_gets_an_untrained_memory(monkeypatch):
    found = SimpleNamespace(model=tiny_backbone(), tokenizer=BYTES)
    monkeypatch.setattr(finetune, "load_backbone", lambda path: found)
    model, _, trained = models.load(Config(backbone="somewhere"))
    assert not trained
    assert model.config == SCALES["cpu"].memory
