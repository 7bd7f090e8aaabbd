"""Models by name: families of mixers in sizes from the papers.

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
Mixers of one size differ in parameters by up to two matrices a layer; a comparison
makes them equal by `hidden_dim`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, get_args

from memjax.checks import require_known
from memjax.mechanisms.trellis import TrellisOptions
from memjax.models.language_model.config import (
    ElasticOptions,
    Mixer,
    ModelConfig,
    RecurrentMixer,
)

TINY = ModelConfig(
    mixers=("sliding_window",) * 4,
    model_dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    hidden_dim=384,
    window=64,
    capacity=4096,
    slots=32,
    elastic=ElasticOptions(order=64, memory_tokens=64, decay=0.9),
    trellis=TrellisOptions(chunk_size=16),
    dtype="float32",
    remat=False,
)


def _elastic_paper(heads: int) -> ModelConfig:
    """12 layers of width 64 * heads; the paper's 100M, 200M and 400M.

    The paper gives the parameter counts and memory sizes alone; 540 * 128 * heads
    floats of memory (Table 4: 0.8M, 1.2M, 1.6M) give 12, 18 and 24 heads.
    """
    return ModelConfig(
        model_dim=64 * heads,
        num_heads=heads,
        num_kv_heads=heads,
        hidden_dim=64 * heads * 8 // 3,
    )


def _trellis_paper(
    layers: int, width: int, heads: int, head_dim: int, tied_head: bool = True
) -> ModelConfig:
    """A row of Trellis, Table 5; attention, where a model has it, sees everything."""
    return ModelConfig(
        mixers=("attention",) * layers,
        model_dim=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        hidden_dim=-(-width * 8 // 3 // 64) * 64,
        tied_head=tied_head,
    )


ELASTIC_SIZES: dict[str, ModelConfig] = {
    "tiny": TINY,
    "100m": _elastic_paper(12),
    "200m": _elastic_paper(18),
    "400m": _elastic_paper(24),
}
TRELLIS_SIZES: dict[str, ModelConfig] = {
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
    return dataclasses.replace(SIZES[size], vocab_size=vocab_size)


def elastic(size: str = "tiny", vocab_size: int = 32_000) -> ModelConfig:
    """The same model with Elastic Memory in its memory layer.

    The paper puts it in layer 9 of 12; the tiny model in layer 3 of 4. No parameter
    is added, so both presets of a size have equal parameters.
    """
    require_known("size", size, tuple(ELASTIC_SIZES))
    base = transformer(size, vocab_size)
    depth = len(base.mixers)
    memory = depth * 3 // 4 - 1
    mixers = list(base.mixers)
    mixers[memory] = "elastic_memory"
    return dataclasses.replace(base, mixers=tuple(mixers))


def recurrent(
    mixer: Mixer, size: str = "tiny", vocab_size: int = 32_000
) -> ModelConfig:
    """One recurrent memory in every layer."""
    require_known("size", size, tuple(TRELLIS_SIZES))
    base = transformer(size, vocab_size)
    return dataclasses.replace(base, mixers=(mixer,) * len(base.mixers))


def hybrid(
    size: str = "tiny", vocab_size: int = 32_000, mixer: Mixer = "trellis"
) -> ModelConfig:
    """A recurrent memory in three layers of four, attention in the fourth."""
    require_known("size", size, tuple(TRELLIS_SIZES))
    base = transformer(size, vocab_size)
    mixers = tuple(
        attention if layer % 4 == 3 else mixer
        for layer, attention in enumerate(base.mixers)
    )
    return dataclasses.replace(base, mixers=mixers)


class Family(NamedTuple):
    """A way to choose the mixers, and the sizes it comes in."""

    build: Callable[[str, int], ModelConfig]
    sizes: dict[str, ModelConfig]


FAMILIES: dict[str, Family] = {
    "transformer": Family(transformer, SIZES),
    "elastic": Family(elastic, ELASTIC_SIZES),
    "hybrid": Family(hybrid, TRELLIS_SIZES),
} | {
    mixer: Family(functools.partial(recurrent, mixer), TRELLIS_SIZES)
    for mixer in get_args(RecurrentMixer)
}
PRESETS = tuple(
    f"{name}-{size}" for name, family in FAMILIES.items() for size in family.sizes
)


def preset(name: str, vocab_size: int = 32_000) -> ModelConfig:
    """Looks a preset up: `<family>-<size>`, as in `PRESETS`.

    Families are transformer, elastic, hybrid and the recurrent mixers by their names.
    """
    require_known("preset", name, PRESETS)
    family, size = name.split("-")
    return FAMILIES[family].build(size, vocab_size)
