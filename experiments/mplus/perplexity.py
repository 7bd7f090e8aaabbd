"""Perplexity of a text's continuation, by the number of tokens injected before it.

    python -m experiments.mplus.perplexity --stage2 RUN --stage3 RUN

Question: does a memory of the earlier text lower perplexity, and after which stage of
training? (M+, Figure 4, which compares its three stages.)
Rows: MemoryLLM and M+ after training, M+ before it, and the backbone: without earlier
text, with full attention, with a window of as many bytes as M+'s state after the
longest text, and with as many re-read tokens as M+ reads memory tokens; with `--tuned`
the backbone's rows also with adapters that were trained on M+'s tasks.
Columns: perplexity of the same tokens after 0, 1, ... chunks of the same document; the
state's size. Loss reductions in the file are paired by text.
Not shown: documents longer than the store; the published program's scores, in which the
scored tokens take part in the retrieval. Here only the prompt before them does.

Shapes: N texts, n numbers of chunks, P tokens of the prompt, T of prompt and targets.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Float32, Float64, Int32

from experiments.lab import backbones
from experiments.lab.baselines import equal_window
from experiments.lab.results import (
    RESULTS,
    Rows,
    figure,
    number,
    settings,
    show,
    table,
    thousands,
    write_report,
)
from experiments.mplus import adapters, models
from experiments.mplus.methods import SINKS, LatentMemory, Reader, StateBytes
from memjax.checks import check_sizes
from memjax.data import Split, TokenisedDocument, load_tokens
from memjax.evaluation.drawing import drawing, source_of
from memjax.evaluation.statistics import paired
from memjax.models import LanguageModel
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.loss import target_nll
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.model import MPlus
from memjax.training.finetune import finetune

STAGES = {
    "stage1": "MemoryLLM, stage 1",
    "stage2": "MemoryLLM, stage 2",
    "stage3": "M+, stage 3",
}
#: The lines of the plot.
PLOTTED = (
    "MemoryLLM, stage 2",
    "M+, stage 3",
    "M+, untrained",
    "backbone, told nothing",
    "backbone, full attention",
    "backbone, the last 1,024 tokens read again",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; the defaults take some 10 minutes with three stages.

    Attributes:
        stage1: run folder of a MemoryLLM.
        stage2: of another.
        stage3: of an M+.
        tuned: folder of adapters, as `experiments.mplus.retention` trains them.
        backbone: "smollm2", or a model as `memjax finetune` takes it.
        chunks: numbers of chunks that are injected, rising from 0.
        chunk: tokens of a chunk, a multiple of the memories'.
        texts: scored, a multiple of `batch`.
        batch: texts side by side.
        prompt: P, which is not scored.
        scored: tokens of each text that are.
        source: documents, as `memjax train` takes them.
        split: of the documents.
        seed: of untrained parameters.
        output: where .json and .png go, without the ending.
    """

    stage1: Path | None = None
    stage2: Path | None = None
    stage3: Path | None = None
    tuned: Path | None = None
    backbone: str = "smollm2"
    chunks: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    chunk: int = 256
    texts: int = 4
    batch: int = 4
    prompt: int = 32
    scored: int = 224
    source: str = "embedded"
    split: Split = "test"
    seed: int = 0
    output: Path = RESULTS / "mplus" / "perplexity"

    def __post_init__(self):
        names = ("chunk", "texts", "batch", "prompt", "scored")
        check_sizes(**{name: getattr(self, name) for name in names})
        if self.texts % self.batch:
            raise ValueError(
                f"texts must be a multiple of batch={self.batch}, got {self.texts}"
            )
        if list(self.chunks) != sorted({0, *self.chunks}):
            raise ValueError(f"chunks must rise from 0, got {self.chunks}")

    @property
    def folders(self) -> dict[str, Path]:
        """The stages that are given."""
        given = {name: getattr(self, name) for name in STAGES}
        return {name: folder for name, folder in given.items() if folder is not None}

    @property
    def longest(self) -> int:
        """Tokens that are injected at most."""
        return self.chunks[-1] * self.chunk


class Row(NamedTuple):
    """A memory that is filled and scored.

    Attributes:
        method: that injects.
        state: size after the longest text.
        last: the most tokens that are injected; None is all.
    """

    method: Reader | LatentMemory
    state: StateBytes
    last: int | None = None


class Excerpt(NamedTuple):
    """A part of a document."""

    name: str
    tokens: Int32[np.ndarray, " T"]


#: Mean nats of each text, for every number of chunks.
Nats = Float64[np.ndarray, "n N"]


def main(config: Config) -> None:
    """Injects into and scores every model; prints, plots and writes the results."""
    found = finetune.load_backbone(backbones.located(config.backbone))
    backbone, tokenizer = found.model, found.tokenizer
    memories = load_memories(config, backbone)
    rows = build(config, backbone, memories)
    documents = load_tokens(config.source, tokenizer, config.split)
    length = config.longest + config.prompt + config.scored
    texts = excerpts(documents, config.texts, length)
    nats: dict[str, Nats] = {}
    seconds = {}
    for name, row in rows.items():
        began = time.monotonic()
        nats[name] = score(config, row, texts)
        seconds[name] = time.monotonic() - began
        curve = " ".join(f"{math.exp(value):.2f}" for value in nats[name].mean(axis=1))
        print(f"{name}: {curve} ({seconds[name]:.0f} s)", flush=True)
    recipes = {STAGES[name]: models.recipe(x) for name, x in config.folders.items()}
    if config.tuned is not None:
        recipes["tuned"] = adapters.recipe(config.tuned)
    result = write_report(
        config.output,
        "does a text's memory lower the perplexity of what follows?",
        settings(config),
        {
            "memories": {n: dataclasses.asdict(x.config) for n, x in memories.items()},
            "recipes": recipes,
            "kept_bytes": {name: row.state._asdict() for name, row in rows.items()},
            "tokens_told": [count * config.chunk for count in config.chunks],
            "documents": [text.name for text in texts],
            "perplexity": {n: np.exp(x.mean(axis=1)).tolist() for n, x in nats.items()},
            "saved_nats": compare(nats),
            "nats_by_text": {name: x.tolist() for name, x in nats.items()},
            "seconds": seconds,
        },
    )
    plot(result, Path(f"{config.output}.png"))
    columns = [f"{count:,}" for count in result["tokens_told"]]
    show("Perplexity by injected tokens", columns, result["perplexity"])


def load_memories(config: Config, backbone: LanguageModel) -> dict[str, MPlus]:
    """The trained models and an untrained M+ of the same sizes, by name.

    Their backbone is the same object.

    Raises:
        ValueError: if a folder has no such model, or one of another backbone.
    """
    digest, trained = finetune.digest(backbone), {}
    for name, folder in config.folders.items():
        model, _ = models.load_trained(name, folder)
        if finetune.digest(model.backbone) != digest:
            raise ValueError(
                f"{name}={str(folder)!r} must have the backbone {config.backbone!r}, "
                "it has another"
            )
        if bool(model.config.num_retrieved) != (name == "stage3"):
            raise ValueError(
                f"{name} must be a folder of "
                f"{'M+' if name == 'stage3' else 'MemoryLLM'}, got one with "
                f"num_retrieved={model.config.num_retrieved}"
            )
        if config.chunk % model.config.chunk_size:
            raise ValueError(
                f"chunk must be a multiple of every memory's, so that every token is "
                f"written; that of {name} is {model.config.chunk_size}, "
                f"got {config.chunk}"
            )
        trained[STAGES[name]] = model.replace(backbone=backbone)
    last = trained.get(STAGES["stage3"])
    sizes = models.MEMORY if last is None else last.config
    untrained = add_mplus(backbone, sizes, key=jax.random.key(config.seed))
    return trained | {"M+, untrained": untrained}


def build(
    config: Config, backbone: LanguageModel, memories: Mapping[str, MPlus]
) -> dict[str, Row]:
    """All rows by name."""
    rows, sizes = {}, []
    for name, model in memories.items():
        method = LatentMemory(with_room(model, config.longest))
        rows[name] = Row(method, method.state_bytes())
        sizes.append(model.config.pool_size + model.config.num_retrieved)
    size = max(row.state.total for row in rows.values())
    window = equal_window(backbone, size) - SINKS
    # As many tokens as the memories read memory tokens, in whole chunks.
    last = max(sizes) // config.chunk * config.chunk
    models_of_backbone = {"": backbone}
    if config.tuned is not None:
        models_of_backbone[", tuned"] = adapters.load(config.tuned, backbone)
    for tuned, model in models_of_backbone.items():
        whole = set_capacity(model, config.longest + config.prompt + config.scored)
        reader = Reader(whole, config.chunk)
        sliding = Reader(limit_attention(model, window, SINKS), config.chunk)
        text = StateBytes(0, 4 * min(last, config.longest))
        label = f"backbone, window of {window:,} tokens and {SINKS} sinks"
        rows |= {
            f"backbone, told nothing{tuned}": Row(reader, StateBytes(0, 0), 0),
            f"backbone, full attention{tuned}": Row(
                reader, reader.state_bytes(config.longest)
            ),
            f"{label}{tuned}": Row(sliding, sliding.state_bytes(config.longest)),
            f"backbone, the last {last:,} tokens read again{tuned}": Row(
                reader, text, last
            ),
        }
    return rows


def with_room(model: MPlus, tokens: int) -> MPlus:
    """The same model with no larger a store than a text of `tokens` tokens needs.

    No memory token leaves it that would have stayed in a larger one. Memory that a
    checkpoint brings leaves the store as it is.
    """
    config = model.config
    if not config.num_retrieved or model.initial is not None:
        return model
    made = tokens // config.chunk_size * config.num_memory_tokens
    rows = max(made - config.pool_size, config.min_store_size)
    return models.with_store(model, min(config.store_size, rows))


def excerpts(
    documents: Sequence[TokenisedDocument], count: int, length: int
) -> list[Excerpt]:
    """The last `length` tokens of the first `count` documents that have as many.

    Raises:
        ValueError: if there are fewer such documents.
    """
    long = [document for document in documents if len(document.tokens) >= length]
    if len(long) < count:
        raise ValueError(
            f"texts must be at most {len(long)} of {length} tokens from these "
            f"documents, got {count}"
        )
    return [Excerpt(x.name, np.asarray(x.tokens[-length:])) for x in long[:count]]


def score(config: Config, row: Row, texts: Sequence[Excerpt]) -> Nats:
    """Nats of a row: the last chunks are injected, the same tokens scored."""
    found = np.zeros((len(config.chunks), len(texts)))
    tokens = np.stack([text.tokens for text in texts])
    end = tokens.shape[1] - config.prompt - config.scored
    for start in range(0, len(texts), config.batch):
        batch = slice(start, start + config.batch)
        for i, count in enumerate(config.chunks):
            injected = count * config.chunk
            if row.last is not None:
                injected = min(injected, row.last)
            if i and not injected:
                found[i, batch] = found[0, batch]
                continue
            memory = row.method.start(config.batch)
            for at in range(end - injected, end, config.chunk):
                chunk = tokens[batch, at : at + config.chunk]
                memory = row.method.inject(memory, chunk)
            nats = losses(row.method, memory, tokens[batch, end:], config.prompt)
            found[i, batch] = nats.mean(axis=1, dtype=np.float64)
    return found


def losses(
    method: Reader | LatentMemory,
    memory: Any,
    tokens: Int32[np.ndarray, "B T"],
    prompt: int,
) -> Float32[np.ndarray, "B T_P"]:
    """Nats of the tokens after the prompt; the memory is not changed.

    Args:
        method: of the memory.
        memory: its state; of M+ without an open chunk.
        tokens: the prompt and the targets.
        prompt: P in [1, T); of M+ the first P tokens alone select what is retrieved.
    """
    graph, params = nnx.split(method.model)
    found = _losses(method.features, graph, params, memory, jnp.asarray(tokens), prompt)
    return np.asarray(found)


@functools.partial(jax.jit, static_argnums=(0, 1, 5))
def _losses(features, graph, params, memory, tokens, prompt):
    model = nnx.merge(graph, params)
    scored = features(model, memory, tokens[:, :-1], prompt)[:, prompt - 1 :]
    return target_nll(model.logits, scored, tokens[:, prompt:], model.vocab_size)


def compare(nats: Mapping[str, Nats]) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Loss reductions of each row, in nats a token, for every number of chunks.

    Against the same model without anything injected, and against all other rows.
    """
    found = {}
    for name, own in nats.items():
        base = {"told nothing": np.broadcast_to(own[:1], own.shape)}
        base |= {other: x for other, x in nats.items() if other != name}
        found[name] = {
            against: [paired(a, b)._asdict() for a, b in zip(x, own, strict=True)]
            for against, x in base.items()
        }
    return found


@figure("mplus/perplexity")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws perplexity by the number of injected tokens, for some rows."""
    config, tokens = result["config"], result["tokens_told"]
    places = np.arange(len(tokens))
    title = f"{config['scored']} tokens of each of {config['texts']} held-out texts"
    with drawing(path, title=title, source=source_of(result)) as drawn:
        axes = drawn.grid[0, 0]
        shown = [name for name in PLOTTED if name in result["perplexity"]]
        for i, name in enumerate(shown or result["perplexity"]):
            drawn.line(axes, places, result["perplexity"][name], name, i)
        axes.set_xticks(places, [f"{count:,}" for count in tokens])
        axes.set(xlabel="tokens injected before", ylabel="perplexity")


@table("mplus/perplexity")
def perplexity(result: dict[str, Any]) -> Rows:
    """Perplexity by row and number of injected tokens."""
    for name, values in result["perplexity"].items():
        # An earlier version also scored with retrieval by the targets.
        if name in result.get("leaking", ()):
            continue
        kept = result["kept_bytes"][name]
        size = (kept["device"] + kept["host"]) / 1e6
        cells = {"PPL": name, "state, MB": number(size, 2 if size and size < 1 else 0)}
        for count, value in zip(result["tokens_told"], values, strict=True):
            cells[f"after {thousands(count)}"] = number(value, 2)
        yield cells
    for name, stages in result["recipes"].items():
        yield f"{name}: {models.recipe_text(stages)}"


if __name__ == "__main__":
    main(tyro.cli(Config))
