"""Configuration of the language model."""

import dataclasses
from typing import Literal, get_args

from memjax.checks import check_positive, check_sizes, require_known
from memjax.mechanisms.lattice import LatticeOptions
from memjax.mechanisms.layers.rope import RopeScaling
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
Norm = Literal["rms", "layer"]
FeedForward = Literal["swiglu", "relu"]
Positions = Literal["rope", "learned"]


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
class Architecture:
    """What differs between published decoders; the defaults are Llama 3's block.

    Attributes:
        norm: "rms" (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467, a scale)
            or "layer" (Ba et al. 2016, https://arxiv.org/abs/1607.06450, with a bias).
        norm_first: norms before the mixer and the feed-forward and one at the end;
            False puts them behind each sum, with none at the end (OPT 350m).
        feed_forward: "swiglu", or "relu" of one matrix.
        positions: "rope" in the attention layers, or "learned": a table added to the
            embeddings, as in OPT (its `offset` of 2 rows is in the table).
        learned_positions: rows of that table, 2 more than positions; 0 with "rope".
        qkv_bias: biases of queries, keys and values.
        output_bias: bias of the attention's output.
        feed_forward_bias: biases inside the feed-forward.
        rope_scaling: how a checkpoint's RoPE was stretched.
        embedding_dim: E, width of embeddings and features where it is not the model's
            (OPT 350m); two matrices lead from it into the layers and out of them.
        scale_embedding: times sqrt(D) where the head is tied.
    """

    norm: Norm = "rms"
    norm_first: bool = True
    feed_forward: FeedForward = "swiglu"
    positions: Positions = "rope"
    learned_positions: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    rope_scaling: RopeScaling | None = None
    embedding_dim: int | None = None
    scale_embedding: bool = True

    def __post_init__(self):
        require_known("norm", self.norm, get_args(Norm))
        require_known("feed_forward", self.feed_forward, get_args(FeedForward))
        require_known("positions", self.positions, get_args(Positions))
        if self.positions == "learned":
            if self.learned_positions < 3:
                raise ValueError(
                    "learned_positions must be at least 3, one position and 2 rows, "
                    f"got {self.learned_positions}"
                )
            if self.rope_scaling is not None:
                raise ValueError(
                    "rope_scaling must be None with learned positions, "
                    f"got {self.rope_scaling}"
                )
        elif self.learned_positions != 0:
            raise ValueError(
                f"learned_positions must be 0 with rope, got {self.learned_positions}"
            )
        if self.embedding_dim is not None:
            check_sizes(embedding_dim=self.embedding_dim)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder, Llama 3's by default, whose token mixer is chosen layer by layer.

    A hybrid is a config whose `mixers` differ: ("trellis",) * 3 + ("attention",).

    Attributes:
        mixers: the mechanism of each layer, first to last; its length is the depth.
        vocab_size: V; tokens are in [0, V).
        model_dim: D.
        num_heads: query heads.
        num_kv_heads: key-value heads of the attention family; divides `num_heads`.
        head_dim: width of a head, in recurrent mixers of its keys and its values.
        hidden_dim: width inside the feed-forward.
        window: tokens seen by "sliding_window"; block of "elastic_memory".
        capacity: longest history of "attention".
        slots: memory slots a head of "gsa", "abc", "trellis" and "lattice".
        elastic: options of "elastic_memory".
        ttt: options of "ttt_linear".
        trellis: options of "trellis".
        lattice: options of "lattice".
        architecture: norms, feed-forward, positions and biases of published models.
        rope_theta: base of the RoPE frequencies.
        norm_epsilon: of the norms.
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
    architecture: Architecture = Architecture()
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
        check_positive(norm_epsilon=self.norm_epsilon)
        for mixer in self.mixers:
            require_known("mixers", mixer, get_args(Mixer))
        require_known("dtype", self.dtype, get_args(Dtype))
