"""Operations and bytes of SSD."""

from memjax_kernels.cost import Cost
from memjax_kernels.linear_attention.chunks import linear_cost
from memjax_kernels.linear_attention.ssd.xla import CHUNK_SIZE


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
    """Work of the chunk form on whole chunks of C = 64, matrix products alone.

    What linear attention makes, and 2 C² operations per token and head for the sums of
    gates. Bytes are of the tokens, float32 gates, the memory before and after, and the
    gradients of all.

    Args:
        batch: B.
        time: T.
        heads: H.
        key_dim: K.
        value_dim: V.
        itemsize: bytes of an element of the tokens.
        backward: the backward pass alone, else the forward pass alone.
    """
    total = linear_cost(
        tokens=batch * time * heads,
        score_flops=2 * CHUNK_SIZE * key_dim,
        read_flops=2 * CHUNK_SIZE * value_dim + 2 * key_dim * value_dim,
        write_flops=2 * key_dim * value_dim,
        input_bytes=itemsize * (2 * key_dim + value_dim) + 4,
        output_bytes=itemsize * value_dim,
        state_bytes=4 * batch * heads * key_dim * value_dim,
        backward=backward,
    )
    # The sums are one product with a constant: backward makes it again, and one more.
    sums = batch * time * heads * 2 * CHUNK_SIZE**2
    return total + Cost(2 * sums if backward else sums, 0)
