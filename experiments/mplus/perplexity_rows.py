"""What `perplexity.py` scores: its settings, the memories, the backbone's rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from experiments.hmt import scores as hmt_scores
from experiments.lab.results import RESULTS
from experiments.mplus import adapters as tuning
from experiments.mplus import memories as methods
from experiments.mplus import scores
from experiments.mplus.retention import variants
from experiments.mplus.retention.rows import SINKS
from experiments.mplus.scores import Models
from memjax.checks import check_sizes
from memjax.data import Split
from memjax.models import LanguageModel
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus

Reference = Literal[
    "M+, untrained",
    "MemoryLLM, untrained",
    "told nothing",
    "full attention",
    "window",
    "re-read",
]
STAGES = {
    "stage1": "MemoryLLM, stage 1",
    "stage2": "MemoryLLM, stage 2",
    "stage3": "M+, stage 3",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is injected and scored; the defaults take some 10 minutes with three stages.

    Attributes:
        stage1: run folder of a MemoryLLM.
        stage2: of another.
        stage3: of an M+.
        references: what to put beside them; an untrained one has the parameters that
            training starts from.
        backbone: "smollm2", "tiny", which is trained here in a minute or two, or what
            `memjax finetune` takes; where there is a stage, its own counts.
        memory: sizes of the untrained ones, unless there is a stage 3.
        tuned: folder of `experiments.mplus.adapters`: the backbone's rows are
            there without its adapters and with them.
        told: numbers of chunks that are injected, rising from 0.
        chunk: tokens of a chunk, a multiple of the memories'; 0 is the longest of
            theirs.
        texts: scored, a multiple of `batch`.
        batch: texts side by side.
        prompt: tokens that are read before those that are scored.
        scored: tokens of each text.
        window: of the backbone, sinks included, in tokens; 0 is as many as have the
            bytes that M+ keeps of the longest text.
        again: tokens that are read again, a multiple of `chunk`; 0 is as many as M+
            sees memory tokens.
        source: documents, as `memjax train` takes them.
        split: which of them.
        run_dir: where the tiny backbone is kept.
        seed: of untrained parameters.
        output: where .json and .png go, without the ending.
    """

    stage1: Path | None = None
    stage2: Path | None = None
    stage3: Path | None = None
    references: tuple[Reference, ...] = (
        "M+, untrained",
        "told nothing",
        "full attention",
        "window",
        "re-read",
    )
    tuned: Path | None = None
    backbone: str = "smollm2"
    memory: MPlusConfig = scores.MEMORY
    told: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    chunk: int = 0
    texts: int = 8
    batch: int = 4
    prompt: int = 32
    scored: int = 224
    window: int = 0
    again: int = 0
    source: str = "embedded"
    split: Split = "test"
    run_dir: Path = Path("runs/hmt")
    seed: int = 0
    output: Path = RESULTS / "mplus" / "perplexity"

    def __post_init__(self):
        check_sizes(
            texts=self.texts, batch=self.batch, prompt=self.prompt, scored=self.scored
        )
        for name in ("chunk", "window", "again", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name} must be at least 0, got {getattr(self, name)}"
                )
        if self.texts % self.batch:
            raise ValueError(
                f"texts must be a multiple of batch={self.batch}, got {self.texts}"
            )
        if list(self.told) != sorted({0, *self.told}):
            raise ValueError(f"told must rise from 0, got {self.told}")
        if not self.references and not self.folders:
            raise ValueError("references must name at least one without a stage")

    @property
    def folders(self) -> dict[str, Path]:
        """The stages that are given."""
        given = {name: getattr(self, name) for name in STAGES}
        return {name: folder for name, folder in given.items() if folder is not None}


class Row(NamedTuple):
    """One row of the results: a model and how its memory is filled.

    Attributes:
        model: the model that is scored.
        method: how chunks are injected.
        leaks: whether it is scored in the leaking way as well.
        last: the most tokens that are injected; None is all.
        kept: bytes between tokens after the longest text, by device and host.
    """

    model: LanguageModel | MPlus
    method: Any
    leaks: bool = False
    last: int | None = None
    kept: variants.KeptBytes | None = None


def with_memory(config: Config, models: Models) -> dict[str, MPlus]:
    """The trained models, and untrained ones of the same sizes, by their names.

    Raises:
        ValueError: if a stage has a store that should have none, or none.
    """
    for name, model in models.trained.items():
        if bool(model.config.num_retrieved) != (name == "stage3"):
            raise ValueError(
                f"{name} must be a folder of "
                f"{'M+' if name == 'stage3' else 'MemoryLLM'}, got one with "
                f"num_retrieved={model.config.num_retrieved}"
            )
    found = {STAGES[name]: model for name, model in models.trained.items()}
    third = models.trained.get("stage3")
    memory = config.memory if third is None else third.config
    fresh = add_mplus(models.backbone, memory, key=jax.random.key(config.seed))
    if "M+, untrained" in config.references:
        found["M+, untrained"] = fresh
    if "MemoryLLM, untrained" in config.references:
        found["MemoryLLM, untrained"] = variants.without_store(fresh)
    return found


def chunk_size(config: Config, memories: Mapping[str, MPlus]) -> int:
    """Tokens of a chunk.

    Raises:
        ValueError: if a memory's chunks do not divide it.
    """
    sizes = {name: model.config.chunk_size for name, model in memories.items()}
    chunk = config.chunk or max(sizes.values(), default=config.memory.chunk_size)
    for name, size in sizes.items():
        if chunk % size:
            raise ValueError(
                f"chunk must be a multiple of every memory's, so that every token "
                f"is written; that of {name} is {size}, got {chunk}"
            )
    return chunk


def build(
    config: Config,
    backbone: LanguageModel,
    memories: Mapping[str, MPlus],
    chunk: int,
) -> dict[str, Row]:
    """Everything that is scored, by name."""
    longest = config.told[-1] * chunk
    rows = {}
    for name, model in memories.items():
        small = scores.with_room(model, longest)
        kept = variants.kept_bytes(small)
        memory = methods.LatentMemory(small)
        rows[name] = Row(small, memory, bool(model.config.num_retrieved), kept=kept)
    sized = [*memories.values()] or [
        add_mplus(backbone, config.memory, key=jax.random.key(config.seed))
    ]
    sizes = sizes_of(sized, longest)
    rows |= plain(config, backbone, sizes, chunk)
    if config.tuned is not None:
        adapted, _ = tuning.load(config.tuned, backbone)
        again = plain(config, adapted, sizes, chunk)
        rows |= {f"{name}, tuned": row for name, row in again.items()}
    return rows


class Sizes(NamedTuple):
    """What the backbone's rows are as large as.

    Attributes:
        rows: memory tokens that a read sees at most.
        kept: bytes that are kept of the longest text, on device and host.
    """

    rows: int
    kept: int


def sizes_of(memories: Sequence[MPlus], longest: int) -> Sizes:
    """The largest of the memories' sizes, for a text of so many tokens."""
    kept = [variants.kept_bytes(scores.with_room(x, longest)).total for x in memories]
    return Sizes(
        max(x.config.pool_size + x.config.num_retrieved for x in memories), max(kept)
    )


def plain(
    config: Config, backbone: LanguageModel, sizes: Sizes, chunk: int
) -> dict[str, Row]:
    """The backbone's rows.

    Raises:
        ValueError: if `again` is not a multiple of the chunk.
    """
    read, longest = config.prompt + config.scored, config.told[-1] * chunk
    whole = set_capacity(backbone, longest + read)
    rows = {}
    if "told nothing" in config.references:
        rows["backbone, told nothing"] = _reader(whole, chunk, 0)
    if "full attention" in config.references:
        rows["backbone, full attention"] = _reader(whole, chunk, longest)
    if "window" in config.references:
        size = config.window or hmt_scores.equal_window(backbone, sizes.kept)
        model = limit_attention(backbone, size - SINKS, SINKS)
        name = f"backbone, window of {size - SINKS:,} tokens and {SINKS} sinks"
        rows[name] = _reader(model, chunk, longest)
    if "re-read" in config.references:
        last = config.again or sizes.rows // chunk * chunk
        if last % chunk:
            raise ValueError(
                f"again must be a multiple of the chunk of {chunk} tokens, got {last}"
            )
        name = f"backbone, the last {last:,} tokens read again"
        # What is kept are the ids of those tokens.
        text = variants.KeptBytes(0, 4 * min(last, longest))
        rows[name] = _reader(whole, chunk, last)._replace(kept=text)
    return rows


def _reader(model: LanguageModel, chunk: int, last: int) -> Row:
    """A row that reads the last tokens before the prompt."""
    reader = methods.Reader(model, chunk)
    kept = reader.kept(last) if last else variants.KeptBytes(0, 0)
    return Row(model, reader, last=last, kept=kept)
