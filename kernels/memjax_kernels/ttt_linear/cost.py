"""Operations and bytes of TTT-linear."""

from memjax_kernels.cost import Cost


def cost(
    batch: int,
    time: int,
    heads: int,
    width: int,
    chunk_size: int = 16,
    itemsize: int = 2,
    *,
    backward: bool = False,
) -> Cost:
    """Work of the dual form on whole mini-batches, matrix products alone.

    Per token and head the forward pass makes 6 D² operations (the layer at k, at q,
    and its step) + 4 C D inside the mini-batch; the backward pass makes them again, and
    twice as many. Layer norms are left out: some 20 D. Bytes are of the tokens, float32
    rates, the memory, and the gradients of all.

    Args:
        batch: B.
        time: T.
        heads: H.
        width: D = K = V.
        chunk_size: C.
        itemsize: bytes of an element of the tokens.
        backward: the backward pass alone, else the forward pass alone.
    """
    flops = (6 * width**2 + 4 * chunk_size * width) * (3 if backward else 1)
    # Gradients have the sizes of their arguments; the final memory has none here.
    inputs = itemsize * 3 * width + 4
    per_token = (2 if backward else 1) * inputs + itemsize * width
    memory = 2 * 4 * width * (width + 1)
    return Cost(
        batch * heads * time * flops, batch * heads * (time * per_token + memory)
    )
