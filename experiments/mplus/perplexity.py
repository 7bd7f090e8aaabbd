"""Does a text's memory lower the perplexity of what follows, and after which training?

    python -m experiments.mplus.perplexity
    python -m experiments.mplus.perplexity --stage1 RUN/stage1 --stage2 RUN/stage2 \\
        --stage3 RUN/stage3

From each held-out document the chunks before a certain position are injected: none, a
few or many. Then a short prompt is read with that memory, and the tokens after it are
scored. The scored tokens are the same however much was injected (M+, Figure 4, which
compares its three stages of training). Beside the trained models stand the untrained
M+, the backbone without any context, and the backbone with a window of as many tokens
as M+ sees memory tokens and tokens.

The prompt chooses the rows of the long-term store. In the published program the scored
tokens take part in the choice; that variant is reported too, as "LEAKING".

Gains are paired by text, against the same model without anything injected.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from jaxtyping import Float64

from experiments.common.results import RESULTS, settings, show, write_report
from experiments.mplus import scores
from experiments.mplus.retention import methods, variants
from experiments.mplus.scores import Excerpt, Models
from memjax.checks import check_sizes
from memjax.data import Split, load_tokens
from memjax.evaluation.drawing import source_of
from memjax.evaluation.statistics import paired
from memjax.models import LanguageModel
from memjax.models.language_model.windowed import with_capacity
from memjax.models.mplus.build import mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus

Reference = Literal["M+, untrained", "MemoryLLM, untrained", "backbone", "window"]
STAGES = {
    "stage1": "MemoryLLM, stage 1",
    "stage2": "MemoryLLM, stage 2",
    "stage3": "M+, stage 3",
}
LEAKING = "LEAKING: scored tokens choose"


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
        told: numbers of chunks that are injected, rising from 0.
        chunk: tokens of a chunk, a multiple of the memories'; 0 is the longest of
            theirs.
        texts: scored, a multiple of `batch`.
        batch: texts side by side.
        prompt: tokens that are read before those that are scored.
        scored: tokens of each text.
        window: of the backbone, in tokens; 0 is as many as M+ sees at most: pool,
            retrieved memory tokens, and what is read.
        source: documents, as `memjax train` takes them.
        split: which of them.
        run_dir: where the tiny backbone is kept.
        seed: of untrained parameters.
        output: where .json and .png go, without the ending.
    """

    stage1: Path | None = None
    stage2: Path | None = None
    stage3: Path | None = None
    references: tuple[Reference, ...] = ("M+, untrained", "backbone", "window")
    backbone: str = "smollm2"
    memory: MPlusConfig = scores.MEMORY
    told: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    chunk: int = 0
    texts: int = 8
    batch: int = 4
    prompt: int = 32
    scored: int = 224
    window: int = 0
    source: str = "embedded"
    split: Split = "test"
    run_dir: Path = Path("runs/hmt")
    seed: int = 0
    output: Path = RESULTS / "mplus" / "perplexity"

    def __post_init__(self):
        check_sizes(
            texts=self.texts, batch=self.batch, prompt=self.prompt, scored=self.scored
        )
        for name in ("chunk", "window", "seed"):
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
        memory: whether anything is injected at all.
    """

    model: LanguageModel | MPlus
    method: Any
    leaks: bool = False
    memory: bool = True


#: Mean nats of each text, for every number of chunks.
Nats = Float64[np.ndarray, "n N"]


def main(config: Config) -> None:
    """Injects into and scores every model; prints, plots and writes the results."""
    models = scores.load(config.folders, config.backbone, config.run_dir)
    memories = with_memory(config, models)
    chunk = chunk_size(config, memories)
    rows = build(config, models.backbone, memories, chunk)
    length = config.told[-1] * chunk + config.prompt + config.scored
    documents = load_tokens(config.source, models.tokenizer, config.split)
    texts = scores.excerpts(documents, config.texts, length)
    nats: dict[str, Nats] = {}
    seconds = {}
    for name, row in rows.items():
        began = time.monotonic()
        found = score(config, row, texts, chunk)
        seconds[name] = time.monotonic() - began
        nats |= {f"{name}, {LEAKING}" if leaks else name: x for leaks, x in found}
        curve = [f"{math.exp(value):.2f}" for value in nats[name].mean(axis=1)]
        print(f"{name}: {' '.join(curve)} ({seconds[name]:.0f} s)", flush=True)
    report(config, memories, texts, chunk, nats, seconds)


def with_memory(config: Config, models: Models) -> dict[str, MPlus]:
    """The trained models, and untrained ones of the same sizes, by their names.

    Raises:
        ValueError: if a stage has a store that should have none, or none.
    """
    for name, model in models.trained.items():
        if bool(model.config.retrieved) != (name == "stage3"):
            raise ValueError(
                f"{name} must be a folder of "
                f"{'M+' if name == 'stage3' else 'MemoryLLM'}, got one with "
                f"retrieved={model.config.retrieved}"
            )
    found = {STAGES[name]: model for name, model in models.trained.items()}
    third = models.trained.get("stage3")
    memory = config.memory if third is None else third.config
    fresh = mplus(models.backbone, memory, key=jax.random.key(config.seed))
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
    sizes = {name: model.config.chunk for name, model in memories.items()}
    chunk = config.chunk or max(sizes.values(), default=config.memory.chunk)
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
    rows = {}
    for name, model in memories.items():
        small = scores.with_room(model, config.told[-1] * chunk)
        retrieves = bool(model.config.retrieved)
        rows[name] = Row(small, methods.LatentMemory(small), retrieves)
    read = config.prompt + config.scored
    if "backbone" in config.references:
        alone = with_capacity(backbone, read)
        rows["backbone, told nothing"] = Row(
            alone, methods.Reader(alone, chunk), memory=False
        )
    if "window" in config.references:
        sizes = [model.config for model in memories.values()] or [config.memory]
        seen = max(size.pool + size.retrieved for size in sizes)
        width = config.window or seen + read
        found = methods.window(backbone, chunk, width)
        rows[f"backbone, window of {width:,}"] = Row(found.model, found)
    return rows


def score(
    config: Config, row: Row, texts: Sequence[Excerpt], chunk: int
) -> list[tuple[bool, Nats]]:
    """Nats of a row, and where it has a store also those of the leaking way.

    Returns:
        Pairs of whether it leaks and the nats.
    """
    ways = (False, True) if row.leaks else (False,)
    found = np.zeros((len(ways), len(config.told), len(texts)))
    tokens = np.stack([text.tokens for text in texts])
    injected = tokens.shape[1] - config.prompt - config.scored
    for start in range(0, len(texts), config.batch):
        batch = slice(start, start + config.batch)
        for i, count in enumerate(config.told):
            if i and not row.memory:
                found[:, i, batch] = found[:, 0, batch]
                continue
            memory = row.method.start(config.batch)
            for at in range(injected - count * chunk, injected, chunk):
                memory = row.method.inject(memory, tokens[batch, at : at + chunk])
            for way, leaks in enumerate(ways):
                if leaks and not np.any(memory.store.num_valid):
                    # There is nothing to choose from.
                    found[way, i, batch] = found[0, i, batch]
                    continue
                nats = scores.losses(
                    row.model,
                    memory,
                    tokens[batch, injected:],
                    config.prompt,
                    leaks=leaks,
                )
                found[way, i, batch] = nats.mean(axis=1, dtype=np.float64)
    return list(zip(ways, found, strict=True))


def compare(
    config: Config, nats: Mapping[str, Nats]
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """What each row saves, in nats a token, for every number of chunks.

    Each row is compared with the same model without anything injected, with the
    backbone's rows, and with the stage before; a leaking row also with the same row
    that does not leak.
    """
    stages = [STAGES[name] for name in config.folders]
    saved = {}
    for name, own in nats.items():
        base = {"told nothing": np.broadcast_to(own[:1], own.shape)}
        base |= {
            other: x
            for other, x in nats.items()
            if other.startswith("backbone") and other != name
        }
        if name in stages[1:]:
            before = stages[stages.index(name) - 1]
            base[before] = nats[before]
        if name.endswith(LEAKING):
            honest = name.removesuffix(f", {LEAKING}")
            base[honest] = nats[honest]
        saved[name] = {
            against: [paired(a, b)._asdict() for a, b in zip(x, own, strict=True)]
            for against, x in base.items()
        }
    return saved


def report(
    config: Config,
    memories: Mapping[str, MPlus],
    texts: Sequence[Excerpt],
    chunk: int,
    nats: Mapping[str, Nats],
    seconds: Mapping[str, float],
) -> None:
    """Writes, draws and prints."""
    tokens = [count * chunk for count in config.told]
    saved = compare(config, nats)
    curves = {name: np.exp(x.mean(axis=1)).tolist() for name, x in nats.items()}
    question = "does a text's memory lower the perplexity of what follows?"
    results = {
        "memories": {
            name: dataclasses.asdict(x.config) for name, x in memories.items()
        },
        "tokens_told": tokens,
        "documents": [text.name for text in texts],
        "leaking": [name for name in nats if name.endswith(LEAKING)],
        "perplexity": curves,
        "saved_nats": saved,
        "nats_by_text": {name: x.tolist() for name, x in nats.items()},
        "seconds": seconds,
    }
    result = write_report(config.output, question, settings(config), results)
    plot(result, Path(f"{config.output}.png"))
    title = f"{config.scored} tokens of each of {config.texts} held-out texts"
    by_injecting = {name: parts["told nothing"] for name, parts in saved.items()}
    columns = [f"{count:,}" for count in tokens]
    show(f"Perplexity after so many injected tokens; {title}", columns, curves)
    show(
        "Nats saved by injecting, and half of the 95% interval",
        columns,
        {
            label: values
            for name, found in by_injecting.items()
            for label, values in (
                (name, [x["mean"] for x in found]),
                (f"{name} ±", [x["high"] - x["mean"] for x in found]),
            )
        },
    )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws a result: perplexity by what was injected, and what injecting saves."""
    config, saved = result["config"], result["saved_nats"]
    scores.plot(
        result["perplexity"],
        {name: parts["told nothing"] for name, parts in saved.items()},
        result["tokens_told"],
        path,
        title=f"{config['scored']} tokens of each of {config['texts']} held-out texts",
        dotted=result["leaking"],
        source=source_of(result),
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
