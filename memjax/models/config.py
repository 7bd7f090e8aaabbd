"""Configuration of the language model."""

import dataclasses
import difflib
from typing import Literal, get_args

from memjax.mechanisms.base import check_sizes
from memjax.mechanisms.lattice import LatticeOptions
from memjax.mechanisms.trellis import TrellisOptions
from memjax.mechanisms.ttt_linear import TTTOptions

RecurrentMixer = Literal[
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
Mixer = Literal["attention", "sliding_window", "elastic_memory", RecurrentMixer]
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

    A hybrid is a config whose `mixers` differ: ("trellis",) * 3 + ("attention",).

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
