"""Configuration of the language model."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal, get_args

from memjax.checks import (
    check_flags,
    check_positive,
    check_sizes,
    require_instance,
    require_known,
)
from memjax.config_io import TYPES
from memjax.mechanisms import (
    MECHANISMS,
    Mechanism,
    MechanismConfig,
    SlidingWindowConfig,
)
from memjax.mechanisms.config import require_config
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.models.language_model.hidden.router import ExpertsConfig

Dtype = Literal["float32", "bfloat16"]
Norm = Literal["rms", "layer"]
RematSaves = Literal["input", "attention", "products"]

FeedForward = Literal["swiglu", "geglu", "relu", "relu2", "none"]

#: Tokens that a model without a window reads at a time.
PIECE = 2048


def _mechanisms() -> tuple[type, ...]:
    """Mechanism configs that a file may name."""
    return tuple(MECHANISMS.values())


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Differences between published decoders; the defaults are Llama 3's block.

    Attributes:
        norm: "rms" (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, a scale)
            or "layer" (Ba et al. 2016, https://arxiv.org/abs/1607.06450, with a bias).
        norm_first: norms before the mechanism and the feed-forward and one at the end;
            False puts them behind each sum, with none at the end (OPT 350m).
        norm_outputs: norms of what the mechanism and the feed-forward give, before it
            is added, and one at the end: with those of `norm_first` (Gemma 3), or
            instead of norms before or behind (OLMo 2).
        feed_forward: "swiglu"; "geglu", with the tanh form of GELU in the place of
            SiLU; "relu" or its square "relu2", of one matrix; or "none".
        learned_positions: rows of a table of positions added to the embeddings, 2 more
            than positions (OPT's `offset`); 0 is no table, as with RoPE.
        feed_forward_bias: biases inside the feed-forward.
        embedding_dim: E, width of embeddings and features where it is not the model's
            (OPT 350m); two matrices lead from it into the layers and out of them.
        scale_embedding: times sqrt(D) where the head is tied.
        embedding_multiplier: of embeddings.
        residual_multiplier: of what a mechanism or a feed-forward adds (Granite 4).
        logits_multiplier: of logits.
        logits_cap: c of logits c tanh(logits / c); None is none.
        feed_forward_multipliers: of the gate's logits and of the output (Falcon-H1).
    """

    norm: Norm = "rms"
    norm_first: bool = True
    norm_outputs: bool = False
    feed_forward: FeedForward = "swiglu"
    learned_positions: int = 0
    feed_forward_bias: bool = False
    embedding_dim: int | None = None
    scale_embedding: bool = True
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    logits_cap: float | None = None
    feed_forward_multipliers: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self):
        require_known("norm", self.norm, get_args(Norm))
        require_known("feed_forward", self.feed_forward, get_args(FeedForward))
        if self.learned_positions < 0 or self.learned_positions in (1, 2):
            raise ValueError(
                "learned_positions must be 0, or at least 3, one position and 2 rows, "
                f"got {self.learned_positions}"
            )
        if self.embedding_dim is not None:
            check_sizes(embedding_dim=self.embedding_dim)
        if self.logits_cap is not None:
            check_positive(logits_cap=self.logits_cap)

    @property
    def norm_last(self) -> bool:
        """Whether a norm follows the last layer."""
        return self.norm_first or self.norm_outputs


@dataclasses.dataclass(frozen=True)
class BlockStyle:
    """Norms and feed-forward of one layer, where the layers of a model differ.

    Attributes:
        norm_first: norms before the mechanism and the feed-forward; see `Architecture`.
        norm_outputs: norms of what the two give.
        feed_forward: "swiglu", "geglu", "relu", "relu2" (the square of ReLU, without a
            gate) or "none".
        hidden_dim: width inside the feed-forward; None is the model's.
        experts: a mixture of such feed-forwards, of widths of its own, in the place of
            one; None is none.
    """

    norm_first: bool = True
    norm_outputs: bool = False
    feed_forward: FeedForward = "swiglu"
    hidden_dim: int | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self):
        check_flags(self)
        require_known("feed_forward", self.feed_forward, get_args(FeedForward))
        if self.hidden_dim is not None:
            check_sizes(hidden_dim=self.hidden_dim)
        if self.experts is not None:
            require_instance("experts", self.experts, ExpertsConfig)
            if self.feed_forward == "none":
                raise ValueError("experts must be None with feed_forward='none'")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder, Llama 3's by default, with a mechanism for each layer.

    Attributes:
        mechanisms: one period of the layers' mechanisms, first to last. A hybrid is
            (trellis, trellis, trellis, attention): every fourth layer attends.
        num_layers: the depth; layer i has mechanisms[i % len(mechanisms)].
        styles: norms and feed-forward of each of `mechanisms`; empty is the
            architecture's for all.
        vocab_size: V; tokens are in [0, V).
        model_dim: D, also of every mechanism.
        hidden_dim: width inside the feed-forward.
        architecture: norms, feed-forward and positions of published models.
        norm_epsilon: of the norms.
        tied_head: whether the output layer is the embedding, transposed.
        dtype: of activations; states and logits are float32, and parameters are drawn
            so (`memjax.load` can keep a file's bfloat16).
        remat: recompute each layer's activations in the backward pass.
        remat_saves: what is kept of a layer for that: its "input" alone; on a TPU what
            "attention" reads too, as much again, or what Trellis reads and memories
            between its tokens, twice as much, so that these kernels run once; or the
            "products" with weights and what any kernel gives, which leaves little to
            compute again.
        scan_layers: run equal layers by one loop, in calls of more than one token: the
            time to trace and compile is that of one period of layers at any depth.
            The loop copies parameters and memories once a call.
    """

    mechanisms: tuple[MechanismConfig, ...] = dataclasses.field(
        default=(SlidingWindowConfig(768, 12, 12, 64),), metadata={TYPES: _mechanisms}
    )
    num_layers: int = 12
    styles: tuple[BlockStyle, ...] = ()
    vocab_size: int = 32_000
    model_dim: int = 768
    hidden_dim: int = 2048
    architecture: Architecture = Architecture()
    norm_epsilon: float = 1e-5
    tied_head: bool = True
    dtype: Dtype = "bfloat16"
    remat: bool = True
    remat_saves: RematSaves = "attention"
    scan_layers: bool = False

    def __post_init__(self):
        check_flags(self)
        require_instance("mechanisms", self.mechanisms, tuple)
        check_sizes(
            mechanisms=len(self.mechanisms),
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            hidden_dim=self.hidden_dim,
        )
        if len(self.styles) not in (0, len(self.mechanisms)):
            raise ValueError(
                f"styles must be empty or one for each of {len(self.mechanisms)} "
                f"mechanisms, got {len(self.styles)}"
            )
        if self.architecture.feed_forward_bias and any(s.experts for s in self.styles):
            raise ValueError(
                "architecture.feed_forward_bias must be False with experts"
            )
        check_positive(most=1.0, norm_epsilon=self.norm_epsilon)
        require_known("dtype", self.dtype, get_args(Dtype))
        require_known("remat_saves", self.remat_saves, get_args(RematSaves))
        if len(self.mechanisms) > self.num_layers:
            raise ValueError(
                f"num_layers must be at least {len(self.mechanisms)}, the period of "
                f"the mechanisms, got {self.num_layers}"
            )
        for i, mechanism in enumerate(self.mechanisms):
            require_config(f"mechanisms[{i}]", mechanism)
            if mechanism.model_dim != self.model_dim:
                raise ValueError(
                    f"mechanisms[{i}].model_dim must be the model's {self.model_dim}, "
                    f"got {mechanism.model_dim}"
                )
            heads = mechanism.attention
            theta = None if heads is None else heads.rope_theta
            if self.architecture.learned_positions and theta is not None:
                raise ValueError(
                    f"mechanisms[{i}].rope_theta must be None with learned positions, "
                    f"got {theta}"
                )

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes and mechanisms that a model is known by."""
        names = tuple(mechanism.name for mechanism in self.mechanisms)
        sizes = {"layers": self.num_layers, "width": self.model_dim}
        return sizes | {"vocab_size": self.vocab_size, "mechanisms": names}

    @property
    def layers(self) -> tuple[MechanismConfig, ...]:
        """The mechanism of every layer, first to last."""
        period = len(self.mechanisms)
        return tuple(self.mechanisms[i % period] for i in range(self.num_layers))

    def style(self, layer: int) -> BlockStyle:
        """Norms and feed-forward of a layer."""
        if self.styles:
            return self.styles[layer % len(self.styles)]
        all_layers = self.architecture
        return BlockStyle(
            all_layers.norm_first, all_layers.norm_outputs, all_layers.feed_forward
        )

    @property
    def window(self) -> int:
        """Preferred number of tokens per call.

        The shortest window or block of the mechanisms; without one, `PIECE` tokens or
        what full attention holds, if that is less.
        """
        windows = [m.tokens_per_call for m in self.mechanisms if m.tokens_per_call]
        return min(windows or [PIECE, self.capacity or PIECE])

    @property
    def capacity(self) -> int | None:
        """Length of the longest text, bounded by full attention; None without it."""
        lengths = [m.max_length for m in self.mechanisms if m.max_length]
        return min(lengths, default=None)

    @property
    def heads(self) -> HeadsConfig:
        """Sizes of the attention family's projections, where all layers have the same.

        Raises:
            ValueError: if a layer has none, or layers differ.
        """
        sizes = {m.attention.heads if m.attention else None for m in self.mechanisms}
        (heads, *others) = sizes
        if others or heads is None:
            raise ValueError(
                "mechanisms must all have the same attention heads, got "
                f"{self.mechanisms}"
            )
        return heads


def period(layers: Iterable[Any]) -> tuple[Any, ...]:
    """The shortest beginning of `layers` that, repeated, gives them all."""
    layers = tuple(layers)
    length = len(layers)

    def repeats(p):
        return all(layers[i] == layers[i % p] for i in range(length))

    return layers[: next(filter(repeats, range(1, length + 1)))]


def kinds(config: ModelConfig) -> str:
    """Names of the mechanisms' configurations, for an error."""
    return ", ".join(
        dict.fromkeys(type(mechanism).__name__ for mechanism in config.mechanisms)
    )


@functools.lru_cache(maxsize=256)
def build_once(mechanism: MechanismConfig) -> Mechanism:
    """The mechanism of a config, the same one for equal configs.

    jit compares the functions of a model: two models of one config share programs.
    """
    return mechanism.build()
