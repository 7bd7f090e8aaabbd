"""Are questions answered whose answer lies many contexts back?

    python -m experiments.hmt.questions

An input has the contexts of several questions one after another, and then one of the
questions (HMT, Figure 5, which has PubMedQA). Any source of (context, question, answer)
will do. Here they are facts of the CIA World Factbook, made from templates: see
`memjax/data/factbook/README.md`. HMT, RMT and the backbone with a window of no less
memory are fine-tuned on inputs of a few contexts, and tested on other countries, with
as many contexts and more.

The answer is scored: perplexity of its tokens, and whether greedy decoding gives all of
them. Inputs begin with some tokens of another text, so that no answer lies where HMT
reads ahead; all models read the same. For comparison the file has the share of
questions whose answer is the most frequent one of its kind in training.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

from experiments.hmt import common, scores
from experiments.lab.results import RESULTS, show
from memjax import evaluation
from memjax.data import (
    Question,
    QuestionInput,
    Tokenizer,
    align,
    load_tokens,
    multi_context,
    read_questions,
)
from memjax.data.tasks.facts import FACTBOOK
from memjax.models import LanguageModel
from memjax.models.language_model.windowed import limit_attention

TEST_SHARE = 0.25
WINDOW = "window of no less memory"


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """See `common.Config`.

    Attributes:
        questions: JSON lines with context, question, answer, and kind and subject.
        train_contexts: contexts of an input in training.
        test_contexts: contexts of an input, one test each.
        test_items: questions in each test, at most.
    """

    questions: Path = FACTBOOK / "factbook_qa.jsonl.xz"
    train_contexts: int = 2
    test_contexts: tuple[int, ...] = (1, 2, 4, 8)
    test_items: int = 96
    preset: common.Preset = "cpu-short"
    output: Path = RESULTS / "hmt" / "questions"

    def __post_init__(self):
        super().__post_init__()
        sizes = (self.train_contexts, self.test_items, *self.test_contexts)
        if min(sizes) < 1 or not self.test_contexts:
            raise ValueError(
                "train_contexts, test_contexts and test_items must be at least 1, got "
                f"{self.train_contexts}, {self.test_contexts} and {self.test_items}"
            )


def main(config: Config) -> None:
    """Trains what is not trained yet, queries, prints and writes."""
    backbone, tokenizer = common.load_backbone(config)
    train, test = split(read_questions(config.questions))
    test = test[: config.test_items]
    models = _models(config, backbone, tokenizer, train)
    memory = config.scale.stages.stage2.hmt
    preamble = load_tokens(config.source, tokenizer, "validation")[0].tokens
    tests = {}
    for contexts in config.test_contexts:
        inputs = align(
            multi_context(test, contexts, tokenizer),
            memory.segment_length,
            memory.summary,
            np.asarray(preamble[: memory.segment_length]),
        )
        tests[contexts] = _query(models, inputs, memory.segment_length)
    majority = majority_exact(train, test)
    common.write(
        config,
        "are questions answered whose answer lies many contexts back?",
        segment=memory.segment_length,
        answers_lie_from=memory.summary,
        trained_items=len(train),
        test_items=len(test),
        majority_exact=majority,
        models={
            name: {"state_bytes": scores.state_bytes(model), "training_seconds": spent}
            for name, (model, spent) in models.items()
        },
        contexts=tests,
    )
    _show(tests, majority)


def split(items: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Questions to train on and to test with, which share no subject.

    Subjects and questions are shuffled, always in the same way.
    """
    shuffled = [items[i] for i in np.random.PCG64(0).random_raw(len(items)).argsort()]
    subjects = list(dict.fromkeys(item.subject for item in shuffled))
    held_out = set(subjects[: max(1, round(TEST_SHARE * len(subjects)))])
    train = [item for item in shuffled if item.subject not in held_out]
    test = [item for item in shuffled if item.subject in held_out]
    if not train:
        raise ValueError("questions must have two subjects, to train and to test")
    return train, test


def majority_exact(
    train: Sequence[Question], test: Sequence[Question]
) -> dict[str, float]:
    """How often each kind's most frequent answer in training is right in the test."""
    most = {
        kind: Counter(x.answer for x in train if x.kind == kind).most_common(1)
        for kind in dict.fromkeys(item.kind for item in test)
    }
    right = [(x.kind, [x.answer] == [a for a, _ in most[x.kind]]) for x in test]
    kinds = {kind: [r for k, r in right if k == kind] for kind in most}
    shares = {kind: float(np.mean(values)) for kind, values in sorted(kinds.items())}
    return {"all": float(np.mean([r for _, r in right]))} | shares


def _models(
    config: Config,
    backbone: LanguageModel,
    tokenizer: Tokenizer,
    train: list[Question],
) -> dict:
    """Every model by name, with the seconds of its training."""
    inputs = multi_context(train, config.train_contexts, tokenizer)
    stages = config.scale.stages
    # A sample holds a whole input, and so its last tokens are question and answer.
    longest = max(len(entry.tokens) for entry in inputs)
    depth = max(2, -(-longest // stages.stage2.hmt.segment_length))
    stage2 = dataclasses.replace(stages.stage2, depth=depth)
    stages = dataclasses.replace(stages, stage2=stage2)
    source = _training_source(config, inputs, stage2.context_length + 1, tokenizer)
    trained_on = common.fine_tuned_on(config, source)
    hmt = common.train_hmt(trained_on, stages)
    window = scores.equal_window(backbone, scores.state_bytes(hmt.model))
    # Samples must be whole, so the window is one that divides them, or all of them.
    total = stage2.context_length
    wide = min(
        w for w in range(1, total + 1) if total % w == 0 and w >= min(window, total)
    )
    trained = common.train_window(trained_on, stages, wide)
    wide = max(wide, window)
    return {
        "HMT": hmt,
        "RMT": common.train_recurrent(trained_on, stages, sensory=0),
        WINDOW: trained._replace(model=limit_attention(_plain(trained), wide)),
        "the same, not fine-tuned": (limit_attention(backbone, wide), 0.0),
    }


def _plain(trained: common.Trained) -> LanguageModel:
    assert isinstance(trained.model, LanguageModel)
    return trained.model


def _training_source(
    config: Config, inputs: list[QuestionInput], length: int, tokenizer: Tokenizer
) -> str:
    """The inputs as documents of a folder, each of `length` tokens: one sample.

    Documents of training stand in front of them.
    """
    before = load_tokens(config.source, tokenizer, "train")[0].tokens
    texts = [_filled(entry, np.asarray(before), length, tokenizer) for entry in inputs]
    kept = [json.dumps({"text": text}) for text in texts if text is not None]
    print(f"{len(kept)} of {len(inputs)} inputs to train on, {length} tokens each")
    name = f"questions-{config.train_contexts}-{length}-{config.questions.stem}"
    folder = config.run_dir / f"{name}-{tokenizer.digest[:8]}" / "train"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "questions.jsonl").write_text("\n".join(kept) + "\n", "utf-8")
    return f"folder:{folder.parent}"


def _filled(
    entry: QuestionInput, before: np.ndarray, length: int, tokenizer: Tokenizer
) -> str | None:
    """The input's text after so much other text that it has `length` tokens.

    None if there is no such text: where two texts meet, tokens may join.
    """
    text = tokenizer.decode(entry.tokens)
    missing = length - len(entry.tokens)
    for count in (missing, missing - 1, missing + 1, missing - 2):
        if count >= 0:
            whole = (tokenizer.decode(before[:count]) if count else "") + text
            if len(tokenizer.encode(whole)) == length:
                return whole
    return None


def _query(models: dict, inputs: list[QuestionInput], segment: int) -> dict:
    """Answers of every model: perplexity and exact ones, by kind."""
    kinds = ["all", *sorted({entry.item.kind for entry in inputs})]
    rows = {
        kind: [i for i, x in enumerate(inputs) if kind in ("all", x.item.kind)]
        for kind in kinds
    }
    found = {}
    for name, (model, _) in models.items():
        answers = evaluation.score_answers(
            model, inputs, segment=scores.TOGETHER * segment, batch_size=4
        )
        found[name] = {
            kind: {
                "questions": len(which),
                "perplexity": evaluation.answer_perplexity(answers, which),
                "exact": float(answers.exact[which].mean()),
            }
            for kind, which in rows.items()
        }
    lengths = [len(entry.tokens) for entry in inputs]
    return {"mean_tokens": float(np.mean(lengths)), "models": found}


def _show(tests: dict, majority: dict[str, float]) -> None:
    columns = [f"{contexts} contexts" for contexts in tests]
    names = list(next(iter(tests.values()))["models"])
    for measure in ("perplexity", "exact"):
        value = lambda test, name, m=measure: test["models"][name]["all"][m]
        rows = {name: [value(test, name) for test in tests.values()] for name in names}
        if measure == "exact":
            rows["most frequent answer"] = [majority["all"]] * len(tests)
        show(f"Answers: {measure}", columns, rows)
    last = [*tests.values()][-1]["models"]
    show(
        f"Exact answers by kind, {columns[-1]}",
        [*names, "most frequent"],
        {
            kind: [*(last[name][kind]["exact"] for name in names), majority[kind]]
            for kind in last[names[0]]
        },
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
