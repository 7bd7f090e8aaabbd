"""Knowledge retention: what is injected and queried, its score, every method once."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mplus.retention import (
    knowledge_retention,
    methods,
    models,
    recorded,
    retention,
    rows,
    text_methods,
    variants,
)
from experiments.mplus.retention.config import NAMES as METHODS
from experiments.mplus.retention.config import SCALES, Config, Plain
from experiments.mplus.retention.samples import make_samples, samples_of
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

    def __init__(self, tokens):
        self.tokens = tokens

    def kept(self, injected):
        return variants.KeptBytes(0, min(injected, self.tokens))

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


SIZES: dict[str, Any] = dict(samples=4, batch=2, num_chunks=3, chunk=C, seed=0)


def samples(**changes):
    return make_samples(FACTS, PASSAGES, BYTES, **SIZES | changes)


def marks(method, batches, after=(0, 1, 3), carry=False):
    """Of each of `after` a string, with a mark for each fact."""
    found = retention.query_batches(
        method, batches, BYTES, after=after, answer=N, carry=carry
    )
    return ["".join(parts) for parts in zip(*found, strict=True)]


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
    for pieces, expected in ((1, "200"), (2, "220"), (4, "222")):
        found = marks(Notes(pieces * C), samples())
        assert found == [mark * 4 for mark in expected]


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
        marks(method, samples(), after=(1,), carry=carry)
        assert method.started == starts and lengths == [{2 * C}, {last}]


def test_full_attention_is_not_asked_beyond_its_positions():
    longest = 2 * C + 60
    method = methods.Full(tiny_backbone(), C, longest, 60)
    memory = method.start(1)
    tokens = np.zeros((1, C), np.int32)
    sizes = []
    for read in (1, 2, 3):
        memory = (None, memory[1] + C) if read > 2 else (memory[0], memory[1] + C)
        sizes.append(method.kept(read * C).device)
    assert method.query(memory, tokens, N) is None
    # A slot a token, and never more than there is room for.
    assert sizes[0] < sizes[1] == sizes[2]

    class Short(Notes):
        def query(self, memory, prompt, count):
            known = len(memory[0]) <= 2 * C
            return super().query(memory, prompt, count) if known else None

    assert marks(Short(10_000), samples(), after=(1, 2)) == ["2222", "----"]
    shares = retention.right("2-1-0")
    found = retention.accuracy(shares)
    assert found["questions"] == 3 and found["accuracy"] == pytest.approx(2 / 3)
    nothing = retention.accuracy(retention.right("--"))
    assert nothing["questions"] == 0 and math.isnan(nothing["accuracy"])
    assert (nothing["low"], nothing["high"]) == (0, 1)
    assert retention.gain(shares, retention.right("-----"), list("abcde")) is None


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
    texts = [" 037.\n", "no 037", "037", " 37"]
    assert "".join(retention.mark("037", text) for text in texts) == "2120"


def test_a_gain_is_paired_by_fact_and_drawn_by_subject():
    ours, other = retention.right("221100"), retention.right("210000")
    each = retention.gain(ours, other, list("abcdef"))
    assert each is not None and each["mean"] == pytest.approx(2 / 6)
    # Both gains are of one subject: whether it is drawn is all that matters.
    one = retention.gain(ours, other, ["a", "b", "c", "c", "d", "e"])
    assert one is not None and one["mean"] == each["mean"]
    assert one["high"] - one["low"] > each["high"] - each["low"]
    # A draw in which no fact changes has no width.
    same = retention.gain(ours, ours, list("abcdef"))
    assert same == {"mean": 0, "low": 0, "high": 0}
    with pytest.raises(ValueError, match="must be of the same facts"):
        retention.gain(ours, other[:3], list("abcdef"))


def test_facts_of_one_subject_return_once_all_others_were_drawn():
    twice = [
        fact._replace(question=f"{q}{fact.question}") for fact in FACTS for q in "ab"
    ]
    with pytest.raises(ValueError, match="samples must be at most 10 of these"):
        make_samples(twice, PASSAGES, BYTES, **SIZES | {"samples": 12})
    batches = make_samples(
        twice, PASSAGES, BYTES, **SIZES | {"samples": 20}, apart=True
    )
    drawn = [fact for batch in batches for fact in batch.facts]
    assert set(drawn) == set(twice)
    assert len({fact.subject for fact in drawn[:10]}) == 10
    sizes = {name: SIZES[name] for name in ("batch", "num_chunks", "chunk", "seed")}
    for made, again in zip(
        batches, samples_of(drawn, PASSAGES, BYTES, **sizes), strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, made[1:], again[1:])
        assert made.facts == again.facts


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


@pytest.mark.slow
def test_the_program_goes_on_where_it_was(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(models, "load", lambda config: (tiny_memory(), BYTES, False))
    lines = [fact._asdict() for fact in FACTS]
    (tmp_path / "facts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = [{"text": passage.text} for group in PASSAGES for passage in group]
    (tmp_path / "passages.jsonl").write_text("\n".join(map(json.dumps, texts)))
    config = Config(
        methods=("M+", "closed book"),
        samples=4,
        until=2,
        batch=2,
        after=(0, 2),
        chunk=C,
        answer=N,
        facts=tmp_path / "facts.jsonl",
        passages=tmp_path / "passages.jsonl",
        output=tmp_path / "result",
    )
    knowledge_retention.main(config)
    read = lambda: json.loads((tmp_path / "result.json").read_text())
    first = read()
    assert first["distances"] == [0, 2 * C] and len(first["facts"]) == 4
    assert [len(row["marks"][1]) for row in first["rows"].values()] == [2, 2]
    queried = []
    answered = methods.LatentMemory.query
    monkeypatch.setattr(
        methods.LatentMemory,
        "query",
        lambda self, memory, prompt, count: (
            queried.append(1) or answered(self, memory, prompt, count)
        ),
    )
    whole = dataclasses.replace(config, until=0)
    knowledge_retention.main(whole)
    # The second batch alone, at two distances.
    assert len(queried) == 2
    result = read()
    assert list(result["rows"]) == ["M+", "closed book"]
    for name, row in result["rows"].items():
        assert [len(part) for part in row["marks"]] == [4, 4] and row["commits"]
        assert row["marks"][0].startswith(first["rows"][name]["marks"][0])
        assert not row["recipe"] and len(row["kept_bytes"]) == 2
    assert result["rows"]["M+"]["memory"]["store"] == MEMORY.store
    shown = recorded.by_method(result)
    assert shown["closed book"]["gain"][0]["mean"] == pytest.approx(
        shown["M+"]["after"][0]["accuracy"]
        - shown["closed book"]["after"][0]["accuracy"]
    )
    assert shown["M+"]["gain"] == [None, None]
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    assert "most frequent answer" in capsys.readouterr().out
    with pytest.raises(ValueError, match="answer=7 must be that of the rows in"):
        knowledge_retention.main(dataclasses.replace(whole, answer=7))
    with pytest.raises(ValueError, match="samples=2 must be the 4 of"):
        knowledge_retention.main(dataclasses.replace(whole, samples=2))


def test_books_are_cut_into_passages():
    first, books = models.passages(Config())
    assert len(first) == 282 and len(books) > 500
    assert all(passage.text and not passage.subject for passage in books)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"samples": -1}, "samples must be at least 0, got -1"),
        ({"after": (2, 1)}, r"after must rise from 0 or more, got \(2, 1\)"),
        ({"after": (-1, 1)}, "after must rise from 0 or more"),
        ({"until": 6}, "until must be a multiple of batch=4, got 6"),
        ({"methods": ("LRU",)}, "methods must be one of"),
        ({"methods": ("MemoryLLM",)}, "memoryllm must be the folder"),
        ({"methods": ("M+",), "tuned": Path("x")}, "with tuned adapters, got"),
        ({"split": "train"}, "split must be one of"),
    ],
)
def test_bad_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_methods_that_need_a_trained_model_wait_for_one():
    plain = get_args(Plain)
    assert Config().chosen == plain
    assert Config(tuned=Path("t"), model=Path("m")).chosen == plain
    trained = Config(model=Path("m"))
    assert trained.chosen[0] == "M+" and "MemoryLLM" not in trained.chosen
    both = Config(model=Path("m"), memoryllm=Path("n"))
    assert set(both.chosen) == set(METHODS)
