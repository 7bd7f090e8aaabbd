"""Products of packs in a kernel, with operands rounded where a product takes them."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs, products
from memjax_kernels._src.common.products import Form


def multiply(
    x: Float[Array, "P _ _"],
    y: Float[Array, "P _ _"],
    form: Form,
    dtype: jnp.dtype,
    heads: int = 1,
) -> Float[Array, "P _ _"]:
    """The product of each head of packs, in float32.

    Mosaic rounds two registers to one in one operation where products alone read it,
    which it sees of matrices, and takes five where it is of arrays with more axes.
    """

    def product(x, y):
        x, y = x.astype(dtype), y.astype(dtype)
        if heads > 1 and form != "tn":
            y = packs.block_diagonal(y, heads)
        return products.multiply(x, y, form, dtype)

    found = jnp.stack([product(*pair) for pair in zip(x, y, strict=True)])
    return packs.diagonal_blocks(found, heads) if form == "tn" else found
