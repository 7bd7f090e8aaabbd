"""Is a model with a memory still as good on short texts, which need none?

    python -m experiments.mplus.short
    python -m experiments.mplus.short --model RUN

Short held-out texts are scored by the plain backbone, by M+ with an empty memory, and
by M+ with a memory full of other text (M+, section 4.6.1, which has the perplexity of
2,048 tokens of web pages). Besides, questions about the world are queried closed book:
is the right answer likelier than answers to other questions of the same kind? All
models score the same tokens. Differences from the backbone are paired, by text and by
question.

The memory is of documents of the validation split, the texts are of the test split. A
text's first tokens choose what is retrieved from the long-term store; they are not
scored.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from jaxtyping import Bool, Float32, Int32

from experiments.lab.results import RESULTS, settings, show, write_report
from experiments.mplus import scores
from experiments.mplus.recipe import recipe
from experiments.mplus.retention import methods
from experiments.mplus.retention.retention import wilson
from experiments.mplus.scores import Models
from memjax.checks import check_sizes
from memjax.data import (
    Question,
    Tokenizer,
    load_facts,
    load_tokens,
    pick_facts,
    read_questions,
)
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.evaluation.statistics import paired
from memjax.models import LanguageModel
from memjax.models.language_model.windowed import with_capacity
from memjax.models.mplus.build import mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus

BACKBONE = "backbone"


@dataclasses.dataclass(frozen=True)
class Config:
    """What is scored; the defaults take some 5 minutes with a trained model.

    Attributes:
        model: run folder of a trained M+ or MemoryLLM, beside which an untrained one of
            the same sizes is scored; none is the untrained one alone.
        backbone: "smollm2", "tiny", which is trained here in a minute or two, or what
            `memjax finetune` takes; a trained model's own counts.
        memory: sizes of the untrained one, unless there is a trained one.
        texts: scored, a multiple of `batch`.
        batch: texts or questions in a batch, each with its own memory.
        tokens: of a text.
        prompt: first tokens of a text, which are not scored.
        told: chunks injected into a full memory; 0 is as many as fill the pool and the
            memory tokens that are retrieved.
        questions: how many are queried, at most; 0 is none.
        choices: answers to choose from, the right one among them.
        facts: JSON lines with question, answer, kind and subject; none is those that
            ship, of the subjects that are not trained on.
        source: documents, as `memjax train` takes them.
        run_dir: where the tiny backbone is kept.
        seed: of untrained parameters, questions and choices.
        output: where .json goes, without the ending.
    """

    model: Path | None = None
    backbone: str = "smollm2"
    memory: MPlusConfig = scores.MEMORY
    texts: int = 48
    batch: int = 4
    tokens: int = 256
    prompt: int = 32
    told: int = 0
    questions: int = 64
    choices: int = 4
    facts: Path | None = None
    source: str = "embedded"
    run_dir: Path = Path("runs/hmt")
    seed: int = 0
    output: Path = RESULTS / "mplus" / "short"

    def __post_init__(self):
        check_sizes(texts=self.texts, batch=self.batch, prompt=self.prompt)
        for name in ("told", "questions", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} must be at least 0, got {getattr(self, name)}"
                )
        if self.texts % self.batch:
            raise ValueError(
                f"texts must be a multiple of batch={self.batch}, got {self.texts}"
            )
        if self.tokens <= self.prompt:
            raise ValueError(
                f"tokens must be more than prompt={self.prompt}, got {self.tokens}"
            )
        if self.choices < 2:
            raise ValueError(f"choices must be at least 2, got {self.choices}")


class Cloze(NamedTuple):
    """Questions with answers to choose from, the right one first.

    Attributes:
        facts: the R facts that are queried.
        tokens: [R, A, T] question and answer, 0 after its end.
        answer: [R, A, T] where the answer is.
        prompt: tokens of the shortest question.
    """

    facts: list[Question]
    tokens: Int32[np.ndarray, "R A T"]
    answer: Bool[np.ndarray, "R A T"]
    prompt: int


#: (tokens [B, T], P) -> nats of the tokens after the first P.
Losses = Callable[[Int32[np.ndarray, "B T"], int], Float32[np.ndarray, "B T_P"]]


def main(config: Config) -> None:
    """Scores every model, prints and writes."""
    given = {} if config.model is None else {"model": config.model}
    models = scores.load(given, config.backbone, config.run_dir)
    documents = load_tokens(config.source, models.tokenizer, "test")
    excerpts = scores.excerpts(documents, config.texts, config.tokens)
    texts = np.stack([excerpt.tokens for excerpt in excerpts])
    questions = cloze(config, models.tokenizer)
    rows: dict[str, dict[str, Any]] = {}
    for name, losses in readers(config, models, questions):
        began = time.monotonic()
        nats = [
            losses(texts[i : i + config.batch], config.prompt).mean(1, np.float64)
            for i in range(0, len(texts), config.batch)
        ]
        row: dict[str, Any] = {"nats_by_text": np.concatenate(nats)}
        if questions is not None:
            row |= choose(config, questions, losses)
        row["seconds"] = time.monotonic() - began
        rows[name] = row
        shown = math.exp(row["nats_by_text"].mean())
        print(f"{name}: {shown:.3f} ({row['seconds']:.0f} s)", flush=True)
    report(config, rows, sorted({excerpt.name for excerpt in excerpts}), questions)


def readers(
    config: Config, models: Models, questions: Cloze | None
) -> Iterator[tuple[str, Losses]]:
    """Everything that is scored, by name; the backbone first."""
    longest = max(config.tokens, 0 if questions is None else questions.tokens.shape[2])
    alone = with_capacity(models.backbone, longest)
    yield BACKBONE, read(alone, alone.init_state(config.batch))
    trained = models.trained.get("model")
    sizes = config.memory if trained is None else trained.config
    fresh = mplus(models.backbone, sizes, key=jax.random.key(config.seed))
    name = "M+" if sizes.retrieved else "MemoryLLM"
    num_chunks = config.told or -(-(sizes.pool + sizes.retrieved) // sizes.tokens)
    for model, note in ((trained, ""), (fresh, ", untrained")):
        if model is not None:
            model = scores.with_room(model, num_chunks * sizes.chunk)
            empty = model.init_state(config.batch)
            yield f"{name}{note}, empty memory", read(model, empty)
            full = inject(config, model, num_chunks, models.tokenizer)
            yield f"{name}{note}, full of other text", read(model, full)


def read(model: LanguageModel | MPlus, memory: Any) -> Losses:
    """Losses of texts that are all read with the same memory."""
    return functools.partial(scores.losses, model, memory)


def inject(config: Config, model: MPlus, num_chunks: int, tokenizer: Tokenizer) -> Any:
    """A memory of `num_chunks` chunks; batch elements have different documents."""
    method, chunk = methods.LatentMemory(model), model.config.chunk
    documents = load_tokens(config.source, tokenizer, "validation")
    excerpts = scores.excerpts(documents, config.batch, num_chunks * chunk)
    tokens = np.stack([excerpt.tokens for excerpt in excerpts])
    memory = method.start(config.batch)
    for start in range(0, num_chunks * chunk, chunk):
        memory = method.inject(memory, tokens[:, start : start + chunk])
    return memory


def cloze(config: Config, tokenizer: Tokenizer) -> Cloze | None:
    """Draws questions, and for each answers to questions of the same kind.

    Raises:
        ValueError: if no kind has as many answers as there are choices.
    """
    if not config.questions:
        return None
    if config.facts is None:
        facts = split_facts(load_facts(), seed=FACTS_SEED)[1]
    else:
        facts = read_questions(config.facts)
    # Answers that differ only in case are one answer.
    answers: dict[str, dict[str, str]] = {}
    for fact in facts:
        answers.setdefault(fact.kind, {}).setdefault(
            fact.answer.casefold(), fact.answer
        )
    enough = [fact for fact in facts if len(answers[fact.kind]) >= config.choices]
    picked = pick_facts(enough, seed=config.seed)[: config.questions]
    if not picked:
        raise ValueError(
            f"choices must be at most the answers of some kind of fact, "
            f"got {config.choices}"
        )
    rng = np.random.default_rng(config.seed)
    encoded, starts = [], []
    for fact in picked:
        own = fact.answer.casefold()
        others = [text for key, text in answers[fact.kind].items() if key != own]
        drawn = rng.choice(len(others), config.choices - 1, replace=False)
        question = tokenizer.encode(f"\n\n{fact.question}")
        starts.append(len(question))
        for answer in (fact.answer, *(others[i] for i in drawn)):
            encoded.append(np.concatenate([question, tokenizer.encode(f" {answer}")]))
    longest = max(map(len, encoded))
    tokens = np.zeros((len(encoded), longest), np.int32)
    for i, ids in enumerate(encoded):
        tokens[i, : len(ids)] = ids
    shape = (len(picked), config.choices, longest)
    positions = np.arange(longest)
    ends = np.asarray([len(ids) for ids in encoded]).reshape(shape[:2])
    first = np.asarray(starts)[:, None, None]
    answer = (positions >= first) & (positions < ends[:, :, None])
    return Cloze(picked, tokens.reshape(shape), answer, min(starts))


def choose(config: Config, questions: Cloze, losses: Losses) -> dict[str, Any]:
    """Which questions are answered right, by all of an answer and by its mean token."""
    count, choices, _ = questions.tokens.shape
    # The last batch is filled up with its last question, whose copies are dropped.
    order = np.minimum(np.arange(-(-count // config.batch) * config.batch), count - 1)
    nats = np.zeros((len(order), choices))
    answer = questions.answer[order][..., questions.prompt :]
    for start in range(0, len(order), config.batch):
        batch = slice(start, start + config.batch)
        for i in range(choices):
            found = losses(questions.tokens[order[batch], i], questions.prompt)
            nats[batch, i] = np.where(answer[batch, i], found, 0).sum(axis=1)
    nats, sizes = nats[:count], answer[:count].sum(axis=2)
    best = lambda x: x[:, 0] < x[:, 1:].min(axis=1)
    return {"right": best(nats), "right_by_mean": best(nats / sizes)}


def report(
    config: Config,
    rows: dict[str, dict[str, Any]],
    documents: Sequence[str],
    questions: Cloze | None,
) -> None:
    """Writes and prints."""
    base, found, table = rows[BACKBONE], {}, {}
    for name, row in rows.items():
        nats = row["nats_by_text"]
        lost = paired(nats, base["nats_by_text"])._asdict()
        result: dict[str, Any] = {
            "perplexity": math.exp(nats.mean()),
            "nats_lost": lost,
            "perplexity_change": math.expm1(lost["mean"]),
        }
        table[name] = [result["perplexity"], lost["mean"], lost["low"], lost["high"]]
        for measure in ("right", "right_by_mean"):
            if questions is not None:
                result[measure] = share(row[measure], base[measure])
                table[name].append(result[measure]["accuracy"])
        found[name] = result | {
            "nats_by_text": nats.tolist(),
            "seconds": row["seconds"],
        }
    question = "is a model with a memory still as good on short texts, which need none?"
    results = {
        "recipe": None if config.model is None else recipe(config.model),
        "documents": documents,
        "questions": 0 if questions is None else len(questions.facts),
        "chance": 1 / config.choices,
        "models": found,
    }
    write_report(config.output, question, settings(config), results)
    columns = ["perplexity", "nats lost", "low", "high"]
    if questions is not None:
        columns += ["right answers", "by mean token"]
    show(
        f"{config.texts} texts of {config.tokens} tokens; right by chance: "
        f"{1 / config.choices:.2f}",
        columns,
        table,
    )


def share(
    right: Bool[np.ndarray, " R"], base: Bool[np.ndarray, " R"]
) -> dict[str, Any]:
    """Share of right answers, with its interval, and what is lost against a base."""
    low, high = wilson(int(right.sum()), len(right))
    return {
        "accuracy": float(right.mean()),
        "low": low,
        "high": high,
        "lost": paired(base.astype(float), right.astype(float))._asdict(),
    }


if __name__ == "__main__":
    main(tyro.cli(Config))
