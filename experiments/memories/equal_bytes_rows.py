"""The rows of the comparison at equal bytes: what is trained, and what is scored.

All rows have one backbone. A memory beside the window has as many bytes in the chosen
layers as the longer windows of "wide", as near as its sizes come; one that the query
heads of a group share has a third, as "wide-shared". M+ and MemoryLLM have no more than
"wide" in all layers, HMT and RMT a segment and the memories of the longest text.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.lab import baselines
from experiments.memories import equal_bytes_stages as stages
from experiments.memories.equal_bytes_stages import Sizes, Stages, Tuning
from memjax.models import LanguageModel
from memjax.models.language_model.reread import ReReadWindow
from memjax.models.language_model.retrofit import (
    MemoryHeads,
    MemoryName,
    MemoryOptions,
)
from memjax.models.language_model.windowed import limit_attention
from memjax.training.finetune.stage import Model


class Row(NamedTuple):
    """One row.

    Attributes:
        label: in tables and plots.
        scored: the model that is scored, of the one that was trained (or the backbone,
            where nothing is), and of the backbone.
        stages: what is trained, on a backbone; None where nothing is.
        cost: seconds of an update over those of a window's, for the plan.
        reading: seconds of reading a token, likewise.
        distills: whether the first stage is a layer-wise distillation.
    """

    label: str
    scored: Callable[[Any, LanguageModel, Sizes], Any]
    stages: Callable[[LanguageModel, Sizes, Tuning], Stages] | None = None
    cost: float = 1.0
    reading: float = 1.0
    distills: bool = False


def full_attention(
    model: LanguageModel, backbone: LanguageModel, sizes: Sizes
) -> LanguageModel:
    """Full attention in all layers, also beyond the positions of the pretraining."""
    return baselines.full_attention(model, backbone, sizes.tokens)


def window(
    model: LanguageModel, backbone: LanguageModel, sizes: Sizes
) -> LanguageModel:
    """Windows with sinks in all layers."""
    return limit_attention(model, sizes.window, sizes.sinks)


def reread(model: LanguageModel, backbone: LanguageModel, sizes: Sizes) -> ReReadWindow:
    """The last window read again before each segment of as many tokens."""
    return ReReadWindow(model, reread=sizes.window, segment=sizes.window)


def as_trained(model: Model, backbone: LanguageModel, sizes: Sizes) -> Model:
    """The model as it was trained."""
    return model


def _wide(heads: MemoryHeads) -> Callable[[Any, LanguageModel, Sizes], Any]:
    def scored(model: LanguageModel, backbone: LanguageModel, sizes: Sizes):
        return stages.wide_window(model, sizes, heads)

    return scored


def _memory(label: str, name: MemoryName, **options: Any) -> Row:
    """A memory beside the windows of the chosen layers."""
    tuned = stages.tune_beside(name, MemoryOptions(**options))
    return Row(label, as_trained, tuned, cost=1.6, reading=1.2, distills=True)


def _window(label: str, wider: MemoryHeads | None = None) -> Row:
    return Row(label, as_trained, stages.tune_beside("none", wider=wider))


# At these sizes each memory keeps at most the bytes of 97 tokens of SmolLM2's keys
# and values in a layer, with all that it keeps of a chunk that is not complete.
ROWS: dict[str, Row] = {
    "full": Row("full attention, not tuned", full_attention, reading=2.5),
    "window": Row("window, not tuned", window),
    "wide": Row("wide window, not tuned", _wide("query")),
    "reread": Row("re-read window, not tuned", reread, reading=2.2),
    "full-tuned": Row(
        "full attention", full_attention, stages.tune_full, cost=1.1, reading=2.5
    ),
    "window-tuned": _window("window"),
    "wide-tuned": _window("wide window", "query"),
    "wide-shared": Row("wide window of a third, not tuned", _wide("key_value")),
    "wide-shared-tuned": _window("wide window of a third", "key_value"),
    "reread-tuned": Row(
        "re-read window", as_trained, stages.tune_reread, cost=2.2, reading=2.2
    ),
    "elastic-uniform": _memory("Elastic, uniform", "elastic", order=64),
    "elastic-exponential": _memory(
        "Elastic, exponential",
        "elastic",
        order=64,
        sampling="exponential",
    ),
    "lattice": _memory("Lattice", "lattice", slots=32),
    "trellis": _memory("Trellis", "trellis", slots=14, chunk_size=4),
    "gated-deltanet": _memory("Gated DeltaNet", "gated_deltanet"),
    # Three query heads share each of these: a third of the bytes.
    "lattice-shared": _memory(
        "Lattice, shared", "lattice", slots=32, heads="key_value"
    ),
    "trellis-shared": _memory(
        "Trellis, shared", "trellis", slots=14, chunk_size=4, heads="key_value"
    ),
    "gated-deltanet-shared": _memory(
        "Gated DeltaNet, shared", "gated_deltanet", heads="key_value"
    ),
    "infini": _memory("Infini-attention", "infini"),
    "hmt": Row("HMT", as_trained, stages.tune_hmt, cost=1.6, reading=1.6),
    "rmt": Row("RMT", as_trained, stages.tune_rmt, cost=1.4, reading=1.3),
    "mplus": Row("M+", as_trained, stages.tune_mplus(True), cost=2.0, reading=2.0),
    "memoryllm": Row(
        "MemoryLLM", as_trained, stages.tune_mplus(False), cost=2.0, reading=2
    ),
}
