"""Knowledge retention: what is injected and queried, its score, every method once."""

import dataclasses
import functools
import json
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mplus.retention import (
    knowledge_retention,
    methods,
    retention,
    variants,
)
from experiments.mplus.retention.samples import make_samples
from memjax.data import Passage, Question, load_tokenizer
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.mplus.build import mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.training.finetune import finetune
from tests.tiny import drawn

BYTES = load_tokenizer("bytes")
C, N = 48, 6
NAMES = ["Arda", "Brys", "Coln", "Dorn", "Esse", "Fahl", "Gont", "Hyle", "Irth", "Juln"]
FACTS = [
    Question(
        f"The river of {name} is {i * 37:03}.",
        f"Question: Which? Answer: The river of {name} is",
        f"{i * 37:03}",
        f"kind {i % 2}",
        name,
    )
    for i, name in enumerate(NAMES)
]
# Of 42 tokens with what is between them; eight of the ten subjects have one.
PASSAGES = [[Passage(f"{name} " * 8) for name in NAMES[:8]], [Passage("z" * 400)]]
CONFIG = ModelConfig(
    mixers=(AttentionConfig(16, 2, 1, 8, capacity=400),),
    num_layers=1,
    vocab_size=256,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
MEMORY = MPlusConfig(
    tokens=8, pool=16, chunk=C, retrieved=8, store=64, key_dim=4, rank=2
)


@functools.cache
def tiny_backbone():
    return drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


@functools.cache
def tiny_memory():
    backbone = tiny_backbone()
    return drawn(lambda: mplus(backbone, MEMORY, key=jax.random.key(1)))


class Notes:
    """Answers from the last tokens injected, if the question's sentence is there."""

    longest = None

    def __init__(self, tokens):
        self.tokens = tokens

    def start(self, batch):
        return [""] * batch

    def inject(self, memory, tokens):
        rows = zip(memory, tokens, strict=True)
        return [(old + BYTES.decode(new))[-self.tokens :] for old, new in rows]

    def query(self, memory, prompt, count):
        answers = []
        for text, question in zip(memory, map(BYTES.decode, prompt), strict=True):
            sentence = question.split("Answer: ")[1]
            _, found, rest = text.partition(sentence)
            answers.append(rest[:count].ljust(count) if found else "?" * count)
        return np.stack([BYTES.encode(answer) for answer in answers])


def samples(**changes):
    sizes: dict[str, Any] = dict(samples=4, batch=2, num_chunks=3, chunk=C, seed=0)
    return make_samples(FACTS, PASSAGES, BYTES, **sizes | changes)


def inject_and_query(method, batches, after=(0, 1, 3), carry=False):
    run = retention.inject_and_query(
        method, batches, BYTES, after=after, answer=N, carry=carry
    )
    return list(run)


def test_samples_are_context_other_text_and_question():
    batches = samples()
    assert len(batches) == 2
    injected = [fact for batch in batches for fact in batch.facts]
    assert len(set(injected)) == 4
    for batch in batches:
        assert batch.context.shape == (2, C) and batch.chunks.shape == (3, 2, C)
        for row, fact in enumerate(batch.facts):
            assert BYTES.decode(batch.prompts[row]) == f"\n\n{fact.question}"
            context = BYTES.decode(batch.context[row])
            assert context.endswith(f"\n\n{fact.context}")
            other = BYTES.decode(batch.chunks[:, row].ravel())
            assert other.startswith("\n\n") and fact.subject not in other
            first = [part[0] for part in other.split("\n\n") if part]
            assert len(set(first)) == len(first) and "z" not in first
    firsts = {BYTES.decode(b.chunks[0, r])[2] for b in batches for r in range(2)}
    assert len(firsts) > 1
    same = samples()
    np.testing.assert_array_equal(same[1].chunks, batches[1].chunks)


@pytest.mark.parametrize("tokenizer", [BYTES, load_tokenizer("bpe4k")])
def test_samples_know_the_sentence_of_the_answer(tokenizer):
    said = "It is old. The pass of Yk is 3.5 km up! Few go there? Yes, 3.5 do."
    fact = Question(said, "The pass of Yk is", "3.5 km", "", "Yk")
    for context, expected in (
        (said, " The pass of Yk is 3.5 km up!"),
        ("The pass of Yk is 3.5 km", "The pass of Yk is 3.5 km"),
    ):
        facts = [fact._replace(context=context)]
        (batch,) = make_samples(
            facts,
            PASSAGES,
            tokenizer,
            samples=1,
            batch=1,
            num_chunks=1,
            chunk=90,
            seed=0,
        )
        begin, end = batch.answers[0]
        assert tokenizer.decode(batch.context[0, begin:end]).lstrip("\n") == expected
    with pytest.raises(ValueError, match="must hold '3.5 km', it does not"):
        make_samples(
            [fact._replace(context="Nobody knows.")],
            PASSAGES,
            tokenizer,
            samples=1,
            batch=1,
            num_chunks=1,
            chunk=90,
            seed=0,
        )


def test_the_second_group_of_passages_comes_behind_the_first():
    batch, *_ = samples(num_chunks=9)
    for row, fact in enumerate(batch.facts):
        text = BYTES.decode(batch.chunks[:, row].ravel())
        assert text.index("z") == (8 - (fact.subject in NAMES[:8])) * 42 + 2
        assert BYTES.decode(batch.context[row]).startswith("z")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 3}, "samples must be a positive multiple of batch=2, got 3"),
        ({"samples": 0}, "samples must be a positive multiple"),
        ({"samples": 12}, "samples must be at most 10 of these facts"),
        ({"chunk": 20}, "has 27 tokens; a chunk has 20"),
        ({"num_chunks": 20}, "passages must have .* inject fewer chunks"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        samples(**changes)


def test_batches_have_questions_of_one_length_and_lengths_can_be_few():
    facts = [
        fact._replace(question="?" * (i % 3 // 2) + fact.question)
        for i, fact in enumerate(FACTS)
    ]

    def lengths(samples, few):
        batches = make_samples(
            facts,
            PASSAGES,
            BYTES,
            samples=samples,
            batch=2,
            num_chunks=1,
            chunk=C,
            lengths=few,
            seed=0,
        )
        return {batch.prompts.shape[1] for batch in batches}

    assert lengths(8, 0) == {47, 48} and lengths(6, 1) == {47}
    with pytest.raises(ValueError, match="samples must be at most 6 of these"):
        lengths(8, 1)


def test_facts_known_without_context_are_not_queried():
    known, answers = NAMES[2:5], {fact.question: fact.answer for fact in FACTS}

    def answer(prompts):
        assert prompts.shape[0] == 2
        questions = [BYTES.decode(prompt)[2:] for prompt in prompts]
        knows = lambda question: any(name in question for name in known)
        return [f"It is {answers[q]}!" if knows(q) else "?" for q in questions]

    injected = [
        fact
        for batch in samples(samples=6, answer_closed_book=answer)
        for fact in batch.facts
    ]
    assert len(injected) == 6 and not {fact.subject for fact in injected} & set(known)
    assert {fact.subject for b in samples(samples=10) for fact in b.facts} > set(known)
    with pytest.raises(ValueError, match="samples must be at most 6 of these"):
        samples(samples=8, answer_closed_book=answer)


def test_a_method_that_remembers_the_last_pieces_is_right_as_far():
    for pieces, expected in ((1, [1, 0, 0]), (2, [1, 1, 0]), (4, [1, 1, 1])):
        results = inject_and_query(Notes(pieces * C), samples())
        assert len(results) == 4 * 3
        for after, share in zip((0, 1, 3), expected, strict=True):
            rows = [x for x in results if x.num_chunks == after]
            found = retention.accuracy(rows)
            assert found["accuracy"] == found["begins"] == share
            assert found["questions"] == 4


def test_memory_goes_on_between_samples_only_if_it_is_carried():
    class Counting(Notes):
        started = 0

        def start(self, batch):
            self.started += 1
            return super().start(batch)

        def query(self, memory, prompt, count):
            lengths.append({len(text) for text in memory})
            return super().query(memory, prompt, count)

    for carry, starts, last in ((False, 2, 2 * C), (True, 1, 4 * C)):
        lengths = []
        method = Counting(10_000)
        inject_and_query(method, samples(), after=(1,), carry=carry)
        assert method.started == starts and lengths == [{2 * C}, {last}]


def test_what_a_method_has_no_capacity_for_is_not_queried():
    class Short(Notes):
        longest = 2 * C + 47 + N

        def inject(self, memory, tokens):
            assert len(memory[0]) <= C
            return super().inject(memory, tokens)

    results = inject_and_query(Short(10_000), samples(), after=(1, 2))
    texts = {
        after: {x.text for x in results if x.num_chunks == after} for after in (1, 2)
    }
    assert None not in texts[1] and texts[2] == {None}
    empty = retention.accuracy([x for x in results if x.num_chunks == 2])
    assert empty["questions"] == 0 and math.isnan(empty["accuracy"])
    assert (empty["low"], empty["high"]) == (0, 1)


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_intervals_are_wilsons(hits, count, low, high):
    """Published values: Newcombe (1998), Table I, method 3, and its inverse."""
    found = retention.wilson(hits, count)
    np.testing.assert_allclose(found, (low, high), atol=5e-5)
    mirrored = retention.wilson(count - hits, count)
    np.testing.assert_allclose(mirrored, (1 - high, 1 - low), atol=5e-5)


def test_an_answer_counts_where_it_occurs():
    texts = [" 037.\n", "no 037", "037", " 37", None]
    results = [retention.QueryResult(FACTS[1], 0, text) for text in texts]
    found = retention.accuracy(results)
    assert found["questions"] == 4
    assert found["accuracy"] == 3 / 4 and found["begins"] == 2 / 4


def test_bm25_puts_the_best_pieces_in_front_in_their_order():
    method = methods.Retriever(tiny_backbone(), BYTES, C, 2)
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
    """Where all that was injected is seen, a window and SnapKV are full attention."""
    batches = samples(num_chunks=1)
    built = (
        methods.full(tiny_backbone(), C, 400),
        methods.window(tiny_backbone(), C, 400),
        methods.snapkv(tiny_backbone(), C, 250, 60),
        # The best two pieces of two are all of them.
        methods.bm25(tiny_backbone(), BYTES, C, 2 * C, 60),
    )
    answers = lambda method: [
        x.text for x in inject_and_query(method, batches, after=(1,))
    ]
    texts = [answers(method) for method in built]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    closed = methods.closed_book(tiny_backbone(), BYTES, 60)
    assert answers(closed) != texts[0]


@pytest.mark.slow
def test_m_plus_writes_what_is_injected_and_reads_the_question():
    batch, *_ = samples()
    method = methods.LatentMemory(tiny_memory())
    memory = method.inject(method.start(2), batch.context)
    assert memory.clock.tolist() == [MEMORY.tokens] * 2
    before = jax.tree.map(np.asarray, memory)
    found = method.query(memory, batch.prompts, N)
    assert found.shape == (2, N)
    first = jax.jit(tiny_memory().read)(memory, jnp.asarray(batch.prompts))[1][:, -1]
    np.testing.assert_array_equal(found[:, 0], first.argmax(axis=-1))
    jax.tree.map(np.testing.assert_array_equal, before, memory)


@pytest.mark.slow
@pytest.mark.parametrize("store", [MEMORY.store, 1024])
def test_memoryllm_is_as_large_on_the_device_without_a_store(store):
    model = variants.with_store(tiny_memory(), store)
    small = variants.without_store(model)
    assert small.config.retrieved == 0 and small.init_state(1).store is None
    size = variants.device_bytes(model)
    assert variants.device_bytes(small) >= size
    pool = small.config.pool - MEMORY.tokens
    less = mplus(
        tiny_backbone(),
        dataclasses.replace(small.config, pool=pool),
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
    assert large.config.retrieved == MEMORY.retrieved
    assert variants.with_store(tiny_memory(), retrieved=3).config.retrieved == 3
    store = jax.eval_shape(lambda: large.init_state(1)).store
    assert store.layers[0].rows.shape == (1, 96, 16) and tiny_memory().config == MEMORY
    with pytest.raises(ValueError, match="store=96 .* need a model with a store"):
        variants.with_store(variants.without_store(tiny_memory()), 96)


def test_every_method_can_be_built():
    config = knowledge_retention.Config(samples=4, batch=2, after=(0, 2), chunk=C)
    build = lambda name, config=config: knowledge_retention.build(
        name, config, tiny_memory(), BYTES, 3 * C, 60
    )
    names = knowledge_retention.Config.methods
    assert len(names) == 8
    longest = {name: build(name).longest for name in names}
    assert longest.pop("full") == 3 * C + 60 and set(longest.values()) == {None}
    carried = dataclasses.replace(config, carry=True)
    assert build("full", carried).longest == 6 * C + 60
    assert build("full", dataclasses.replace(carried, samples=8)).longest == 400


def test_fine_tuned_models_are_loaded(monkeypatch, tmp_path):
    stored = lambda name, model: (
        lambda folder: (
            SimpleNamespace(data=SimpleNamespace(tokenizer=name)),
            model,
        )
    )
    config = knowledge_retention.Config(model=tmp_path, memoryllm=tmp_path)
    monkeypatch.setattr(finetune, "load_model", stored("bytes", tiny_memory()))
    model, tokenizer, trained = knowledge_retention.load(config)
    assert model is tiny_memory() and trained and tokenizer.digest == BYTES.digest
    build = lambda: knowledge_retention.build(
        "MemoryLLM", config, tiny_memory(), BYTES, 1, 1
    )
    built = build()
    assert isinstance(built, methods.LatentMemory) and built.model is tiny_memory()
    monkeypatch.setattr(finetune, "load_model", stored("bpe4k", tiny_memory()))
    with pytest.raises(ValueError, match="memoryllm=.* must have the tokenizer"):
        build()
    monkeypatch.setattr(finetune, "load_model", stored("bytes", tiny_backbone()))
    with pytest.raises(ValueError, match="model=.* must be a fine-tuned M"):
        knowledge_retention.load(config)


def test_a_backbone_gets_an_untrained_memory(monkeypatch):
    found = SimpleNamespace(model=tiny_backbone(), tokenizer=BYTES)
    monkeypatch.setattr(finetune, "load_backbone", lambda path: found)
    config = knowledge_retention.Config(backbone="somewhere")
    model, _, trained = knowledge_retention.load(config)
    assert not trained
    assert model.config == knowledge_retention.SCALES["cpu"].memory


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.slow
def test_the_program_says_how_it_scored(known, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        knowledge_retention, "load", lambda config: (tiny_memory(), BYTES, False)
    )
    lines = [fact._asdict() for fact in FACTS]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = [{"text": passage.text} for group in PASSAGES for passage in group]
    (tmp_path / "passages.jsonl").write_text("\n".join(map(json.dumps, texts)))
    config = knowledge_retention.Config(
        methods=("M+", "MemoryLLM", "closed book"),
        samples=4,
        batch=2,
        after=(0, 2),
        chunk=C,
        answer=N,
        window=3 * C,
        known=known,
        facts=tmp_path / "facts.jsonl",
        passages=tmp_path / "passages.jsonl",
        output=tmp_path / "result",
    )
    knowledge_retention.main(config)
    report = json.loads((tmp_path / "result.json").read_text())
    assert report["distances"] == [0, 2 * C] and not report["trained"]
    assert (
        list(report["methods"]) == [*config.methods]
        and report["window_tokens"] == 3 * C
    )
    for result in report["methods"].values():
        for row in result["after"].values():
            assert row["questions"] == 4 and 0 <= row["low"] <= row["high"] <= 1
        kinds = [row["0"]["questions"] for row in result["by_kind"].values()]
        assert sum(kinds) == 4
    assert set(report["majority_exact"]) >= {"all"} and report["command"]
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    assert "most frequent answer" in capsys.readouterr().out


def test_books_are_cut_into_passages():
    first, books = knowledge_retention.passages(knowledge_retention.Config())
    assert len(first) == 282 and len(books) > 500
    assert all(passage.text and not passage.subject for passage in books)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"samples": -1}, "samples must be at least 0, got -1"),
        ({"after": (2, 1)}, r"after must rise from 0 or more, got \(2, 1\)"),
        ({"after": (-1, 1)}, "after must rise from 0 or more"),
        ({"methods": ()}, "methods must name at least one"),
    ],
)
def test_bad_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        knowledge_retention.Config(**options)
