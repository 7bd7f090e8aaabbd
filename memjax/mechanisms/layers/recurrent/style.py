"""Differences between published blocks around a recurrent memory."""

import dataclasses
from typing import Literal, get_args

from memjax.checks import (
    check_flags,
    check_positive,
    check_sizes,
    require_instance,
    require_known,
)

Gate = Literal["gelu", "silu", "sigmoid", "none"]
Norm = Literal["head", "group", "all", "none"]


@dataclasses.dataclass(frozen=True)
class RecurrentStyle:
    """Choices of a recurrent block; the defaults are those of the papers' block.

    Attributes:
        num_key_heads: G, heads of queries and keys; divides the heads of values, each
            read by H / G neighbours. None is H.
        conv_width: taps of the convolution; 0 is none.
        conv_value: whether values are convolved too, with silu and without a norm.
        conv_bias: whether the convolution has biases.
        query_silu: whether queries have silu, behind the convolution if there is one.
        key_silu: whether keys have.
        value_silu: whether values have that are not convolved.
        unit_norm: whether queries and keys are divided by their norms.
        query_scale: of queries, behind the norm.
        read_silu: whether reads have silu, before the norm.
        norm: RMSNorm of the reads: of each "head" with one scale for all; of the heads
            of a "group", those that read one key head, or of "all", with a scale for
            each channel; or "none".
        gate: activation of the output gate, "gelu" in its tanh form; "none" is no gate.
        gate_first: the gate before the norm (Mamba-2), not behind it.
        gate_rank: width between two matrices of the gate, the second with biases (Kimi
            Linear); None is one matrix.
        query_multiplier: of the projected queries, before the convolution (Falcon-H1).
        key_multiplier: of the projected keys.
        value_multiplier: of the projected values.
        gate_multiplier: of the gate's logits.
        cell_multiplier: of the tokens that the cell's own gates read.
    """

    num_key_heads: int | None = None
    conv_width: int = 4
    conv_value: bool = False
    conv_bias: bool = False
    query_silu: bool = True
    key_silu: bool = True
    value_silu: bool = False
    unit_norm: bool = True
    query_scale: float = 1.0
    read_silu: bool = False
    norm: Norm = "head"
    gate: Gate = "gelu"
    gate_first: bool = False
    gate_rank: int | None = None
    query_multiplier: float = 1.0
    key_multiplier: float = 1.0
    value_multiplier: float = 1.0
    gate_multiplier: float = 1.0
    cell_multiplier: float = 1.0

    def __post_init__(self):
        check_flags(self)
        check_sizes(least=0, conv_width=self.conv_width)
        if self.num_key_heads is not None:
            check_sizes(num_key_heads=self.num_key_heads)
        require_known("norm", self.norm, get_args(Norm))
        require_known("gate", self.gate, get_args(Gate))
        check_positive(query_scale=self.query_scale)
        if self.gate == "none" and self.gate_first:
            raise ValueError("gate_first needs a gate, got gate='none'")
        if self.gate_rank is not None:
            check_sizes(gate_rank=self.gate_rank)
            if self.gate == "none":
                raise ValueError("gate_rank needs a gate, got gate='none'")
        if not self.conv_width and (self.conv_value or self.conv_bias):
            raise ValueError(
                "conv_width must be at least 1 with conv_value or conv_bias, got 0"
            )

    @property
    def conv_inputs(self) -> int:
        """Inputs before a token that the convolution needs."""
        return max(self.conv_width - 1, 0)

    def key_heads(self, heads: int) -> int:
        """G of H heads.

        Raises:
            ValueError: unless G divides H.
        """
        groups = heads if self.num_key_heads is None else self.num_key_heads
        if heads % groups:
            raise ValueError(
                f"num_key_heads must divide num_heads={heads}, got {groups}"
            )
        return groups


# Available in every op.
Implementation = Literal["reference", "xla"]


@dataclasses.dataclass(frozen=True)
class RecurrentSizes:
    """Sizes of a recurrent layer.

    Attributes:
        model_dim: width of the layer's input and output.
        num_heads: H, heads of values, each with its own memory.
        key_dim: width of a head's queries and keys.
        value_dim: width of a head's values and reads.
        norm_epsilon: of the RMSNorm behind the memory.
        implementation: of a segment, with equal results: None is the fastest of the op,
            "xla" goes chunk by chunk, "reference" token by token.
        style: what published models do otherwise.
    """

    model_dim: int
    num_heads: int
    key_dim: int
    value_dim: int
    norm_epsilon: float = 1e-5
    implementation: Implementation | None = None
    style: RecurrentStyle = RecurrentStyle()

    def __post_init__(self):
        check_flags(self)
        check_sizes(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )
        check_positive(most=1.0, norm_epsilon=self.norm_epsilon)
        known = (None, *get_args(Implementation))
        require_known("implementation", self.implementation, known)
        require_instance("style", self.style, RecurrentStyle)
        self.style.key_heads(self.num_heads)

    @property
    def key_heads(self) -> int:
        """G, heads of queries and keys."""
        return self.style.key_heads(self.num_heads)
