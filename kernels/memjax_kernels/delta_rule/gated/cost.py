"""Operations and bytes of the gated delta rule."""

from memjax_kernels.cost import Cost
from memjax_kernels.delta_rule.cost import cost as delta_rule_cost
from memjax_kernels.delta_rule.xla import CHUNK_SIZE


def cost(
    batch: int,
    time: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    itemsize: int = 2,
    *,
    backward: bool = False,
) -> Cost:
    """The delta rule's work, and that of the gates.

    Sums of gates between the tokens of a chunk are 2 C² operations a token and head,
    and twice that backwards. The arguments are those of `delta_rule.cost`.
    """
    sizes = (batch, time, heads, key_dim, value_dim, itemsize)
    ungated = delta_rule_cost(*sizes, backward=backward)
    tokens = batch * time * heads
    passes = 2 if backward else 1
    return ungated + Cost(2.0 * CHUNK_SIZE**2 * tokens * passes, 4.0 * tokens * passes)
