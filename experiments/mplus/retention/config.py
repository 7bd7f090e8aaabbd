"""What knowledge retention tests: methods, facts, distances."""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from experiments.lab.results import RESULTS
from memjax.checks import check_sizes, require_known
from memjax.models.mplus.config import MPlusConfig
from memjax.training.finetune.mplus_presets import presets
from memjax.training.finetune.mplus_stage import MPlusStage

#: Methods with M+'s memory.
Memory = Literal["M+", "M+ (attention)", "MemoryLLM", "M+'s weights without the store"]
#: Methods of the backbone; "device" and "all" say which of M+'s bytes they have.
Plain = Literal[
    "full attention",
    "window, device",
    "window, all",
    "re-read, device",
    "SnapKV, device",
    "SnapKV, all",
    "BM25",
    "closed book",
]
Name = Memory | Plain
NAMES: tuple[Name, ...] = (*get_args(Memory), *get_args(Plain))
Preset = Literal["cpu", "paper"]
FactSplit = Literal["test", "validation"]


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
    "cpu": Scale(trained_sizes("mplus-smollm2-135m"), 96, (0, 4, 8, 16)),
    "paper": Scale(trained_sizes("mplus-paper"), 100, tuple(range(313))),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is tested, and how.

    Attributes:
        preset: "cpu" takes about an hour a method on a core; "paper" has the paper's
            sizes, 160k tokens after each of 100 facts.
        methods: those to test; none is all that the folders given allow. Those that
            the result file has already are not tested again.
        backbone: "smollm2", or what `memjax finetune` takes as a backbone.
        model: folder of a fine-tuned M+, whose backbone counts then; none is an
            untrained M+ of the preset's sizes.
        store: memory tokens in the store; 0 keeps the model's number.
        retrieved: memory tokens that a read takes from it; 0 likewise.
        retriever: a file of `experiments.mplus.retriever`; none leaves the model's own.
        memoryllm: folder of a fine-tuned MemoryLLM on the same backbone.
        tuned: folder of `experiments.mplus.adapters`, whose adapters the
            backbone's methods have; their rows are beside those without.
        samples: facts to query, a multiple of `batch`; 0 is the preset's.
        until: ask only the first so many of them, a multiple of `batch`, and leave the
            rest to another call; 0 is all.
        batch: facts side by side.
        lengths: of questions: facts are those whose questions have one of the so many
            most frequent, as programs are compiled for each; 0 is all.
        after: query after these numbers of chunks, rising; none is the preset's.
        chunk: tokens of a chunk; contexts must fit.
        answer: tokens that are generated.
        found: chunks that BM25 puts in front of the question.
        carry: whether memory is kept from sample to sample.
        known: whether to query facts, too, that the backbone answers closed book.
        split: "test", facts of the subjects that are not trained on; "validation" is
            of the others, to choose settings by.
        facts: JSON lines with context, question, answer, kind and subject; none is
            those that ship.
        passages: JSON lines with text and subject, injected between a fact and its
            question; none is those that ship, followed by the embedded books.
        seed: of the draws, and of an untrained M+.
        output: where .json and .png go, without the ending.
    """

    preset: Preset = "cpu"
    methods: tuple[Name, ...] = ()
    backbone: str = "smollm2"
    model: Path | None = None
    store: int = 0
    retrieved: int = 0
    retriever: Path | None = None
    memoryllm: Path | None = None
    tuned: Path | None = None
    samples: int = 0
    until: int = 0
    batch: int = 4
    lengths: int = 4
    after: tuple[int, ...] = ()
    chunk: int = 512
    answer: int = 10
    found: int = 1
    carry: bool = False
    known: bool = False
    split: FactSplit = "test"
    facts: Path | None = None
    passages: Path | None = None
    seed: int = 0
    output: Path = RESULTS / "mplus" / "retention"

    def __post_init__(self):
        check_sizes(
            batch=self.batch, chunk=self.chunk, answer=self.answer, found=self.found
        )
        require_known("split", self.split, get_args(FactSplit))
        for name in ("samples", "until", "store", "retrieved", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} must be at least 0, got {getattr(self, name)}"
                )
        if (
            list(self.after) != sorted(set(self.after))
            or min(self.after, default=0) < 0
        ):
            raise ValueError(f"after must rise from 0 or more, got {self.after}")
        if self.until % self.batch:
            raise ValueError(
                f"until must be a multiple of batch={self.batch}, got {self.until}"
            )
        for name in self.methods:
            require_known("methods", name, NAMES)
        if "MemoryLLM" in self.methods and self.memoryllm is None:
            raise ValueError(
                "memoryllm must be the folder of a MemoryLLM that was trained itself, "
                'got None; "M+\'s weights without the store" needs none'
            )
        if self.tuned is not None and set(self.chosen) & set(get_args(Memory)):
            raise ValueError(
                f"methods must be of {get_args(Plain)} with tuned adapters, "
                f"got {self.chosen}"
            )

    @property
    def chosen(self) -> tuple[Name, ...]:
        """The methods to test."""
        if self.methods:
            return self.methods
        # A backbone with adapters is asked alone, beside rows that are there.
        with_memory = self.model is not None and self.tuned is None
        named = [name for name in get_args(Memory) if with_memory]
        if self.memoryllm is None and with_memory:
            named.remove("MemoryLLM")
        return (*named, *get_args(Plain))

    @property
    def scale(self) -> Scale:
        """The preset with the changes of the options."""
        scale = SCALES[self.preset]
        return Scale(
            scale.memory, self.samples or scale.samples, self.after or scale.after
        )
