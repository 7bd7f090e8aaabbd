"""Sizes of the attention family's heads."""

import dataclasses
from typing import Literal, get_args

from memjax.checks import (
    check_flags,
    check_positive,
    check_sizes,
    require_instance,
    require_known,
)
from memjax.mechanisms.layers.rope import RopeScaling

QKNorm = Literal["none", "head", "width"]


def mean_keys(length: int, window: int) -> float:
    """Mean number of the last `window` positions that exist, over `length` queries."""
    seen = min(length, window)
    return (seen * (seen + 1) / 2 + (length - seen) * window) / length


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """Sizes of the projections.

    Attributes:
        model_dim: width of the layer's input and output.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads` (GQA).
        head_dim: width of a head, even (RoPE turns pairs).
        rope_theta: base of the RoPE frequencies; 500,000 in Llama 3. None is no RoPE:
            the model adds positions itself.
        rope_scaling: of the frequencies, for longer texts.
        rope_dim: R, the first channels of a head, even, that RoPE turns (Qwen3.5); None
            is all.
        qkv_bias: whether queries, keys and values have biases.
        output_bias: whether the output has one.
        qk_norm: RMSNorm of queries and of keys, before RoPE: "head" of each by itself
            (Qwen3, Gemma 3), "width" of all heads together (OLMo 2), or "none".
        qk_norm_epsilon: of that norm.
        query_scale: of the scores; None is K^-1/2.
        output_gate: whether reads are multiplied by the sigmoid of a projection of the
            token, a number for each channel (Qwen3.5).
    """

    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float | None = 500_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = "none"
    qk_norm_epsilon: float = 1e-6
    query_scale: float | None = None
    rope_dim: int | None = None
    output_gate: bool = False

    def __post_init__(self):
        check_flags(self)
        check_sizes(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads={self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        require_known("qk_norm", self.qk_norm, get_args(QKNorm))
        check_positive(most=1.0, qk_norm_epsilon=self.qk_norm_epsilon)
        if self.query_scale is not None:
            check_positive(query_scale=self.query_scale)
        if self.rope_scaling is not None:
            require_instance("rope_scaling", self.rope_scaling, RopeScaling)
        if self.rope_theta is not None:
            check_positive(rope_theta=self.rope_theta)
            # YaRN divides by its logarithm; below 1 frequencies would go to infinity.
            yarn = self.rope_scaling is not None and self.rope_scaling.kind == "yarn"
            if self.rope_theta < 1 or (self.rope_theta == 1 and yarn):
                raise ValueError(
                    "rope_theta must be at least 1, and above 1 with YaRN, got "
                    f"{self.rope_theta}"
                )
        if self.rope_dim is not None:
            check_sizes(rope_dim=self.rope_dim)
            if self.rope_dim % 2 or self.rope_dim > self.head_dim:
                raise ValueError(
                    f"rope_dim must be even and at most head_dim={self.head_dim}, got "
                    f"{self.rope_dim}"
                )
        if self.rope_theta is None and self.rope_scaling is not None:
            raise ValueError("rope_scaling needs a rope_theta, got None")

    @property
    def attention(self) -> "HeadsConfig":
        """Itself: see `MechanismConfig`."""
        return self

    @property
    def heads(self) -> "HeadsConfig":
        """These sizes without those of the mechanism."""
        names = [field.name for field in dataclasses.fields(HeadsConfig)]
        return HeadsConfig(**{name: getattr(self, name) for name in names})
