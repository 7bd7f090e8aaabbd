"""Perplexity after injected text: the scored tokens, no leakage, the study whole."""

import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.mplus import methods, models, perplexity
from memjax.data import TokenisedDocument, load_tokens
from memjax.models import LanguageModel
from memjax.models.mplus.read import ReadOptions
from tests.experiments.mplus import tiny
from tests.experiments.mplus.tiny import BYTES, backbone

CHUNK, PROMPT, SCORED = 16, 5, 12
RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 256, (2, 8 * CHUNK + PROMPT + SCORED), dtype=np.int32)
CONFIG = perplexity.Config(
    chunks=(0, 2, 8),
    chunk=CHUNK,
    texts=2,
    batch=2,
    prompt=PROMPT,
    scored=SCORED,
)


@functools.cache
def memory_model(**changes):
    model = tiny.memory_model(**dict(chunk_size=CHUNK, store_size=1024) | changes)
    model = model.replace(backbone=backbone())
    # Queries so long that every token has a say in what is retrieved.
    model.query = nnx.data(jax.tree.map(lambda x: x * 30, model.query))
    return model


def injected(model):
    method = methods.LatentMemory(model)
    memory = method.start(2)
    for at in range(0, 8 * CHUNK, CHUNK):
        memory = method.inject(memory, TEXT[:, at : at + CHUNK])
    return memory


def direct(tokens, skip):
    """Nats by the backbone on a whole text."""
    read = jax.jit(lambda state, x: backbone()(state, x))
    _, logits = read(backbone().init_state(len(tokens)), jnp.asarray(tokens[:, :-1]))
    nats = -jax.nn.log_softmax(logits)
    nats = np.take_along_axis(np.asarray(nats), tokens[:, 1:, None], axis=2)[..., 0]
    return nats[:, skip - 1 :]


@pytest.mark.slow
def test_losses_are_of_the_logits_and_do_not_leak():
    model = memory_model()
    method = methods.LatentMemory(model)
    memory, tokens = injected(model), TEXT[:, 8 * CHUNK :]
    before = jax.tree.map(np.asarray, memory)
    found = perplexity.losses(method, memory, tokens, PROMPT)
    assert found.shape == (2, SCORED)
    options = ReadOptions(prompt_length=PROMPT)
    read = jax.jit(lambda s, x: model.read(s, x, options))
    logits = np.asarray(read(memory, jnp.asarray(tokens[:, :-1]))[1], np.float64)
    logits = logits[:, PROMPT - 1 :]
    right = np.take_along_axis(logits, tokens[:, PROMPT:, None], axis=2)[..., 0]
    nats = np.log(np.exp(logits).sum(axis=2)) - right
    np.testing.assert_allclose(found, nats, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, before, memory)
    # Later targets change neither retrieval nor earlier losses.
    other = tokens.copy()
    other[:, -4:] = (other[:, -4:] + 101) % 256
    again = perplexity.losses(method, memory, other, PROMPT)
    np.testing.assert_array_equal(found[:, :-4], again[:, :-4])
    # A store with room for the text alone changes nothing.
    small = perplexity.with_room(model, 8 * CHUNK)
    assert small.config.store_size == 8 * 8 - 16 and model.config.store_size == 1024
    less = perplexity.losses(
        methods.LatentMemory(small), injected(small), tokens, PROMPT
    )
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
    with pytest.raises(ValueError, match="texts must be at most 2 of 10 tokens"):
        perplexity.excerpts(documents, 3, 10)


def test_last_chunks_are_injected_and_the_same_tokens_scored(monkeypatch):
    seen = []

    class Transcript:
        def start(self, batch):
            return ()

        def inject(self, memory, tokens):
            return (*memory, *tokens[0])

    def losses(model, memory, tokens, prompt):
        seen.append((memory, tuple(tokens[0]), prompt))
        return np.full((2, SCORED), len(memory), np.float32)

    monkeypatch.setattr(perplexity, "losses", losses)
    config = dataclasses.replace(CONFIG, chunks=(0, 1, 3))
    length = 3 * CHUNK + PROMPT + SCORED
    texts = [perplexity.Excerpt("a", np.arange(length, dtype=np.int32))] * 2
    none = methods.StateBytes(0, 0)
    row = perplexity.Row(Transcript(), none)  # pyright: ignore
    nats = perplexity.score(config, row, texts)
    assert nats.tolist() == [[0, 0], [CHUNK, CHUNK], [3 * CHUNK, 3 * CHUNK]]
    end = tuple(range(3 * CHUNK, length))
    for count, found in zip((0, 1, 3), seen, strict=True):
        assert found == (tuple(range((3 - count) * CHUNK, 3 * CHUNK)), end, PROMPT)
    nats = perplexity.score(config, row._replace(last=0), texts)
    assert not nats.any() and len(seen) == 4
    nats = perplexity.score(config, row._replace(last=2 * CHUNK), texts)
    assert nats[:, 0].tolist() == [0, CHUNK, 2 * CHUNK]
    assert seen[-1][0] == tuple(range(CHUNK, 3 * CHUNK))


@pytest.fixture(name="texts", scope="module")
def _texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "test").mkdir()
    for i in range(2):
        words = RNG.choice(["memory", "window", "block", "state"], size=60)
        (folder / "test" / f"{i}.txt").write_text(f"{i} " + " ".join(words))
    return f"folder:{folder}"


def given(monkeypatch, trained):
    """Trained models by the names of their options, and the tiny backbone."""
    found = SimpleNamespace(model=backbone(), tokenizer=BYTES)
    monkeypatch.setattr(perplexity.finetune, "load_backbone", lambda path: found)
    monkeypatch.setattr(models, "load_trained", lambda name, _: (trained[name], BYTES))


@pytest.mark.slow
def test_study_runs_whole(monkeypatch, tmp_path, texts):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "recipe", lambda folder: [])
    early = tiny.memory_model(2, chunk_size=CHUNK, num_retrieved=0, pool_size=32)
    early = early.replace(backbone=backbone())
    given(monkeypatch, dict(stage1=early, stage2=early, stage3=memory_model()))
    folders = {name: tmp_path / name for name in perplexity.STAGES}
    config = dataclasses.replace(
        CONFIG, **folders, source=texts, backbone="tiny", output=tmp_path / "result"
    )
    perplexity.main(config)
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["tokens_told"] == [0, 2 * CHUNK, 8 * CHUNK]
    nats = {name: np.asarray(x) for name, x in report["nats_by_text"].items()}
    alone = nats["backbone, told nothing"]
    everything = nats["backbone, full attention"]
    np.testing.assert_array_equal(alone, np.broadcast_to(alone[:1], alone.shape))
    length = 8 * CHUNK + PROMPT + SCORED
    documents = load_tokens(texts, BYTES, "test")
    tokens = np.stack([x.tokens for x in perplexity.excerpts(documents, 2, length)])
    for row, count in zip(everything, (0, 2, 8), strict=True):
        whole = tokens[:, (8 - count) * CHUNK :]
        # No token sees what is behind it: one program for all lengths.
        padded = np.pad(whole, ((0, 0), (0, (8 - count) * CHUNK)))
        expected = direct(padded, count * CHUNK + PROMPT)[:, :SCORED].mean(axis=1)
        np.testing.assert_allclose(row, expected, atol=1e-5)
    (again,) = (x for name, x in nats.items() if "read again" in name)
    # As many tokens as the memories read memory tokens, in whole chunks.
    (name,) = (name for name in nats if "read again" in name)
    assert name == "backbone, the last 32 tokens read again"
    np.testing.assert_allclose(again[:2], everything[:2], atol=1e-5)
    assert np.abs(again[2] - everything[2]).max() > 1e-4
    kept = report["kept_bytes"]
    assert kept["M+, stage 3"]["host"] > 0 == kept["MemoryLLM, stage 2"]["host"]
    assert kept[name] == dict(device=0, host=4 * 32)
    assert kept["backbone, told nothing"] == dict(device=0, host=0)
    saved = report["saved_nats"]
    assert "MemoryLLM, stage 1" in saved["MemoryLLM, stage 2"]
    by_full = saved["M+, stage 3"]["backbone, full attention"][2]
    expected = (everything - nats["M+, stage 3"])[2].mean()
    assert by_full["mean"] == pytest.approx(expected)
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_models_of_another_kind_backbone_or_chunk_are_refused(monkeypatch):
    alone = tiny.memory_model(num_retrieved=0).replace(backbone=backbone())
    other = LanguageModel(tiny.CONFIG, key=jax.random.key(7))
    for stage, model, message in (
        ("stage1", memory_model(), r"be a folder of MemoryLLM, got one with num_r"),
        ("stage3", alone, r"be a folder of M\+, got one with num_retrieved=0"),
        ("stage3", memory_model().replace(backbone=other), "must have the backbone"),
        ("stage3", memory_model(chunk_size=24), "that of stage3 is 24, got 16"),
    ):
        given(monkeypatch, {stage: model})
        config = dataclasses.replace(CONFIG, **{stage: Path(stage)})
        with pytest.raises(ValueError, match=message):
            perplexity.load_memories(config, backbone())


def test_settings_out_of_range_are_refused():
    for changes, message in (
        ({"chunks": (1, 2)}, "chunks must rise from 0"),
        ({"chunks": (0, 2, 1)}, "chunks must rise from 0"),
        ({"texts": 3}, "texts must be a multiple of batch=2, got 3"),
        ({"scored": 0}, "scored must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **changes)
