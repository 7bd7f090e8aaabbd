"""What M+ costs and what it retrieves: counted otherwise, and both programs whole."""

import dataclasses
import functools
import json
import math
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.hmt import common
from experiments.mplus import retrieval, retrieval_quality
from experiments.mplus.memories import LatentMemory, Reader
from experiments.mplus.retention.variants import without_store
from experiments.mplus.samples import make_samples
from experiments.mplus.speed import cost, cost_programs, operations
from memjax.data import Passage, Question, load_tokenizer
from memjax.data.documents.tokenizer import JsonTokenizer
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.checkpoints.checkpoint import save_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions, read_closed
from tests.tiny import drawn

BYTES = load_tokenizer("bytes")
C, K = 48, 8
CONFIG = ModelConfig(
    mechanisms=(AttentionConfig(16, 2, 1, 8, capacity=400),),
    num_layers=2,
    vocab_size=256,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
MEMORY = MPlusConfig(
    num_memory_tokens=K,
    pool_size=16,
    chunk_size=C,
    num_retrieved=8,
    store_size=32,
    key_dim=4,
    rank=2,
)


@functools.cache
def tiny_backbone():
    return drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


@functools.cache
def tiny_memory():
    backbone = tiny_backbone()
    return drawn(lambda: add_mplus(backbone, MEMORY, key=jax.random.key(1)))


FACTS = [
    Question(f"River {i} is {i * 37:03}.", f"River {i} is", f"{i * 37:03}", "", f"r{i}")
    for i in range(6)
]
PASSAGES = [[Passage(letter * 90) for letter in "abcdefgh"]]


def samples(pieces):
    sizes: dict[str, Any] = dict(samples=4, batch=2, num_chunks=pieces, chunk=C, seed=0)
    return make_samples(FACTS, PASSAGES, BYTES, **sizes)


@pytest.mark.slow
def test_rows_of_the_context_are_found_by_their_values():
    """The count goes by birth; here by what `compress` made of the context."""
    batch, after = samples(6)[0], (0, 2, 4, 6)
    found = retrieval.inject_and_count(tiny_memory(), batch, after)
    method = LatentMemory(tiny_memory())
    compress = jax.jit(tiny_memory().compress)
    model = tiny_memory()
    whole = ReadOptions(prompt_length=batch.prompts.shape[1])
    choose = jax.jit(lambda *given: model.trace_read(*given, whole)[1].chosen)
    made = np.asarray(compress(method.start(2), jnp.asarray(batch.context)))
    state, seen = method.start(2), 0
    for count, piece in enumerate([batch.context, *batch.chunks]):
        state = method.inject(state, piece)
        if count not in after:
            continue
        places = np.asarray(choose(state, jnp.asarray(batch.prompts)))
        for row in range(2):
            held = int(state.store.num_valid[row])
            assert found[count].held[row] == held == min(max(0, count - 1) * K, 32)
            for layer in range(2):
                own = {vector.tobytes() for vector in made[row, layer]}
                among = lambda rows, own=own: sum(
                    np.asarray(x).tobytes() in own for x in rows
                )
                stored = state.store.layers[layer].rows[row, :held]
                chosen = [i for i in places[layer, row] if i < held]
                counts = (
                    among(state.pool[row, layer]),
                    among(stored),
                    among(np.asarray(stored)[chosen]) if held else 0,
                )
                ours = (part[row, layer] for part in found[count][:3])
                assert counts == tuple(int(x) for x in ours)
                seen += counts[2]
    assert (found[0].pool == K).all() and (found[0].store == 0).all()
    assert seen > 0 and (found[4].store > found[4].retrieved).any()
    # The oldest rows have left the full store.
    assert (found[6].store < found[4].store).any()


@pytest.mark.slow
def test_rows_of_the_answer_are_those_of_its_tokens():
    """A chunk's last tokens have a row each, in the order of the tokens."""
    batch, model = samples(6)[0], tiny_memory()
    for begin, end, rows in ((C - K, C, 8), (C - 3, C, 3), (0, C - K, 0), (41, 44, 3)):
        placed = batch._replace(answers=np.array([[begin, end]] * 2))
        found = retrieval.inject_and_count(model, placed, (5,))[5]
        assert (found.store == K).any() and (found.answer_store <= rows).all()
        full = found.store == K
        assert (found.answer_store[full] == rows).all()
        assert (found.answer_retrieved <= found.retrieved).all()
        if rows == K:
            np.testing.assert_array_equal(found.answer_retrieved, found.retrieved)


def test_shares_are_of_the_rows_in_the_store():
    found = [
        retrieval.Found(
            pool=jnp.array([[4, 2]]),
            store=jnp.array([[4, 6]]),
            retrieved=jnp.array([[2, 1]]),
            answer_store=jnp.array([[1, 3]]),
            answer_retrieved=jnp.array([[1, 1]]),
            held=jnp.array([16]),
        ),
        retrieval.Found(
            pool=jnp.array([[8, 8]]),
            store=jnp.zeros((1, 2), int),
            retrieved=jnp.zeros((1, 2), int),
            answer_store=jnp.zeros((1, 2), int),
            answer_retrieved=jnp.zeros((1, 2), int),
            held=jnp.array([0]),
        ),
    ]
    row = retrieval.summary(MEMORY, C, found)
    assert row["share"] == 0.3 and row["share_by_layer"] == [0.5, 1 / 6]
    # Half of the store is retrieved.
    assert row["share_random"] == 0.5 and row["times_random"] == 0.6
    assert row["share_best"] == 1.0 and row["rows_at_best"] == 2.5
    assert row["rows_made"] == K and row["still_known"] == 1.0
    answer = row["answer"]
    assert answer["share"] == 0.5 and answer["times_random"] == 1.0
    assert answer["share_by_layer"] == [1.0, 1 / 3]
    assert row["facts_with_rows"] == answer["facts_with_rows"] == 1
    assert row["read"] == (4 + 2 + 2 + 1 + 16) / 4 / K
    assert math.isnan(row["standard_error"])
    none = retrieval.summary(MEMORY, C, found[1:])
    assert math.isnan(none["share"]) and none["rows_retrieved"] == 0


@pytest.mark.slow
def test_untrained_retrievers_find_what_chance_does():
    shares, memory = [], tiny_memory()
    for seed in range(12):
        model = drawn(lambda: memory, seed)
        found = retrieval.inject_and_count(model, samples(5)[0], (5,))[5]
        assert (found.retrieved <= found.store).all()
        shares.append(found)
    row = retrieval.summary(MEMORY, C, shares)
    # 8 of 32 rows; 24 facts, whose layers draw apart.
    assert row["share_random"] == 0.25
    assert abs(row["share"] - 0.25) < 4 * row["standard_error"]


@pytest.mark.slow
def test_retrieval_quality_runs_whole(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        common, "load_backbone", lambda config: (tiny_backbone(), BYTES)
    )
    scale = retrieval_quality.Scale(MEMORY, 4, (0, 2, 4))
    monkeypatch.setitem(retrieval_quality.SCALES, "cpu", scale)
    lines = [fact._asdict() for fact in FACTS]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = [{"text": passage.text} for passage in PASSAGES[0]]
    (tmp_path / "passages.jsonl").write_text("\n".join(map(json.dumps, texts)))
    config = retrieval_quality.Config(
        backbone="tiny",
        batch=2,
        chunk=C,
        facts=tmp_path / "facts.jsonl",
        passages=tmp_path / "passages.jsonl",
        output=tmp_path / "result",
    )
    retrieval_quality.main(config)
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["trained"] is False and report["distances"] == [0, 2 * C, 4 * C]
    assert [row["facts"] for row in report["after"].values()] == [4] * 3
    assert report["after"]["0"]["rows_in_pool"] == K
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    assert "untrained retriever" in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_be_followed_is_refused(monkeypatch, tmp_path):
    check = retrieval_quality.check
    with pytest.raises(ValueError, match="chunk must be a multiple of the memory's 48"):
        check(retrieval_quality.Config(chunk=50), tiny_memory())
    with pytest.raises(ValueError, match=r"M\+ with a retriever .* num_retrieved=0"):
        check(retrieval_quality.Config(chunk=C), without_store(tiny_memory()))
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        retrieval_quality.Config(batch=0)
    with pytest.raises(ValueError):
        retrieval_quality.load(retrieval_quality.Config(model=tmp_path))


@pytest.mark.slow
def test_an_exported_model_is_loaded(tmp_path):
    folder = tmp_path / "exported"
    tokenizer = load_tokenizer("bpe4k")
    assert isinstance(tokenizer, JsonTokenizer)
    save_mplus(tiny_memory(), folder, TextInterface(tokenizer))
    config = retrieval_quality.Config(model=folder)
    model, found, trained = retrieval_quality.load(config)
    assert trained and model.config == MEMORY and found.digest == tokenizer.digest


# Wide, so that matrices are nearly all that counts.
WIDE = ModelConfig(
    mechanisms=(AttentionConfig(128, 4, 2, 32, capacity=128),),
    num_layers=2,
    vocab_size=300,
    model_dim=128,
    hidden_dim=256,
    dtype="float32",
    remat=False,
)
TWO = MPlusConfig(
    num_memory_tokens=16,
    pool_size=32,
    chunk_size=32,
    num_retrieved=16,
    store_size=64,
    key_dim=32,
    rank=4,
)


def _counted(function, config, tokens) -> float:
    """Operations of a program of M+ and its state, as XLA counts them; none is run."""
    model = nnx.eval_shape(
        lambda: add_mplus(
            LanguageModel(WIDE, key=jax.random.key(0)), config, key=jax.random.key(1)
        )
    )
    graph, params = nnx.split(model)
    run = jax.jit(lambda params, *rest: function(nnx.merge(graph, params), *rest))
    state = jax.eval_shape(lambda: model.init_state(1))
    analysis: Any = run.lower(params, state, tokens).compile().cost_analysis()
    return analysis["flops"]


@pytest.mark.parametrize("stored", ["output", "input"])
@pytest.mark.slow
def test_the_formula_of_writing_counts_what_xla_counts(stored):
    memory = dataclasses.replace(TWO, stored=stored)
    tokens = jax.ShapeDtypeStruct((1, TWO.chunk_size), jnp.int32)

    def write(model, state, tokens):
        return model.update(state, model.compress(state, tokens))

    # XLA's attention multiplies what a token may not see, too.
    found = _counted(write, memory, tokens)
    assert found == pytest.approx(
        operations.inject(WIDE, memory, TWO.chunk_size), rel=0.1
    )


@pytest.mark.slow
def test_formulas_of_reading_count_what_xla_counts():
    tokens = jax.ShapeDtypeStruct((1, TWO.chunk_size), jnp.int32)
    x = jax.ShapeDtypeStruct((1, 64, 128), jnp.float32)

    def read(model, state, tokens):
        features = read_closed(model.weights, state, tokens, ReadOptions())[1]
        return model.logits(features[:, -1])

    found = _counted(read, TWO, tokens)
    assert found == pytest.approx(
        operations.read(WIDE, TWO, TWO.chunk_size, 1), rel=0.1
    )
    found = _counted(lambda model, _, x: model.backbone.encode(x), TWO, x)
    assert found == pytest.approx(operations.text(WIDE, 0, 64), rel=0.1)


def test_reads_by_attention_are_not_counted():
    attention = dataclasses.replace(TWO, retrieval="attention")
    with pytest.raises(ValueError, match="must be .learned., got .attention."):
        operations.read(WIDE, attention, 4, 1)


@pytest.mark.parametrize(("before", "tokens"), [(0, 3), (2, 9), (7, 4)])
@pytest.mark.parametrize("window", [None, 5])
def test_attention_is_counted_pair_by_pair(before, tokens, window):
    pairs = sum(
        1
        for query in range(before, before + tokens)
        for key in range(query + 1)
        if window is None or query - key < window
    )
    dense = operations.text(WIDE, 0, tokens, 1) - 4 * 2 * 128 * tokens
    found = operations.text(WIDE, before, tokens, window) - dense
    assert found == 4 * 2 * 128 * pairs


def test_answers_are_decode():
    """A prompt and all but the last drawn token, and logits of each drawn one."""
    one, three = (operations.answer(WIDE, 10, 4, drawn) for drawn in (1, 3))
    head = 2 * 128 * 300
    assert one == operations.text(WIDE, 10, 4) + head
    assert three - one == operations.text(WIDE, 14, 2) + 2 * head


KINDS = get_args(cost.Kind)
COST = cost.Scale(MEMORY, (C, 3 * C), C)
# With a head of its own, which does not draw the token that was read last again.
SHALLOW = dataclasses.replace(CONFIG, num_layers=1, tied_head=False)


@pytest.fixture(name="config")
def _cost(monkeypatch, tmp_path):
    monkeypatch.setitem(cost.SCALES, "tiny", COST)
    monkeypatch.setattr(cost.Config, "backbone", SHALLOW)
    return cost.Config(chunk=C, prompt=4, answer=2, repeats=1, output=tmp_path / "cost")


@pytest.mark.slow
def test_cost_runs_whole(config, capsys):
    # Of the others, each a program of its own, the parts are tested below.
    kinds = ("M+ (offload)", "full attention")
    cost.main(dataclasses.replace(config, kinds=kinds))
    report = json.loads((config.output.parent / "cost.json").read_text())
    assert tuple(report["models"]) == kinds
    for kind, rows in report["models"].items():
        assert [row["length"] for row in rows] == [C, 3 * C]
        for row in rows:
            if kind == "full attention" and row["length"] > C:
                assert "seconds" not in row
                continue
            assert row["seconds"]["query"] > 0 and row["seconds"]["inject"] > 0
            assert row["temporary_bytes"]["inject"] > 0
            host = row["place_bytes"].get("pinned_host", 0)
            parts = row["state_bytes"]
            assert sum(row["place_bytes"].values()) == parts["total"]
            pool = 4 * MEMORY.pool_size * 16
            offloaded = parts["store_rows"] + pool if "M+" in kind else 0
            assert host == offloaded
        first, last = (row["state_bytes"]["total"] for row in rows)
        assert (last > first) == (kind == "full attention")
        inject = [row["operations"]["inject"] for row in rows]
        assert inject[1] >= 3 * inject[0]
    assert (config.output.parent / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert "nan" in capsys.readouterr().out


def test_the_parts_of_the_state_are_its_bytes(config):
    rows = {kind: cost.describe(config, kind, C) for kind in KINDS}
    for offload in ("M+, all on the device", "M+ (offload)"):
        assert rows[offload] == rows["M+"]
    parts = rows["M+"]["state_bytes"]
    layers, width = 1, 16
    assert parts["pool"] == 4 * layers * MEMORY.pool_size * (width + 1)
    assert parts["store_rows"] == 4 * layers * MEMORY.store_size * width
    assert parts["store_keys"] == 4 * layers * MEMORY.store_size * MEMORY.key_dim
    slots = MEMORY.prefix + C
    assert parts["reading"] == 2 * 4 * layers * slots * 8 + slots + 3 * 4
    assert sum(parts.values()) == 2 * parts["total"]
    assert rows["MemoryLLM"]["state_bytes"]["store_rows"] == 0
    assert rows["M+"]["parameter_bytes"] > rows["full attention"]["parameter_bytes"]
    # As much as M+ needs on the device, and not more than a token too many.
    window = rows["sliding window"]["state_bytes"]["total"]
    assert 0 <= window - (parts["total"] - parts["store_rows"]) < 2 * 4 * layers * 8 + 9


@pytest.mark.slow
def test_both_ways_to_draw_agree(config):
    """The compiled program gives what the public generation gives."""
    prompt = jnp.arange(4, dtype=jnp.int32)[None]
    injected = jnp.arange(C, dtype=jnp.int32)[None]
    start = lambda model: jax.jit(lambda: model.init_state(1))()
    model = cost.build_backbone(config, "full attention", C)
    programs = cost_programs.compile_programs(
        model, cost_programs.BACKBONE, start(model), C, 4, config.answer
    )
    params = nnx.split(model)[1]
    state = programs.inject(params, start(model), injected)
    drawn = programs.query(params, state, prompt)[1]
    method = Reader(model, C)
    memory = method.inject(method.start(1), np.asarray(injected))
    found = method.query(memory, np.asarray(prompt), config.answer)
    np.testing.assert_array_equal(drawn, found)
    assert found[0, 0] != found[0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 0}, "prompt must be at least 1, got 0"),
        ({"kinds": ()}, "kinds must name at least one"),
        ({"chunk": 100}, "chunk must be a multiple of the chunk of 128, got 100"),
        ({"lengths": (4096, 2048)}, "lengths must rise"),
        ({"lengths": (1000,)}, "in multiples of chunk=512"),
    ],
)
def test_bad_costs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        cost.Config(**options)
