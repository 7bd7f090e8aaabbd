"""Perplexity after injected text: the scored tokens, no leakage, the study whole."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.mplus import methods, models, perplexity
from memjax.data import TokenisedDocument, load_tokens
from memjax.models.mplus.read import ReadOptions
from tests.experiments.mplus import tiny
from tests.experiments.mplus.tiny import BYTES, backbone

CHUNK, PROMPT, SCORED = 16, 5, 12
TOTAL = 8 * CHUNK + PROMPT + SCORED
RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 256, (2, TOTAL), dtype=np.int32)


@pytest.fixture(autouse=True)
def _sizes(monkeypatch):
    sizes = {"CHUNK": CHUNK, "PROMPT": PROMPT, "SCORED": SCORED, "BATCH": 1}
    for name, value in (sizes | {"CHUNKS": (0, 2, 8)}).items():
        monkeypatch.setattr(perplexity, name, value)


@functools.cache
def memory_model():
    model = tiny.memory_model(chunk_size=CHUNK, store_size=1024)
    model = model.replace(backbone=backbone())
    # Queries so long that every token has a say in what is retrieved.
    model.query = nnx.data(jax.tree.map(lambda x: x * 30, model.query))
    return model


@pytest.mark.slow
def test_losses_are_of_the_logits_and_do_not_leak():
    model = memory_model()
    method = methods.LatentMemory(model)
    found = perplexity.by_memory(method, TEXT)
    assert found.shape == (2, SCORED)
    memory = method.start(2)
    for at in range(0, 8 * CHUNK, CHUNK):
        memory = method.inject(memory, TEXT[:, at : at + CHUNK])
    before, tokens = jax.tree.map(np.asarray, memory), TEXT[:, 8 * CHUNK :]
    method.losses(memory, tokens, PROMPT)
    jax.tree.map(np.testing.assert_array_equal, before, memory)
    options = ReadOptions(prompt_length=PROMPT)
    read = jax.jit(lambda s, x: model.read(s, x, options))
    logits = np.asarray(read(memory, jnp.asarray(tokens[:, :-1]))[1], np.float64)
    logits = logits[:, PROMPT - 1 :]
    right = np.take_along_axis(logits, tokens[:, PROMPT:, None], axis=2)[..., 0]
    nats = np.log(np.exp(logits).sum(axis=2)) - right
    np.testing.assert_allclose(found, nats, atol=1e-5)
    # Later targets change neither retrieval nor earlier losses.
    other = TEXT.copy()
    other[:, -4:] = (other[:, -4:] + 101) % 256
    again = perplexity.by_memory(method, other)
    np.testing.assert_array_equal(found[:, :-4], again[:, :-4])
    # A store with room for the text alone changes nothing.
    small = perplexity.with_room(model, 8 * CHUNK)
    assert small.config.store_size == 8 * 8 - 16 and model.config.store_size == 1024
    less = perplexity.by_memory(methods.LatentMemory(small), TEXT)
    np.testing.assert_array_equal(found, less)


def test_store_has_room_for_the_text_but_no_less_than_a_read():
    model = memory_model()
    small = perplexity.with_room(model, CHUNK)
    assert small.config.store_size == model.config.min_store_size
    alone = tiny.memory_model(num_retrieved=0)
    assert perplexity.with_room(alone, CHUNK) is alone


def test_excerpts_are_the_ends_of_long_documents():
    def document(name, size):
        return TokenisedDocument(name, "text", np.arange(size, dtype=np.int32))

    documents = [document("a", 25), document("short", 9), document("b", 103)]
    parts = perplexity.excerpts(documents, 2, 10)
    assert [part.name for part in parts] == ["a", "b"]
    assert [part.tokens[0] for part in parts] == [15, 93]


@pytest.mark.slow
def test_study_runs_whole(monkeypatch, tmp_path):
    (tmp_path / "texts" / "test").mkdir(parents=True)
    for i in range(2):
        words = RNG.choice(["memory", "window", "block", "state"], size=60)
        (tmp_path / "texts" / "test" / f"{i}.txt").write_text(f"{i} " + " ".join(words))
    early = tiny.memory_model(2, chunk_size=CHUNK, num_retrieved=0, pool_size=32)
    trained = {"early": early.replace(backbone=backbone()), "late": memory_model()}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "recipe", lambda folder: [])
    monkeypatch.setattr(models, "load_trained", lambda x: (trained[x.name], BYTES))
    source = f"folder:{tmp_path / 'texts'}"
    stages = tmp_path / "early", tmp_path / "late"
    output = tmp_path / "result"
    config = perplexity.Config(*stages, texts=2, source=source, output=output)
    perplexity.main(config)
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["tokens_told"] == [0, 2 * CHUNK, 8 * CHUNK]
    nats = {name: np.asarray(x) for name, x in report["nats_by_text"].items()}
    alone = nats["backbone, told nothing"]
    everything = nats["backbone, full attention"]
    np.testing.assert_array_equal(alone, np.broadcast_to(alone[:1], alone.shape))
    np.testing.assert_array_equal(alone[0], everything[0])
    documents = load_tokens(source, BYTES, "test")
    tokens = np.stack([x.tokens for x in perplexity.excerpts(documents, 2, TOTAL)])
    # Read at once by the backbone.
    read = jax.jit(lambda state, x: backbone()(state, x)[1])
    logits = read(backbone().init_state(2), jnp.asarray(tokens[:, :-1]))
    wanted = tokens[:, 1:, None]
    direct = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), wanted, axis=2)
    expected = direct[:, -SCORED:, 0].mean(axis=1)
    np.testing.assert_allclose(everything[2], expected, atol=1e-5)
    # As many tokens as the memories read memory tokens, in whole chunks.
    name = "backbone, the last 32 tokens read again"
    np.testing.assert_array_equal(nats[name], everything[[0, 1, 1]])
    assert np.abs(nats[name][2] - everything[2]).max() > 1e-4
    kept = report["kept_bytes"]
    assert kept["M+, stage 3"]["host"] > 0 == kept["MemoryLLM, stage 2"]["host"]
    assert kept[name] == dict(device=0, host=4 * 32)
    assert kept["backbone, told nothing"] == dict(device=0, host=0)
    by_full = report["saved_nats"]["M+, stage 3"]["backbone, full attention"][2]
    expected = (everything - nats["M+, stage 3"])[2].mean()
    assert by_full["mean"] == pytest.approx(expected)
