"""Perplexity by what was injected: what is scored, no leak, the program whole."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.mplus import memories as methods
from experiments.mplus import perplexity, perplexity_rows, scores
from experiments.mplus.retention import variants
from memjax.data import TokenisedDocument, load_tokenizer, load_tokens
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions

BYTES = load_tokenizer("bytes")
C, P, T = 16, 5, 12
CONFIG = ModelConfig(
    mechanisms=(AttentionConfig(16, 2, 1, 8, capacity=256),),
    num_layers=1,
    vocab_size=256,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
MEMORY = MPlusConfig(
    num_memory_tokens=8,
    pool_size=16,
    chunk_size=C,
    num_retrieved=8,
    store_size=1024,
    key_dim=4,
    rank=2,
)


@functools.cache
def tiny_backbone():
    return LanguageModel(CONFIG, key=jax.random.key(0))


@functools.cache
def tiny_memory():
    model = add_mplus(tiny_backbone(), MEMORY, key=jax.random.key(1))
    # Queries so long that every token has a say in what is retrieved.
    model.query = nnx.data(jax.tree.map(lambda x: x * 30, model.query))
    return model


RNG = np.random.default_rng(0)
TEXT = RNG.integers(0, 256, (2, 8 * C + P + T), dtype=np.int32)


def injected(model, pieces):
    method = methods.LatentMemory(model)
    memory = method.start(2)
    for i in range(8 - pieces, 8):
        memory = method.inject(memory, TEXT[:, i * C : (i + 1) * C])
    return memory


def direct(tokens, skip):
    """Nats by the backbone on a whole text, without a memory between its parts."""
    state = tiny_backbone().init_state(len(tokens))
    _, logits = jax.jit(lambda s, x: tiny_backbone()(s, x))(
        state, jnp.asarray(tokens[:, :-1])
    )
    nats = -jax.nn.log_softmax(logits)
    nats = np.take_along_axis(np.asarray(nats), tokens[:, 1:, None], axis=2)[..., 0]
    return nats[:, skip - 1 :]


@pytest.mark.slow
def test_losses_are_those_of_the_logits_and_leave_the_memory():
    memory, tokens = injected(tiny_memory(), 8), TEXT[:, 8 * C :]
    before = jax.tree.map(np.asarray, memory)
    found = scores.losses(tiny_memory(), memory, tokens, P)
    assert found.shape == (2, T)
    _, logits = jax.jit(
        lambda s, x: tiny_memory().read(s, x, ReadOptions(prompt_length=P))
    )(memory, jnp.asarray(tokens[:, :-1]))
    logits = np.asarray(logits, np.float64)[:, P - 1 :]
    right = np.take_along_axis(logits, tokens[:, P:, None], axis=2)[..., 0]
    nats = np.log(np.exp(logits).sum(axis=2)) - right
    np.testing.assert_allclose(found, nats, atol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (before, memory)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_only_the_leaking_way_sees_what_it_scores():
    memory, tokens = injected(tiny_memory(), 8), TEXT[:, 8 * C :]
    other = tokens.copy()
    other[:, -4:] = (other[:, -4:] + 101) % 256
    both = lambda leaks: [
        scores.losses(tiny_memory(), memory, x, P, leaks=leaks)[:, :-4]
        for x in (tokens, other)
    ]
    first, second = both(False)
    np.testing.assert_array_equal(first, second)
    first, second = both(True)
    assert np.abs(first - second).max() > 1e-6


@pytest.mark.slow
def test_a_smaller_store_changes_nothing():
    small = scores.with_room(tiny_memory(), 8 * C)
    assert (
        small.config.store_size == 8 * 8 - 16
        and tiny_memory().config.store_size == 1024
    )
    tokens = TEXT[:, 8 * C :]
    large, less = (
        scores.losses(m, injected(m, 8), tokens, P) for m in (tiny_memory(), small)
    )
    np.testing.assert_array_equal(large, less)
    assert scores.with_room(tiny_memory(), C).config.store_size == MEMORY.min_store_size
    alone = variants.without_store(tiny_memory())
    assert scores.with_room(alone, C) is alone


def test_excerpts_do_not_overlap_and_documents_take_turns():
    document = lambda name, size: TokenisedDocument(
        name, "text", np.arange(size, dtype=np.int32)
    )
    documents = [document("a", 25), document("short", 9), document("b", 103)]
    parts = scores.excerpts(documents, 5, 10)
    assert [part.name for part in parts] == ["a", "b", "a", "b", "b"]
    for name, size in (("a", 25), ("b", 103)):
        mine = [part.tokens for part in parts if part.name == name]
        assert all(len(tokens) == 10 for tokens in mine)
        places = np.concatenate(mine)
        assert len(set(places)) == len(places) and places.max() < size
        # Spread over the whole document.
        assert places.max() >= size - len(mine) and places.min() > 0
    assert len(scores.excerpts(documents, 12, 10)) == 12
    with pytest.raises(ValueError, match="texts must be at most 12 of 10 tokens"):
        scores.excerpts(documents, 13, 10)


@pytest.mark.slow
def test_the_last_chunks_are_injected_and_the_same_tokens_scored(monkeypatch):
    seen = []

    class Notes:
        def start(self, batch):
            return ()

        def inject(self, memory, tokens):
            return (*memory, *tokens[0])

    def losses(model, memory, tokens, prompt, *, leaks):
        seen.append((memory, tuple(tokens[0]), prompt, leaks))
        return np.full((2, T), len(memory) + 0.5 * leaks, np.float32)

    monkeypatch.setattr(scores, "losses", losses)
    config = perplexity_rows.Config(
        told=(0, 1, 3), texts=2, batch=2, prompt=P, scored=T
    )
    length = 3 * C + P + T
    texts = [scores.Excerpt("a", "text", np.arange(length, dtype=np.int32))] * 2
    row = perplexity_rows.Row(tiny_memory(), Notes())
    ((leaks, nats),) = perplexity.score(config, row, texts, C)
    assert not leaks and nats.tolist() == [[0, 0], [C, C], [3 * C, 3 * C]]
    end = tuple(range(3 * C, length))
    for count, found in zip((0, 1, 3), seen, strict=True):
        assert found == (tuple(range((3 - count) * C, 3 * C)), end, P, False)
    nothing = row._replace(last=0)
    ((_, nats),) = perplexity.score(config, nothing, texts, C)
    assert not nats.any() and len(seen) == 4
    again = row._replace(last=2 * C)
    ((_, nats),) = perplexity.score(config, again, texts, C)
    assert nats[:, 0].tolist() == [0, C, 2 * C]
    assert seen[-1][0] == tuple(range(C, 3 * C))


def trained(monkeypatch, models):
    """Folders of trained models, by the names of their options."""
    load = lambda name, folder: (models[name], BYTES)
    monkeypatch.setattr(scores, "load_trained", load)


@pytest.fixture(name="texts", scope="module")
def _texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for split in ("validation", "test"):
        (folder / split).mkdir()
        for i in range(2):
            words = RNG.choice(["memory", "window", "block", "state"], size=60)
            (folder / split / f"{i}.txt").write_text(f"{i} " + " ".join(words))
    return f"folder:{folder}"


@pytest.mark.slow
def test_the_program_runs_whole(monkeypatch, tmp_path, texts, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    early = [
        variants.without_store(
            add_mplus(tiny_backbone(), MEMORY, key=jax.random.key(i))
        )
        for i in (2, 3)
    ]
    monkeypatch.setattr(perplexity, "recipes", lambda config: {})
    trained(monkeypatch, dict(stage1=early[0], stage2=early[1], stage3=tiny_memory()))
    config = perplexity_rows.Config(
        stage1=tmp_path / "stage1",
        stage2=tmp_path / "stage2",
        stage3=tmp_path / "stage3",
        told=(0, 2, 8),
        texts=2,
        batch=2,
        prompt=P,
        scored=T,
        again=2 * C,
        window=256,
        source=texts,
        output=tmp_path / "result",
    )
    perplexity.main(config)
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["tokens_told"] == [0, 2 * C, 8 * C]
    leaking = "M+, stage 3, LEAKING: scored tokens choose"
    assert report["leaking"][0] == leaking and len(report["leaking"]) == 2
    nats = {name: np.asarray(x) for name, x in report["nats_by_text"].items()}
    alone = nats["backbone, told nothing"]
    everything = nats["backbone, full attention"]
    window = nats["backbone, window of 252 tokens and 4 sinks"]
    # An adapter that has not been trained changes nothing, nor does an empty memory.
    np.testing.assert_allclose(nats["M+, untrained"][0], alone[0], atol=1e-5)
    np.testing.assert_array_equal(alone, np.broadcast_to(alone[:1], alone.shape))
    documents = load_tokens(texts, BYTES, "test")
    tokens = [x.tokens for x in scores.excerpts(documents, 2, 8 * C + P + T)]
    for row, count in zip(window, (0, 2, 8), strict=True):
        whole = np.stack(tokens)[:, (8 - count) * C :]
        # No token sees what is behind it: one program for all lengths.
        padded = np.pad(whole, ((0, 0), (0, (8 - count) * C)))
        expected = direct(padded, count * C + P)[:, :T].mean(axis=1)
        np.testing.assert_allclose(row, expected, atol=1e-5)
    # Nothing has left the pool after two pieces.
    np.testing.assert_array_equal(nats[leaking][:2], nats["M+, stage 3"][:2])
    saved = report["saved_nats"]
    assert {*saved["MemoryLLM, stage 2"]} == {
        "told nothing",
        "backbone, told nothing",
        "backbone, full attention",
        "backbone, window of 252 tokens and 4 sinks",
        "backbone, the last 32 tokens read again",
        "MemoryLLM, stage 1",
    }
    # All bytes of what a model keeps, and a window that sees the whole text.
    np.testing.assert_allclose(window, everything, atol=1e-5)
    again = nats["backbone, the last 32 tokens read again"]
    np.testing.assert_allclose(again[:2], everything[:2], atol=1e-5)
    np.testing.assert_array_equal(again[2], again[1])
    kept = report["kept_bytes"]
    assert kept["M+, stage 3"]["host"] > 0 == kept["MemoryLLM, stage 2"]["host"]
    assert kept["backbone, the last 32 tokens read again"] == dict(device=0, host=128)
    assert kept["backbone, told nothing"] == dict(device=0, host=0)
    assert report["recipes"] == {}
    by_full = saved["M+, stage 3"]["backbone, full attention"][2]
    expected = (everything - nats["M+, stage 3"])[2].mean()
    assert by_full["mean"] == pytest.approx(expected)
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    assert "LEAKING" in capsys.readouterr().out


def test_models_share_one_backbone_and_others_are_refused(monkeypatch, tmp_path):
    again = add_mplus(
        LanguageModel(CONFIG, key=jax.random.key(0)), MEMORY, key=jax.random.key(5)
    )
    other = add_mplus(
        LanguageModel(CONFIG, key=jax.random.key(7)), MEMORY, key=jax.random.key(5)
    )
    models = dict(stage2=variants.without_store(tiny_memory()), stage3=again)
    trained(monkeypatch, models)
    load = lambda: scores.load({name: tmp_path for name in models}, "", tmp_path)
    found = load()
    assert found.trained["stage3"].backbone is found.backbone
    assert found.trained["stage2"].backbone is found.backbone
    models["stage3"] = other
    with pytest.raises(ValueError, match="stage3=.* must have the backbone and token"):
        load()
    config = perplexity_rows.Config()
    for name, model, kind in (
        ("stage1", tiny_memory(), r"MemoryLLM, got one with num_retrieved=8"),
        (
            "stage3",
            variants.without_store(tiny_memory()),
            r"M\+, got one with num_retrieved=0",
        ),
    ):
        given = scores.Models({name: model}, tiny_backbone(), BYTES)
        with pytest.raises(ValueError, match=f"{name} must be a folder of {kind}"):
            perplexity_rows.with_memory(config, given)


def test_settings_that_cannot_be_are_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"told": (1, 2)}, "told must rise from 0"),
        ({"told": (0, 2, 1)}, "told must rise from 0"),
        ({"texts": 3}, "texts must be a multiple of batch=4, got 3"),
        ({"scored": 0}, "scored must be at least 1, got 0"),
        ({"window": -1}, "window must be at least 0, got -1"),
        ({"references": ()}, "references must name at least one"),
        ({"again": -1}, "again must be at least 0, got -1"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            perplexity_rows.Config(**changes)
    with pytest.raises(ValueError, match="that of M. is 16, got 24"):
        perplexity_rows.chunk_size(
            perplexity_rows.Config(chunk=24), {"M+": tiny_memory()}
        )
    assert (
        perplexity_rows.chunk_size(perplexity_rows.Config(), {"M+": tiny_memory()}) == C
    )
