"""Operations and bytes of gated linear attention."""

from memjax_kernels.cost import Cost
from memjax_kernels.linear_attention.chunks import linear_cost
from memjax_kernels.linear_attention.gla.xla import CHUNK_SIZE


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
    """Work of the chunk form on whole chunks of C = 32, matrix products alone.

    Per token and head the forward pass makes C K operations for scores, in halves of
    blocks, 2 C V for their sums and 4 K V with the memory. The backward pass makes all
    but the reads, 2 C V + 2 K V, again, and twice the products. Bytes are of the
    tokens, float32 gates, the memory before and after, and the gradients of all.

    Args:
        batch: B.
        time: T.
        heads: H.
        key_dim: K.
        value_dim: V.
        itemsize: bytes of an element of the tokens.
        backward: the backward pass alone, else the forward pass alone.
    """
    return linear_cost(
        tokens=batch * time * heads,
        score_flops=CHUNK_SIZE * key_dim,
        read_flops=2 * CHUNK_SIZE * value_dim + 2 * key_dim * value_dim,
        write_flops=2 * key_dim * value_dim,
        input_bytes=itemsize * (2 * key_dim + value_dim) + 4 * key_dim,
        output_bytes=itemsize * value_dim,
        state_bytes=4 * batch * heads * key_dim * value_dim,
        backward=backward,
    )
