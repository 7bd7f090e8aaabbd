"""Models by name: families of mechanisms in sizes from the papers.

Elastic Memory's 100m, 200m and 400m, and the sizes of Trellis, Table 5, where all
recurrent models share one block:

    size   layers  width  heads  peak learning rate  tokens
    125m   12      768    12     3e-3                2.4B
    170m   12      768    16     3e-3                15B
    350m   24      1024   16     1.5e-3              15B
    780m   24      1536   16     1.25e-3             30B

What the table leaves open: SwiGLU layers of 8/3 of the width, in steps of 64; a
vocabulary of 32,000 with a tied head; heads of width / heads, which for 16 heads at 768
gives no more than the 125m, so that the 170m has heads of 64 and a head of its own.
Mechanisms of one size differ in parameters by up to two matrices a layer; a comparison
makes them equal by `hidden_dim`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from memjax.checks import require_known
from memjax.mechanisms import (
    CELLS,
    MECHANISMS,
    HybridConfig,
    InfiniConfig,
    MechanismConfig,
    SlidingWindowConfig,
)
from memjax.models.language_model.config import Dtype, ModelConfig

#: Mechanisms that are a cell in the block of `RecurrentConfig`, by name.
RECURRENT: dict[str, Any] = {n: k for n, k in MECHANISMS.items() if n in CELLS}
#: The other memories of Elastic Memory's paper.
BASELINES = ("memorizing", "infini", "melodi")


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model, for any mechanism.

    Attributes:
        num_layers: the depth.
        model_dim: D.
        num_heads: query heads, and heads of the recurrent mechanisms.
        num_kv_heads: key and value heads of the attention family.
        head_dim: width of a head, in recurrent mechanisms of its keys and its values.
        hidden_dim: width inside the feed-forward.
        tied_head: whether the output layer is the embedding, transposed.
        default: the mechanism of the transformer of this size.
        window: of sliding windows; block of Elastic Memory.
        capacity: of full attention.
        slots: of each head, in mechanisms with slots.
        options: of single mechanisms, by name.
        dtype: of activations.
        remat: recompute activations in the backward pass.
        scan_layers: run equal layers by one loop.
    """

    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    tied_head: bool = True
    default: str = "attention"
    window: int = 2048
    capacity: int = 32_768
    slots: int = 64
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    dtype: Dtype = "bfloat16"
    remat: bool = True
    scan_layers: bool = True

    def mechanism(self, name: str, **options: Any) -> MechanismConfig:
        """The mechanism of this name in this size, `options` before the size's own.

        "infini" is Infini-attention as Elastic Memory's paper has it.
        """
        known = {n: k for n, k in MECHANISMS.items() if n != "hybrid"}
        require_known("mechanism", name, (*known, "infini"))
        if name == "infini":
            return self._infini(**options)
        sizes = dict(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            slots=self.slots,
            capacity=self.capacity,
            window=self.window,
            block=self.window,
            # Of Mamba, and of RG-LRU as RecurrentGemma has it.
            inner_dim=2 * self.model_dim,
            state_dim=16,
            dt_rank=-(-self.model_dim // 16),
            width=self.model_dim,
            num_blocks=self.num_heads,
        )
        fields = {f.name for f in dataclasses.fields(known[name]) if f.init}
        sizes = {n: size for n, size in sizes.items() if n in fields}
        return known[name](**(sizes | self.options.get(name, {}) | options))

    def _infini(self, **options: Any) -> HybridConfig:
        """A window and Infini's memory, its reads normalised, with a gate by head."""
        window = cast(SlidingWindowConfig, self.mechanism("sliding_window"))
        heads = (self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)
        memory = dataclasses.replace(InfiniConfig(*heads, norm=True), **options)
        return HybridConfig(window, memory, gate="head")

    def with_memory(self, name: str, vocab_size: int = 32_000) -> ModelConfig:
        """The transformer of this size with another mechanism in its memory layer."""
        names = [self.default] * self.num_layers
        # Layer 9 of 12, as in Elastic Memory's paper.
        names[self.num_layers * 3 // 4 - 1] = name
        return self.model(*names, vocab_size=vocab_size)

    def model(self, *names: str, vocab_size: int = 32_000) -> ModelConfig:
        """The model of this size with mechanisms of these names, one period."""
        return ModelConfig(
            mechanisms=tuple(self.mechanism(name) for name in names),
            num_layers=self.num_layers,
            vocab_size=vocab_size,
            model_dim=self.model_dim,
            hidden_dim=self.hidden_dim,
            tied_head=self.tied_head,
            dtype=self.dtype,
            remat=self.remat,
            scan_layers=self.scan_layers,
        )


TINY = Size(
    num_layers=4,
    model_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    hidden_dim=384,
    default="sliding_window",
    window=64,
    capacity=4096,
    slots=32,
    options={
        "elastic_memory": dict(order=64, memory_tokens=64, decay=0.9),
        # As many numbers of memory in the whole model.
        "memorizing": dict(queue=64),
        "melodi": dict(memory_tokens=8),
        "trellis": dict(chunk_size=16),
    },
    dtype="float32",
    remat=False,
    scan_layers=False,
)


def _elastic_paper(heads: int) -> Size:
    """12 layers of width 64 * heads; the paper's 100M, 200M and 400M."""
    # The paper gives the parameter counts and memory sizes alone; 540 * 128 * heads
    # floats of memory (Table 4: 0.8M, 1.2M, 1.6M) give 12, 18 and 24 heads.
    width = 64 * heads
    return Size(12, width, heads, heads, 64, width * 8 // 3, default="sliding_window")


def _trellis_paper(
    layers: int, width: int, heads: int, head_dim: int, tied_head: bool = True
) -> Size:
    """A row of Trellis, Table 5; attention, where a model has it, sees everything."""
    # With 8/3 of the width, SwiGLU's three matrices are as large as two of 4 times the
    # width.
    hidden = -(-width * 8 // 3 // 64) * 64
    return Size(layers, width, heads, heads, head_dim, hidden, tied_head)


ELASTIC_SIZES: dict[str, Size] = {
    "tiny": TINY,
    "100m": _elastic_paper(12),
    "200m": _elastic_paper(18),
    "400m": _elastic_paper(24),
}
TRELLIS_SIZES: dict[str, Size] = {
    "tiny": TINY,
    "125m": _trellis_paper(12, 768, 12, 64),
    "170m": _trellis_paper(12, 768, 16, 64, tied_head=False),
    "350m": _trellis_paper(24, 1024, 16, 64),
    "780m": _trellis_paper(24, 1536, 16, 96),
}
SIZES = ELASTIC_SIZES | TRELLIS_SIZES


def transformer(size: str = "tiny", vocab_size: int = 32_000) -> ModelConfig:
    """Transformer++: attention in every layer, no memory.

    Sliding windows in the sizes of Elastic Memory, full attention in those of Trellis,
    as in the papers.
    """
    require_known("size", size, tuple(SIZES))
    return SIZES[size].model(SIZES[size].default, vocab_size=vocab_size)


def elastic(size: str = "tiny", vocab_size: int = 32_000) -> ModelConfig:
    """The same model with Elastic Memory in its memory layer.

    The paper puts it in layer 9 of 12; the tiny model in layer 3 of 4. No parameter
    is added, so both presets of a size have equal parameters.
    """
    require_known("size", size, tuple(ELASTIC_SIZES))
    return ELASTIC_SIZES[size].with_memory("elastic_memory", vocab_size)


def elastic_baseline(
    memory: str, size: str = "tiny", vocab_size: int = 32_000
) -> ModelConfig:
    """The same model with another memory of Elastic Memory's paper, in its layers.

    "memorizing" is in the memory layer, "infini" and "melodi" are in all layers.
    """
    require_known("memory", memory, BASELINES)
    require_known("size", size, tuple(ELASTIC_SIZES))
    sizes = ELASTIC_SIZES[size]
    if memory == "memorizing":
        return sizes.with_memory(memory, vocab_size)
    return sizes.model(memory, vocab_size=vocab_size)


def recurrent(
    mechanism: str, size: str = "tiny", vocab_size: int = 32_000
) -> ModelConfig:
    """One recurrent memory in every layer."""
    require_known("size", size, tuple(TRELLIS_SIZES))
    return TRELLIS_SIZES[size].model(mechanism, vocab_size=vocab_size)


def hybrid(
    size: str = "tiny", vocab_size: int = 32_000, mechanism: str = "trellis"
) -> ModelConfig:
    """A recurrent memory in three layers of four, attention in the fourth."""
    require_known("size", size, tuple(TRELLIS_SIZES))
    sizes = TRELLIS_SIZES[size]
    return sizes.model(
        mechanism, mechanism, mechanism, sizes.default, vocab_size=vocab_size
    )


class Family(NamedTuple):
    """Choice of mechanisms, and its sizes."""

    build: Callable[[str, int], ModelConfig]
    sizes: dict[str, Size]


FAMILIES: dict[str, Family] = {
    "transformer": Family(transformer, SIZES),
    "elastic": Family(elastic, ELASTIC_SIZES),
    "hybrid": Family(hybrid, TRELLIS_SIZES),
}
FAMILIES |= {
    name: Family(functools.partial(elastic_baseline, name), ELASTIC_SIZES)
    for name in BASELINES
}
FAMILIES |= {
    name: Family(functools.partial(recurrent, name), TRELLIS_SIZES)
    for name in RECURRENT
}
PRESETS = tuple(
    f"{name}-{size}" for name, family in FAMILIES.items() for size in family.sizes
)


def preset(name: str, vocab_size: int = 32_000) -> ModelConfig:
    """Looks a preset up: `<family>-<size>`, as in `PRESETS`.

    Families are transformer, elastic, its baselines memorizing, infini and melodi,
    hybrid, and the recurrent mechanisms by their names.
    """
    require_known("preset", name, PRESETS)
    family, size = name.split("-")
    return FAMILIES[family].build(size, vocab_size)
