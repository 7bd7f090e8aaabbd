"""Questions about one of several contexts, many segments back.

    python -m experiments.hmt.questions --source folder:comparison

Question: does a memory answer questions about contexts that it has read? (HMT, Figure
5, which has PubMedQA.) An input has the contexts of several questions, and then one of
the questions: facts of the CIA World Factbook from templates, see
`memjax/data/factbook/README.md`.
Rows: HMT, RMT, and the backbone with a window of no less memory, fine-tuned on inputs
of two contexts; the same window without fine-tuning; the most frequent answer of the
question's kind in training.
Columns: exact answers by greedy decoding, and perplexity of the answer, by number of
contexts. Test subjects are not trained on. Inputs begin with tokens of another text, so
that no answer is where HMT reads ahead.
Not shown: other questions than templates; longer trainings.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import tyro

from experiments.hmt import training
from experiments.lab import backbones
from experiments.lab.baselines import equal_window
from experiments.lab.measure import state_bytes
from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    percent,
    settings,
    table,
    write_report,
)
from memjax import evaluation
from memjax.config_io import to_record
from memjax.data import (
    Question,
    QuestionInput,
    Tokenizer,
    align,
    load_facts,
    load_tokens,
    multi_context,
)
from memjax.models import LanguageModel
from memjax.models.base import Model
from memjax.models.language_model.windowed import limit_attention
from memjax.status import say
from memjax.training.finetune import finetune
from memjax.training.finetune.curricula import HMTStages

TEST_SHARE = 0.25
#: Contexts of an input in training and in each test; questions of a test.
TRAIN_CONTEXTS, TEST_CONTEXTS, TEST_ITEMS = 2, (1, 2, 4, 8), 96


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        source: documents, as `memjax train` takes them.
        backbone_steps: updates of the tiny backbone.
        seed: of new parameters and data order.
        run_dir: where models are stored.
        output: where .json goes, without the ending.
    """

    source: str = "embedded"
    backbone_steps: int = 4000
    seed: int = 0
    run_dir: Path = Path("runs/hmt")
    output: Path = RESULTS / "hmt" / "questions"


def hmt_stages() -> HMTStages:
    """HMT around a tiny backbone."""
    return training.hmt_stages("hmt-tiny", (60, 150), {"num_memories": 300}, {})


def main(config: Config) -> None:
    """Trains what is not trained yet, queries and writes."""
    run = backbones.tiny_run(config.source, config.backbone_steps, config.seed)
    path = backbones.tiny_backbone(run, config.run_dir)
    found = finetune.load_backbone(path)
    train, test = split(load_facts())
    test = test[:TEST_ITEMS]
    setting = training.Setting(path, hmt_stages(), config.source, config.run_dir)
    models = _models(setting, config.seed, found.model, found.tokenizer, train)
    memory = setting.stages.stage2.hmt
    segment, first = memory.segment_length, memory.summary
    preamble = load_tokens(config.source, found.tokenizer, "validation")[0].tokens
    tests = {}
    for contexts in TEST_CONTEXTS:
        inputs = multi_context(test, contexts, found.tokenizer)
        before = np.asarray(preamble[:segment])
        tests[contexts] = _query(models, align(inputs, segment, first, before), segment)
    results = {
        "training": to_record(setting.stages),
        "segment": segment,
        "answers_lie_from": first,
        "trained_items": len(train),
        "test_items": len(test),
        "majority_exact": {"all": majority_exact(train, test)},
        "models": {name: {"state_bytes": state_bytes(x)} for name, x in models.items()},
        "contexts": tests,
    }
    question = "are questions answered about contexts many segments back?"
    write_report(config.output, question, settings(config), results)


def split(items: Sequence[Question]) -> tuple[list[Question], list[Question]]:
    """Questions to train on and to test with, which share no subject.

    Subjects and questions are shuffled, always in the same way.
    """
    shuffled = [items[i] for i in np.random.PCG64(0).random_raw(len(items)).argsort()]
    subjects = list(dict.fromkeys(item.subject for item in shuffled))
    held_out = set(subjects[: round(TEST_SHARE * len(subjects))])
    train = [item for item in shuffled if item.subject not in held_out]
    test = [item for item in shuffled if item.subject in held_out]
    return train, test


def majority_exact(train: Sequence[Question], test: Sequence[Question]) -> float:
    """How often each kind's most frequent answer in training is right in the test."""
    answers: dict[str, Counter] = {}
    for item in train:
        answers.setdefault(item.kind, Counter())[item.answer] += 1
    most = {kind: found.most_common(1)[0][0] for kind, found in answers.items()}
    return float(np.mean([most.get(x.kind) == x.answer for x in test]))


def _models(
    setting: training.Setting,
    seed: int,
    backbone: LanguageModel,
    tokenizer: Tokenizer,
    train: list[Question],
) -> dict[str, Model]:
    """All models by name."""
    inputs = multi_context(train, TRAIN_CONTEXTS, tokenizer)
    stages = setting.stages
    # A sample holds a whole input, and so its last tokens are question and answer.
    longest = max(len(entry.tokens) for entry in inputs)
    depth = max(2, -(-longest // stages.stage2.hmt.segment_length))
    stages = dataclasses.replace(
        stages, stage2=dataclasses.replace(stages.stage2, depth=depth)
    )
    total = stages.stage2.context_length
    source = _training_source(setting, inputs, total + 1, tokenizer)
    setting = setting._replace(source=source)

    def trained(*stages):
        return training.load(training.train(setting, stages, seed)[0])

    hmt = trained(stages.stage1, stages.stage2)
    window = equal_window(backbone, state_bytes(hmt))
    # Samples must be whole, so the window is one that divides them, or all of them.
    wide = min(
        w for w in range(1, total + 1) if total % w == 0 and w >= min(window, total)
    )
    tuned = cast(
        LanguageModel, trained(training.baseline(stages, wide, memory="window"))
    )
    wide = max(wide, window)
    return {
        "HMT": hmt,
        "RMT": trained(training.rmt(stages)),
        "window of no less memory": limit_attention(tuned, wide),
        "the same, not fine-tuned": limit_attention(backbone, wide),
    }


def _training_source(
    setting: training.Setting,
    inputs: list[QuestionInput],
    length: int,
    tokenizer: Tokenizer,
) -> str:
    """The inputs as documents of a folder, each of `length` tokens: one sample.

    Documents of training stand in front of them.
    """
    before = load_tokens(setting.source, tokenizer, "train")[0].tokens
    texts = [_filled(entry, np.asarray(before), length, tokenizer) for entry in inputs]
    lines = [json.dumps({"text": text}) for text in texts if text is not None]
    say(f"{len(lines)} of {len(inputs)} inputs to train on, {length} tokens each")
    name = f"questions-{TRAIN_CONTEXTS}-{length}-{tokenizer.digest[:8]}"
    folder = setting.run_dir / name / "train"
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
    models: Mapping[str, Model], inputs: list[QuestionInput], segment: int
) -> dict[str, Any]:
    """Answers of every model: perplexity and exact ones."""
    found = {}
    for name, model in models.items():
        answers = evaluation.score_answers(
            model, inputs, tokens_per_call=training.TOGETHER * segment, batch_size=4
        )
        perplexity = evaluation.answer_perplexity(answers)
        row = {"perplexity": perplexity, "exact": float(answers.exact.mean())}
        found[name] = {"all": row}
        say(f"{name}: {row}")
    return {"models": found}


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
