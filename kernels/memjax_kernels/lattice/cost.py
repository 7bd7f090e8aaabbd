"""Operations and bytes of Lattice."""

from memjax_kernels.cost import Cost
from memjax_kernels.lattice.memory import Variant


def cost(
    batch: int,
    time: int,
    heads: int,
    slots: int,
    value_dim: int,
    chunk_size: int = 16,
    variant: Variant = "dec",
    itemsize: int = 2,
    *,
    backward: bool = False,
) -> Cost:
    """Work of a normalised call with whole chunks, without forgetting.

    In chunks, matrix products alone: per token and head F = 2 M V P + 2 C (4 M + 2 V)
    operations, with P = 4 products of M V for "dec", 3 for "enc" and "sim"; backward
    two for each of them, and all of them again but the read: 3 F - 2 M V - 2 C V.
    C = 1 counts elements: F = (2 P + 5) M V, backward 3 F - 2 M V. Bytes are of the
    tokens, their gradients, float32 rates, and the memories kept at every chunk's
    start, which the forward pass writes where a gradient is taken.

    Args:
        batch: B.
        time: T.
        heads: H.
        slots: M.
        value_dim: V.
        chunk_size: C.
        variant: the objective.
        itemsize: bytes of an element of the tokens.
        backward: the backward pass alone, else the forward pass alone.
    """
    m, v, c = slots, value_dim, chunk_size
    products = 4 if variant == "dec" else 3
    if c == 1:
        flops = (2 * products + 5) * m * v
        read = 2 * m * v
    else:
        flops = 2 * products * m * v + 2 * c * (4 * m + 2 * v)
        read = 2 * m * v + 2 * c * v
    elements, gates = 2 * m + 2 * v + m * v / c, 4
    if backward:
        flops = 3 * flops - read
        elements, gates = 4 * m + 3 * v + m * v / c, 8
    tokens = batch * time * heads
    return Cost(tokens * flops, tokens * (itemsize * elements + gates))
