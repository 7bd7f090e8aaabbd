"""Perplexity of a text's continuation, by the number of tokens injected before it.

    python -m experiments.corpus.comparison --destination comparison
    python -m experiments.mplus.perplexity --source folder:comparison \\
        --stage2 RUN --stage3 RUN

Question: does a memory of the earlier text lower perplexity, and after which stage of
training? (M+, Figure 4, which compares its three stages.)
Rows: MemoryLLM and M+ after training, M+ before it, and the backbone: without earlier
text, with full attention, with a window of as many bytes as M+'s state after the
longest text, and with as many re-read tokens as M+ reads memory tokens.
Columns: perplexity of the same tokens after 0, 1, ... chunks of the same document; the
state's size. Loss reductions in the file are paired by text.
Not shown: documents longer than the store; the published program's scores, in which the
scored tokens take part in the retrieval. Here only the prompt before them does.

Shapes: N texts, n numbers of chunks, P tokens of the prompt, T of prompt and targets.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from jaxtyping import Float32, Float64, Int32

from experiments.lab.baselines import equal_window
from experiments.lab.measure import state_bytes
from experiments.lab.results import RESULTS, Rows, number, settings, table, write_report
from experiments.mplus import models
from experiments.mplus.methods import SINKS, LatentMemory, StateBytes
from memjax.data import TokenisedDocument, load_tokens
from memjax.evaluation import token_losses
from memjax.evaluation.statistics import paired
from memjax.models import LanguageModel
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.model import MPlus
from memjax.status import say

STAGES = {"stage2": "MemoryLLM, stage 2", "stage3": "M+, stage 3"}
#: Tokens of a chunk, which is one or more of the memories', so that every token is
#: written, and the numbers of chunks that are injected.
CHUNK, CHUNKS = 256, (0, 1, 2, 4, 8, 16)
#: Tokens of the prompt, which are not scored, and of the targets; texts side by side.
PROMPT, SCORED, BATCH = 32, 224, 4


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        stage2: run folder of a MemoryLLM.
        stage3: of an M+.
        texts: scored.
        source: documents, as `memjax train` takes them.
        output: where .json goes, without the ending.
    """

    stage2: Path
    stage3: Path
    texts: int = 24
    source: str = "embedded"
    output: Path = RESULTS / "mplus" / "perplexity"


Tokens = Int32[np.ndarray, "B T"]
Targets = Float32[np.ndarray, "B scored"]
#: Mean nats of each text, for every number of chunks.
Nats = Float64[np.ndarray, "n N"]


class Row(NamedTuple):
    """A memory, its size after the longest text, and the most tokens injected."""

    score: Callable[[Tokens], Targets]
    state: StateBytes
    last: int


def main(config: Config) -> None:
    """Injects into and scores every model; prints and writes the results."""
    folders = {name: getattr(config, part) for part, name in STAGES.items()}
    memories = {name: models.load_trained(x)[0] for name, x in folders.items()}
    trained, tokenizer = models.load_trained(config.stage3)
    untrained = add_mplus(trained.backbone, trained.config, key=jax.random.key(0))
    memories["M+, untrained"] = untrained
    rows = build(trained.backbone, memories)
    documents = load_tokens(config.source, tokenizer, "test")
    length = CHUNKS[-1] * CHUNK + PROMPT + SCORED
    texts = excerpts(documents, config.texts, length)
    tokens, nats = np.stack([text.tokens for text in texts]), {}
    for name, row in rows.items():
        nats[name] = score(row, tokens)
        curve = " ".join(f"{x:.2f}" for x in np.exp(nats[name].mean(axis=1)))
        say(f"{name}: {curve}")
    write_report(
        config.output,
        "does a text's memory lower the perplexity of what follows?",
        settings(config) | {"prompt": PROMPT, "scored": SCORED},
        {
            "memories": {n: dataclasses.asdict(x.config) for n, x in memories.items()},
            "recipes": {name: models.recipe(x) for name, x in folders.items()},
            "kept_bytes": {name: row.state._asdict() for name, row in rows.items()},
            "tokens_told": [count * CHUNK for count in CHUNKS],
            "documents": [text.name for text in texts],
            "perplexity": {n: np.exp(x.mean(axis=1)).tolist() for n, x in nats.items()},
            "saved_nats": compare(nats),
            "nats_by_text": {name: x.tolist() for name, x in nats.items()},
        },
    )


def build(backbone: LanguageModel, memories: Mapping[str, MPlus]) -> dict[str, Row]:
    """All rows by name."""
    longest, rows, sizes = CHUNKS[-1] * CHUNK, {}, []
    for name, model in memories.items():
        method = LatentMemory(with_room(model, longest))
        rows[name] = Row(partial(by_memory, method), method.state_bytes(), longest)
        sizes.append(model.config.pool_size + model.config.num_retrieved)
    size = max(row.state.total for row in rows.values())
    window = equal_window(backbone, size) - SINKS
    # As many tokens as the memories read memory tokens, in whole chunks.
    last = max(sizes) // CHUNK * CHUNK
    whole = set_capacity(backbone, longest + PROMPT + SCORED)
    sliding = limit_attention(backbone, window, SINKS)
    text = StateBytes(0, 4 * min(last, longest))

    def row(model: LanguageModel, state: StateBytes | None, last: int) -> Row:
        state = state or StateBytes(state_bytes(model, longest), 0)
        return Row(partial(by_backbone, model), state, last)

    label = f"window of {window:,} tokens and {SINKS} sinks"
    return rows | {
        "backbone, told nothing": row(whole, StateBytes(0, 0), 0),
        "backbone, full attention": row(whole, None, longest),
        f"backbone, {label}": row(sliding, None, longest),
        f"backbone, the last {last:,} tokens read again": row(whole, text, last),
    }


def by_memory(method: LatentMemory, tokens: Tokens) -> Targets:
    """Chunks are injected, and the rest is read after them."""
    end = tokens.shape[1] - PROMPT - SCORED
    memory = method.start(len(tokens))
    for at in range(0, end, CHUNK):
        memory = method.inject(memory, tokens[:, at : at + CHUNK])
    return method.losses(memory, tokens[:, end:], PROMPT)


def by_backbone(model: LanguageModel, tokens: Tokens) -> Targets:
    """All tokens are read."""
    texts = [TokenisedDocument("", "", row) for row in tokens]
    found = token_losses(model, texts, tokens_per_call=CHUNK, batch_size=len(texts))
    return found.nll[:, -SCORED:]


def with_room(model: MPlus, tokens: int) -> MPlus:
    """The same model with no larger a store than a text of `tokens` tokens needs.

    No memory token leaves it that would have stayed in a larger one.
    """
    config = model.config
    if not config.num_retrieved:
        return model
    made = tokens // config.chunk_size * config.num_memory_tokens
    rows = max(made - config.pool_size, config.min_store_size)
    return models.with_config(model, store_size=min(config.store_size, rows))


def excerpts(
    documents: Sequence[TokenisedDocument], count: int, length: int
) -> list[TokenisedDocument]:
    """The last `length` tokens of the first `count` documents that have as many."""
    long = [document for document in documents if len(document.tokens) >= length]
    if len(long) < count:
        raise ValueError(
            f"texts must be at most {len(long)} of {length} tokens from these "
            f"documents, got {count}"
        )
    return [x._replace(tokens=np.asarray(x.tokens[-length:])) for x in long[:count]]


def score(row: Row, tokens: Int32[np.ndarray, "N T"]) -> Nats:
    """Nats of a row: the last chunks are injected, the same tokens scored."""
    least = PROMPT + SCORED
    found: dict[int, list[float]] = {}
    counts = [min(count * CHUNK, row.last) for count in CHUNKS]
    for injected in dict.fromkeys(counts):
        batches = np.split(
            tokens[:, -least - injected :], range(BATCH, len(tokens), BATCH)
        )
        nats = [row.score(batch).mean(axis=1, dtype=np.float64) for batch in batches]
        found[injected] = np.concatenate(nats).tolist()
    return np.asarray([found[injected] for injected in counts])


def compare(nats: Mapping[str, Nats]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Nats a token that each row saves against all others, paired by text.

    For every number of chunks.
    """
    return {
        name: {
            base: [paired(a, b)._asdict() for a, b in zip(x, own, strict=True)]
            for base, x in nats.items()
            if base != name
        }
        for name, own in nats.items()
    }


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
            cells[f"after {number(count, 0)}"] = number(value, 2)
        yield cells
    for name, stages in result["recipes"].items():
        yield f"{name}: {models.recipe_text(stages)}"


if __name__ == "__main__":
    main(tyro.cli(Config))
