"""Does a text's memory lower the perplexity of what follows, and after which training?

    python -m experiments.mplus.perplexity
    python -m experiments.mplus.perplexity --stage1 RUN/stage1 --stage2 RUN/stage2 \\
        --stage3 RUN/stage3

From each held-out document the chunks before a certain position are injected: none, a
few or many. Then a short prompt is read with that memory, and the tokens after it are
scored. The scored tokens are the same however much was injected (M+, Figure 4, which
compares its three stages of training). Beside the trained models stand the untrained
M+ and the backbone: told nothing; with full attention; with a window and sinks of as
many bytes as M+ keeps of the longest text, on device and host; and given the last
tokens again, as many as M+ sees memory tokens. With `--tuned` the backbone has adapters
that were trained on M+'s lessons (`tuned/tuning.py`) and stands there twice.

The prompt chooses the rows of the long-term store. In the published program the scored
tokens take part in the choice; that variant is reported too, as "LEAKING".

Gains are paired by text, against the same model without anything injected.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from jaxtyping import Float64

from experiments.lab.results import figure, settings, show, write_report
from experiments.mplus import adapters as tuning
from experiments.mplus import scores
from experiments.mplus.perplexity_rows import (
    STAGES,
    Config,
    Row,
    build,
    chunk_size,
    with_memory,
)
from experiments.mplus.recipe import recipe
from experiments.mplus.scores import Excerpt
from memjax.data import load_tokens
from memjax.evaluation.drawing import source_of
from memjax.evaluation.statistics import paired
from memjax.models.mplus.model import MPlus

LEAKING = "LEAKING: scored tokens choose"
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
    report(config, memories, texts, chunk, nats, rows, seconds)


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
            told = count * chunk if row.last is None else min(count * chunk, row.last)
            if i and not told:
                found[:, i, batch] = found[:, 0, batch]
                continue
            memory = row.method.start(config.batch)
            for at in range(injected - told, injected, chunk):
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


def recipes(config: Config) -> dict[str, list[dict[str, Any]]]:
    """How what was trained was trained, by the name of its rows."""
    found = {STAGES[name]: recipe(folder) for name, folder in config.folders.items()}
    if config.tuned is not None:
        found["tuned"] = tuning.recipe(config.tuned)
    return found


def report(
    config: Config,
    memories: Mapping[str, MPlus],
    texts: Sequence[Excerpt],
    chunk: int,
    nats: Mapping[str, Nats],
    rows: Mapping[str, Row],
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
        "recipes": recipes(config),
        "kept_bytes": {
            name: row.kept and row.kept._asdict() for name, row in rows.items()
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


@figure("mplus/perplexity")
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
