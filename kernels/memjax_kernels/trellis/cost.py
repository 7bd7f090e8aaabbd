"""Operations and bytes of Trellis."""

from memjax_kernels.cost import Cost


def cost(
    batch: int,
    time: int,
    heads: int,
    slots: int,
    key_dim: int,
    value_dim: int | None,
    chunk_size: int = 64,
    itemsize: int = 2,
    *,
    backward: bool = False,
) -> Cost:
    """Work of a call with whole chunks, matrix products alone.

    A pass over tokens of width D in chunks of C makes, per token and head, 6 M D +
    2 C (D + M) operations, and its backward pass from kept memories 16 M D + 6 C D +
    4 C M; reads that the second pass needs again add 2 C M. Bytes are of the tokens,
    their gradients, float32 gates of each pass, and the memories kept at every chunk's
    start.

    Args:
        batch: B.
        time: T.
        heads: H.
        slots: M.
        key_dim: K.
        value_dim: V, or None for `trellis_pass`.
        chunk_size: C.
        itemsize: bytes of an element of the tokens.
        backward: the backward pass alone, else the forward pass alone.
    """
    m, c = slots, chunk_size
    widths = [key_dim] if value_dim is None else [key_dim, value_dim]
    inputs = key_dim + sum(widths) + m
    output = widths[-1] if len(widths) == 2 else m
    flops, kept = 0, 0
    for d in widths:
        flops += 16 * m * d + 6 * c * d + 4 * c * m if backward else 0
        flops += 0 if backward else 6 * m * d + 2 * c * (d + m)
        kept += m * d / c
    if backward and len(widths) == 2:
        flops += 2 * c * m
    # Gradients have the sizes of their arguments.
    elements = 2 * inputs + output if backward else inputs + output
    gates = 8 * len(widths) * (2 if backward else 1)
    tokens = batch * time * heads
    return Cost(tokens * flops, tokens * (itemsize * (elements + kept) + gates))
