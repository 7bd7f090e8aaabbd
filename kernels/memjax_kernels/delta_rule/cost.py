"""Operations and bytes of the delta rule."""

from memjax_kernels.cost import Cost
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
    """Work of the chunk form on whole chunks of C = 64, matrix products alone.

    Per token and head the forward pass makes 6 K V (reads and writes of the memory) +
    6 C K + 4 C V (inside a chunk) + 2/3 C² (the inverse) operations. The backward pass
    makes all but the outputs again, twice the products, and 4 C² for the inverse.
    Bytes are of the tokens, float32 rates, the memory, and the gradients of all.

    Args:
        batch: B.
        time: T.
        heads: H.
        key_dim: K.
        value_dim: V.
        itemsize: bytes of an element of the tokens.
        backward: the backward pass alone, else the forward pass alone.
    """
    k, v, c = key_dim, value_dim, CHUNK_SIZE
    output = 2 * k * v + 2 * c * v
    products = 6 * k * v + 6 * c * k + 4 * c * v
    flops = products + 2 / 3 * c**2
    if backward:
        flops += 2 * products - output + 4 * c**2
    # Gradients have the sizes of their arguments; the final memory has none here.
    inputs = itemsize * (2 * k + v) + 4
    per_token = (2 if backward else 1) * inputs + itemsize * v
    memory = 2 * 4 * k * v
    return Cost(
        batch * heads * time * flops, batch * heads * (time * per_token + memory)
    )
