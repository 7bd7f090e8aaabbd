"""Operations and bytes of gated slots."""

from memjax_kernels.cost import Cost
from memjax_kernels.gated_slots.xla import CHUNK_SIZE
from memjax_kernels.linear_attention.chunks import linear_cost


def cost(
    batch: int,
    time: int,
    heads: int,
    slots: int,
    key_dim: int,
    value_dim: int,
    itemsize: int = 2,
    *,
    backward: bool = False,
) -> Cost:
    """Work of the chunk form on whole chunks of C = 32, with gates, products alone.

    Per token and head the comparison with the slots makes 2 C K + C M operations inside
    the chunk and 4 M K with the memory; the read makes C M + 2 C V, and 4 M V. The
    backward pass makes all but the reads, 2 C V + 2 M V, again, and twice the products.
    Bytes are of the tokens, float32 gates, the memory before and after, and the
    gradients of all.

    Args:
        batch: B.
        time: T.
        heads: H.
        slots: M.
        key_dim: K.
        value_dim: V.
        itemsize: bytes of an element of the tokens.
        backward: the backward pass alone, else the forward pass alone.
    """
    c, m = CHUNK_SIZE, slots
    return linear_cost(
        tokens=batch * time * heads,
        score_flops=2 * c * key_dim + 2 * c * m + 2 * m * key_dim,
        read_flops=2 * c * value_dim + 2 * m * value_dim,
        write_flops=2 * m * (key_dim + value_dim),
        input_bytes=itemsize * (2 * key_dim + value_dim + m) + 4 * m,
        output_bytes=itemsize * value_dim,
        state_bytes=4 * batch * heads * m * (key_dim + value_dim),
        backward=backward,
    )
