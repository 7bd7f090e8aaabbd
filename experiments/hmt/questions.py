"""Questions about one of several contexts, many segments back.

    python -m experiments.hmt.questions

Question: does a memory answer questions about contexts that it has read? (HMT, Figure
5, which has PubMedQA.) An input has the contexts of several questions, and then one of
the questions: facts of the CIA World Factbook from templates, see
`memjax/data/factbook/README.md`; others by `--questions`.
Rows: HMT, RMT, and the backbone with a window of no less memory, fine-tuned on inputs
of a few contexts; the same window without fine-tuning; the most frequent answer of the
question's kind in training.
Columns: exact answers by greedy decoding, and perplexity of the answer, by number of
contexts. Test subjects are not trained on. Inputs begin with tokens of another text, so
that no answer is where HMT reads ahead.
Not shown: other questions than templates; longer trainings.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import tyro

from experiments.hmt import training
from experiments.lab.baselines import equal_window
from experiments.lab.measure import state_bytes
from experiments.lab.results import RESULTS, Rows, number, percent, show, table
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
from memjax.models.base import Model
from memjax.models.language_model.windowed import limit_attention

TEST_SHARE = 0.25


class Answering(NamedTuple):
    """A model and the seconds of its training."""

    model: Model
    seconds: float


@dataclasses.dataclass(frozen=True)
class Config(training.Config):
    """See `training.Config`.

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
    preset: training.Preset = "cpu-short"
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
    backbone, tokenizer = training.load_backbone(config)
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
    training.write(
        config,
        "are questions answered about contexts many segments back?",
        segment=memory.segment_length,
        answers_lie_from=memory.summary,
        trained_items=len(train),
        test_items=len(test),
        majority_exact=majority,
        models={
            name: {
                "state_bytes": state_bytes(one.model),
                "training_seconds": one.seconds,
            }
            for name, one in models.items()
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
) -> dict[str, Answering]:
    """All models by name, trained with the first seed."""
    inputs = multi_context(train, config.train_contexts, tokenizer)
    stages = config.scale.stages
    # A sample holds a whole input, and so its last tokens are question and answer.
    longest = max(len(entry.tokens) for entry in inputs)
    depth = max(2, -(-longest // stages.stage2.hmt.segment_length))
    stage2 = dataclasses.replace(stages.stage2, depth=depth)
    stages = dataclasses.replace(stages, stage2=stage2)
    total = stage2.context_length
    source = _training_source(config, inputs, total + 1, tokenizer)

    def trained(*stages):
        folder, seconds = training.train(config, stages, config.seeds[0], source=source)
        return Answering(training.load(folder), seconds)

    hmt = trained(stages.stage1, stages.stage2)
    window = equal_window(backbone, state_bytes(hmt.model))
    # Samples must be whole, so the window is one that divides them, or all of them.
    wide = min(
        w for w in range(1, total + 1) if total % w == 0 and w >= min(window, total)
    )
    tuned = trained(training.window_stage(stages, wide))
    wide = max(wide, window)
    return {
        "HMT": hmt,
        "RMT": trained(training.recurrent_stage(stages)),
        "window of no less memory": tuned._replace(
            model=limit_attention(cast(LanguageModel, tuned.model), wide)
        ),
        "the same, not fine-tuned": Answering(limit_attention(backbone, wide), 0.0),
    }


def _training_source(
    config: Config, inputs: list[QuestionInput], length: int, tokenizer: Tokenizer
) -> str:
    """The inputs as documents of a folder, each of `length` tokens: one sample.

    Documents of training stand in front of them.
    """
    before = load_tokens(config.source, tokenizer, "train")[0].tokens
    texts = [_filled(entry, np.asarray(before), length, tokenizer) for entry in inputs]
    lines = [json.dumps({"text": text}) for text in texts if text is not None]
    print(f"{len(lines)} of {len(inputs)} inputs to train on, {length} tokens each")
    name = f"questions-{config.train_contexts}-{length}-{config.questions.stem}"
    folder = config.run_dir / f"{name}-{tokenizer.digest[:8]}" / "train"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
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


def _query(
    models: dict[str, Answering], inputs: list[QuestionInput], segment: int
) -> dict[str, Any]:
    """Answers of every model: perplexity and exact ones, by kind."""
    kinds = ["all", *sorted({entry.item.kind for entry in inputs})]
    rows = {
        kind: [i for i, x in enumerate(inputs) if kind in ("all", x.item.kind)]
        for kind in kinds
    }
    found = {}
    for name, one in models.items():
        answers = evaluation.score_answers(
            one.model, inputs, segment=training.TOGETHER * segment, batch_size=4
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


def _show(tests: dict[int, Any], majority: dict[str, float]) -> None:
    columns = [f"{contexts} contexts" for contexts in tests]
    names = list(next(iter(tests.values()))["models"])
    for measure in ("perplexity", "exact"):
        rows = {
            name: [test["models"][name]["all"][measure] for test in tests.values()]
            for name in names
        }
        if measure == "exact":
            rows["most frequent answer"] = [majority["all"]] * len(tests)
        show(f"Answers: {measure}", columns, rows)


@table("hmt/questions")
def questions(result: dict[str, Any]) -> Rows:
    """Exact answers and perplexity of answers, by number of contexts."""
    guess = percent(result["majority_exact"]["all"])
    frequent = {"": "most frequent answer of its kind"}
    for name in result["models"]:
        exact, perplexity = {}, {}
        for contexts, by in result["contexts"].items():
            found = by["models"][name]["all"]
            exact[f"right, {contexts} contexts"] = percent(found["exact"])
            perplexity[f"PPL of the answer, {contexts}"] = number(
                found["perplexity"], 1
            )
        yield {"": name} | exact | perplexity
        frequent |= dict.fromkeys(exact, guess)
    yield frequent


if __name__ == "__main__":
    main(tyro.cli(Config))
