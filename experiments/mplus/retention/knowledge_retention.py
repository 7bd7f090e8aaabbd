"""What does a model still know that was injected many tokens ago?

    python -m experiments.mplus.retention.knowledge_retention

A fact of the CIA World Factbook is injected inside its context, then chunks of other
text. After certain numbers of chunks the model is queried (M+, Figures 3, 5, 8 and 9;
the authors have SQuAD and NaturalQA). An answer is right if it occurs in ten tokens of
greedy decoding. M+, with its retriever or with attention in its place, and MemoryLLM
are compared with the same backbone: with full attention, with a window or a cache of
SnapKV of as much memory on the device, with the passages that BM25 finds, and closed
book. Each fact has an answer and a country of its own, and the other text names
neither.

With `--carry` the memory is kept from sample to sample, as in the published programs.
"""

import dataclasses
import functools
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import tyro

from experiments.common import pretrained
from experiments.common.results import RESULTS, settings, show, write_report
from experiments.hmt import qa, scores
from experiments.mplus import retriever
from experiments.mplus.retention import methods, retention, variants
from experiments.mplus.retention.samples import book_passages, make_samples
from memjax.checks import check_sizes
from memjax.data import (
    Passage,
    Question,
    Tokenizer,
    load_facts,
    load_passages,
    load_tokenizer,
    read_passages,
    read_questions,
)
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.evaluation import plots
from memjax.evaluation.drawing import source_of
from memjax.models.mplus.build import mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_presets import presets
from memjax.training.finetune.mplus_stage import MPlusStage

Name = Literal[
    "M+",
    "M+ (attention)",
    "MemoryLLM",
    "full",
    "window",
    "SnapKV",
    "BM25",
    "closed book",
]
Preset = Literal["cpu", "paper"]


class Scale(NamedTuple):
    """How a preset tests.

    Attributes:
        memory: sizes of M+, for a backbone without a trained one.
        samples: facts.
        after: query after these numbers of chunks.
    """

    memory: MPlusConfig
    samples: int
    after: tuple[int, ...]


def trained_sizes(preset: str) -> MPlusConfig:
    """Of the memory that the last stage of a preset of `memjax finetune` trains."""
    stage = presets()[f"{preset}-stage3"]
    assert isinstance(stage, MPlusStage)
    return stage.memory


SCALES: dict[Preset, Scale] = {
    "cpu": Scale(trained_sizes("mplus-smollm2-135m"), 16, (0, 4, 8, 16)),
    "paper": Scale(trained_sizes("mplus-paper"), 100, tuple(range(313))),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is tested, and how.

    Attributes:
        preset: "cpu" takes some half an hour on two cores; "paper" has the paper's
            sizes, 160k tokens after each of 100 facts.
        methods: those to test.
        backbone: "smollm2", or what `memjax finetune` takes as a backbone.
        model: folder of a fine-tuned M+, whose backbone counts then; none is an
            untrained M+ of the preset's sizes.
        store: memory tokens in the store; 0 keeps the model's number.
        retrieved: memory tokens that a read takes from it; 0 likewise.
        retriever: a file of `experiments.mplus.retriever`; none leaves the model's own.
        memoryllm: folder of a fine-tuned MemoryLLM on the same backbone; none is M+
            without its store, whose pool is as large as both on the device.
        samples: facts to query, a multiple of `batch`; 0 is the preset's.
        batch: facts side by side.
        lengths: of questions: facts are those whose questions have one of the so many
            most frequent, as programs are compiled for each; 0 is all.
        after: query after these numbers of chunks, rising; none is the preset's.
        chunk: tokens of a chunk; contexts must fit.
        answer: tokens that are generated.
        window: tokens of the window, of SnapKV's cache with the chunk that it reads,
            and of the chunks that BM25 finds; 0 is as much memory as M+ has on the
            device, as far as the backbone's positions go.
        carry: whether memory is kept from sample to sample.
        known: whether to query facts, too, that the backbone answers closed book.
        facts: JSON lines with context, question, answer, kind and subject; none is
            those that ship, of the subjects that are not trained on.
        passages: JSON lines with text and subject, injected between a fact and its
            question; none is those that ship, followed by the embedded books.
        seed: of the draws, and of an untrained M+.
        output: where .json and .png go, without the ending.
    """

    preset: Preset = "cpu"
    methods: tuple[Name, ...] = get_args(Name)
    backbone: str = "smollm2"
    model: Path | None = None
    store: int = 0
    retrieved: int = 0
    retriever: Path | None = None
    memoryllm: Path | None = None
    samples: int = 0
    batch: int = 4
    lengths: int = 4
    after: tuple[int, ...] = ()
    chunk: int = 512
    answer: int = 10
    window: int = 0
    carry: bool = False
    known: bool = False
    facts: Path | None = None
    passages: Path | None = None
    seed: int = 0
    output: Path = RESULTS / "mplus" / "retention"

    def __post_init__(self):
        check_sizes(batch=self.batch, chunk=self.chunk, answer=self.answer)
        for name in ("samples", "store", "retrieved", "window", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} must be at least 0, got {getattr(self, name)}"
                )
        if (
            list(self.after) != sorted(set(self.after))
            or min(self.after, default=0) < 0
        ):
            raise ValueError(f"after must rise from 0 or more, got {self.after}")
        if not self.methods:
            raise ValueError("methods must name at least one, got none")

    @property
    def scale(self) -> Scale:
        """The preset with the changes of the options."""
        scale = SCALES[self.preset]
        return Scale(
            scale.memory, self.samples or scale.samples, self.after or scale.after
        )


def main(config: Config) -> None:
    """Tests every method, prints, draws and writes."""
    model, tokenizer, trained = load(config)
    model = with_options(config, model)
    scale = config.scale
    facts = facts_of(config)
    prompts = [tokenizer.encode(f"\n\n{fact.question}") for fact in facts]
    longest = max(map(len, prompts)) + config.answer
    answer_closed_book = None
    if not config.known:
        closed_book = methods.closed_book(model.backbone, tokenizer, longest)
        answer_closed_book = functools.partial(
            retention.closed_book_answers, closed_book, tokenizer, config.answer
        )
    batches = make_samples(
        facts,
        passages(config),
        tokenizer,
        samples=scale.samples,
        batch=config.batch,
        num_chunks=scale.after[-1],
        chunk=config.chunk,
        lengths=config.lengths,
        seed=config.seed,
        answer_closed_book=answer_closed_book,
    )
    window = config.window or scores.equal_window(
        model.backbone, variants.device_bytes(model)
    )
    if not config.window and model.backbone.config.capacity is not None:
        window = min(window, model.backbone.config.capacity)
    results = {}
    for name in config.methods:
        method = build(name, config, model, tokenizer, window, longest)
        began = time.monotonic()
        answers = list(
            retention.inject_and_query(
                method,
                batches,
                tokenizer,
                after=scale.after,
                answer=config.answer,
                carry=config.carry,
            )
        )
        results[name] = retention.summary(answers, scale.after)
        results[name]["seconds"] = time.monotonic() - began
        curve = [f"{row['accuracy']:.2f}" for row in results[name]["after"].values()]
        print(f"{name}: {' '.join(curve)}", flush=True)
    injected = [fact for batch in batches for fact in batch.facts]
    rest = [fact for fact in facts if fact not in set(injected)]
    report(config, results, window, trained, qa.majority_exact(rest, injected), model)


def load(config: Config) -> tuple[MPlus, Tokenizer, bool]:
    """M+ with its backbone and tokenizer, and whether it has been trained."""
    if config.model is not None:
        return *load_trained("model", config.model), True
    if config.backbone == "smollm2":
        path = pretrained.smollm2()
    else:
        path = Path(config.backbone)
    found = finetune.load_backbone(path)
    memory = SCALES[config.preset].memory
    model = mplus(found.model, memory, key=jax.random.key(config.seed))
    return model, found.tokenizer, False


def load_trained(name: str, folder: Path) -> tuple[MPlus, Tokenizer]:
    """A fine-tuned M+ or MemoryLLM and its tokenizer; `name` is the option's."""
    described, model = finetune.load_model(folder)
    if not isinstance(model, MPlus):
        raise ValueError(
            f"{name}={str(folder)!r} must be a fine-tuned M+ or MemoryLLM, "
            f"got {type(model).__name__}"
        )
    return model, load_tokenizer(described.data.tokenizer)


def with_options(config: Config, model: MPlus) -> MPlus:
    """The model with the store, the reads and the retriever of the options."""
    if config.store or config.retrieved:
        model = variants.with_store(model, config.store, config.retrieved)
    if config.retriever is not None:
        model = retriever.read(model, config.retriever)
    return model


def facts_of(config: Config) -> list[Question]:
    """The facts to query; M+ may have been trained on those of the other subjects."""
    if config.facts is not None:
        return read_questions(config.facts)
    return split_facts(load_facts(), seed=FACTS_SEED)[1]


def passages(config: Config) -> list[list[Passage]]:
    """Text to inject, in groups: the first is used up before the next."""
    if config.passages is not None:
        return [read_passages(config.passages)]
    return [load_passages(), book_passages()]


def build(
    name: Name,
    config: Config,
    model: MPlus,
    tokenizer: Tokenizer,
    window: int,
    question: int,
) -> retention.Method:
    """One method.

    Args:
        name: which.
        config: of the program.
        model: M+, whose backbone all share.
        tokenizer: of the backbone.
        window: tokens of memory.
        question: tokens of question and answer, at most.
    """
    backbone, chunk = model.backbone, config.chunk
    match name:
        case "M+":
            return methods.LatentMemory(model)
        case "M+ (attention)":
            return methods.LatentMemory(variants.with_attention_retrieval(model))
        case "MemoryLLM":
            if config.memoryllm is None:
                return methods.LatentMemory(variants.without_store(model))
            other, its_own = load_trained("memoryllm", config.memoryllm)
            if its_own.digest != tokenizer.digest:
                raise ValueError(
                    f"memoryllm={str(config.memoryllm)!r} must have the tokenizer of "
                    "the others, it has another"
                )
            return methods.LatentMemory(other)
        case "full":
            injected = (config.scale.after[-1] + 1) * chunk
            if config.carry:
                injected *= config.scale.samples // config.batch
            return methods.full(backbone, chunk, injected + question)
        case "window":
            return methods.window(backbone, chunk, window)
        case "SnapKV":
            return methods.snapkv(backbone, chunk, window, question)
        case "BM25":
            return methods.bm25(backbone, tokenizer, chunk, window, question)
        case "closed book":
            return methods.closed_book(backbone, tokenizer, question)


def report(
    config: Config,
    results: dict[str, Any],
    window: int,
    trained: bool,
    majority: dict[str, float],
    model: MPlus,
) -> None:
    """Writes, draws and prints."""
    after = config.scale.after
    distances = [count * config.chunk for count in after]
    question = "what does a model still know that was injected many tokens ago?"
    contents = {
        "trained": trained,
        "memory": dataclasses.asdict(model.config),
        "device_bytes": variants.device_bytes(model),
        "window_tokens": window,
        "distances": distances,
        "majority_exact": majority,
        "methods": results,
    }
    result = write_report(config.output, question, settings(config), contents)
    plot(result, Path(f"{config.output}.png"))
    curves = accuracies(results)
    rows = {name: [point[0] for point in curve] for name, curve in curves.items()}
    rows["most frequent answer"] = [majority["all"]] * len(distances)
    show("Right answers after so many tokens", [f"{d:,}" for d in distances], rows)


def accuracies(methods: dict[str, Any]) -> dict[str, list[tuple[float, float, float]]]:
    """Share of right answers and both ends of its interval, one a distance."""
    return {
        name: [
            (row["accuracy"], row["low"], row["high"])
            for row in result["after"].values()
        ]
        for name, result in methods.items()
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws the right answers of a result against the distance."""
    config, methods = result["config"], result["methods"]
    carried = ", memory carried on" if config["carry"] else ""
    plots.accuracy_by_distance(
        accuracies(methods),
        result["distances"],
        path,
        title=f"Facts still known, {config['samples']} of them{carried}",
        source=source_of(result),
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
