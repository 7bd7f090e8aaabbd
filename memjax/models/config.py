"""Configuration of the language model, and presets as functions."""

import dataclasses
import difflib
from typing import Literal, get_args

from memjax.mechanisms.base import check_sizes
from memjax.mechanisms.lattice import LatticeOptions
from memjax.mechanisms.trellis import TrellisOptions
from memjax.mechanisms.ttt_linear import TTTOptions

Mixer = Literal[
    "attention",
    "sliding_window",
    "elastic_memory",
    "linear_attention",
    "mamba2",
    "gla",
    "deltanet",
    "gated_deltanet",
    "gsa",
    "abc",
    "ttt_linear",
    "trellis",
    "lattice",
]
Dtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class ElasticOptions:
    """Options of the layers whose mixer is "elastic_memory".

    The block is the model's `window`; `ElasticMemoryConfig` says more.

    Attributes:
        order: coefficients per channel.
        memory_tokens: points at which the memory is read; None is min(order, window).
        sampling: where they lie in the history.
        decay: of the exponential sampling, in (0, 1).
        positions: RoPE restarts in each "block", or counts on along the "stream".
        bank_blocks: blocks whose matrices are built ahead; 0 computes all when met.
    """

    order: int = 540
    memory_tokens: int | None = None
    sampling: Literal["uniform", "exponential"] = "uniform"
    decay: float = 0.98
    positions: Literal["block", "stream"] = "block"
    bank_blocks: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-3-style decoder whose token mixer is chosen layer by layer.

    Attributes:
        mixers: the mechanism of each layer, first to last; its length is the depth.
        vocab_size: V; tokens are in [0, V).
        model_dim: D.
        num_heads: query heads.
        num_kv_heads: key-value heads of the attention family; divides `num_heads`.
        head_dim: width of a head, in recurrent mixers of its keys and its values.
        hidden_dim: width inside the SwiGLU.
        window: tokens seen by "sliding_window"; block of "elastic_memory".
        capacity: longest history of "attention".
        slots: memory slots a head of "gsa", "abc", "trellis" and "lattice".
        elastic: options of "elastic_memory".
        ttt: options of "ttt_linear".
        trellis: options of "trellis".
        lattice: options of "lattice".
        rope_theta: base of the RoPE frequencies.
        norm_epsilon: of RMSNorm.
        tied_head: whether the output layer is the embedding, transposed.
        dtype: of activations; parameters, states and logits are float32.
        remat: recompute each layer's activations in the backward pass.
    """

    mixers: tuple[Mixer, ...] = ("sliding_window",) * 12
    vocab_size: int = 32_000
    model_dim: int = 768
    num_heads: int = 12
    num_kv_heads: int = 12
    head_dim: int = 64
    hidden_dim: int = 2048
    window: int = 2048
    capacity: int = 32_768
    slots: int = 64
    elastic: ElasticOptions = ElasticOptions()
    ttt: TTTOptions = TTTOptions()
    trellis: TrellisOptions = TrellisOptions()
    lattice: LatticeOptions = LatticeOptions()
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5
    tied_head: bool = True
    dtype: Dtype = "bfloat16"
    remat: bool = True

    def __post_init__(self):
        check_sizes(
            layers=len(self.mixers),
            vocab_size=self.vocab_size,
            hidden_dim=self.hidden_dim,
            slots=self.slots,
        )
        if not self.norm_epsilon > 0:
            raise ValueError(f"norm_epsilon must be positive, got {self.norm_epsilon}")
        for mixer in self.mixers:
            require_known("mixers", mixer, get_args(Mixer))
        require_known("dtype", self.dtype, get_args(Dtype))


def require_known(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is allowed, with the nearest that is."""
    if value in allowed:
        return
    near = difflib.get_close_matches(value, allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{name} must be one of {allowed}, got {value!r}{hint}")


def transformer(size: str = "tiny", vocab_size: int = 32_000) -> ModelConfig:
    """Transformer++: sliding-window attention in every layer, no memory."""
    require_known("size", size, tuple(SIZES))
    return dataclasses.replace(SIZES[size], vocab_size=vocab_size)


def elastic(size: str = "tiny", vocab_size: int = 32_000) -> ModelConfig:
    """The same model with Elastic Memory in its memory layer.

    The paper puts it in layer 9 of 12; the tiny model in layer 3 of 4. No parameter
    is added, so both presets of a size have equal parameters.
    """
    base = transformer(size, vocab_size)
    depth = len(base.mixers)
    memory = depth * 3 // 4 - 1
    mixers = list(base.mixers)
    mixers[memory] = "elastic_memory"
    return dataclasses.replace(base, mixers=tuple(mixers))


def _paper(heads: int) -> ModelConfig:
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


SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        mixers=("sliding_window",) * 4,
        model_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        hidden_dim=384,
        window=64,
        capacity=4096,
        elastic=ElasticOptions(order=64, memory_tokens=64, decay=0.9),
        dtype="float32",
        remat=False,
    ),
    "100m": _paper(12),
    "200m": _paper(18),
    "400m": _paper(24),
}
FAMILIES = {"transformer": transformer, "elastic": elastic}
PRESETS = tuple(f"{family}-{size}" for family in FAMILIES for size in SIZES)


def preset(name: str, vocab_size: int = 32_000) -> ModelConfig:
    """Looks a preset up: `transformer-` or `elastic-` with tiny, 100m, 200m, 400m."""
    require_known("preset", name, PRESETS)
    family, size = name.split("-")
    return FAMILIES[family](size, vocab_size)
