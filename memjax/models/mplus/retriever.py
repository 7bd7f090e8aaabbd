"""M+'s retriever: scores of the rows of the long-term store for a read.

    f(x) = W_2 silu(W_1 norm(x));    p_j = mean_t sigmoid(f_q(h_t) · f_k(m_j))

p_j is the score of memory token m_j for the hidden states h_t of the tokens that are
read. The norm is the layer's own, before its attention. The retriever's input is
detached, so that its loss trains nothing else. It learns to tell rows of the current
document from older ones (section 3.2):

    loss = (mean_pos -log(p + ε) + mean_neg -log(1 - p + ε)) / 2,    ε = 1e-5

As in the program, the sigmoid is inside the mean over tokens, and the log outside. Wang
et al. (2025), https://arxiv.org/abs/2502.00592.

Shapes: L layers, D model, d keys, T tokens, n rows, V hidden (2 d).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

EPSILON = 1e-5


class Retriever(NamedTuple):
    """The two matrices of f, for every layer."""

    down: Float[Array, "L D V"]
    up: Float[Array, "L V d"]


def init_retriever(
    layers: int, width: int, key_dim: int, key: PRNGKeyArray
) -> Retriever:
    """Draws both matrices, scaled by their fan-in."""
    down_key, up_key = jax.random.split(key)
    draw = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
    return Retriever(
        down=draw(down_key, (layers, width, 2 * key_dim), jnp.float32),
        up=draw(up_key, (layers, 2 * key_dim, key_dim), jnp.float32),
    )


def project(
    retriever: Retriever, layer: int, x: Float[Array, "*B D"]
) -> Float[Array, "*B d"]:
    """f(x) of one layer in float32; x is detached."""
    # The retriever's loss must not change the hidden states that it is given.
    x = jax.lax.stop_gradient(x).astype(jnp.float32)
    return jax.nn.silu(x @ retriever.down[layer]) @ retriever.up[layer]


def probabilities(
    queries: Float[Array, "*B T d"],
    keys: Float[Array, "*B n d"],
    query_mask: Bool[Array, "*B T"] | None = None,
) -> Float[Array, "*B n"]:
    """p, in [0, 1]: the mean over the queries in the mask; 0 where there is none."""
    logits = jnp.einsum("...td,...nd->...tn", queries, keys)
    p = jax.nn.sigmoid(logits)
    if query_mask is None:
        return p.mean(axis=-2)
    # The sigmoid is inside the mean over tokens, as in the program.
    total = jnp.where(query_mask[..., None], p, 0.0).sum(axis=-2)
    return total / jnp.maximum(query_mask.sum(axis=-1, dtype=p.dtype), 1.0)[..., None]


def retriever_loss(
    probability: Float[Array, "*n"],
    positive: Bool[Array, "*n"],
    negative: Bool[Array, "*n"],
) -> Float[Array, ""]:
    """Half the mean over the positive rows plus half of that over the negative ones.

    Args:
        probability: p of rows, of all layers together.
        positive: rows that this document made.
        negative: older rows; rows in neither do not count. A mean over none is 0.
    """

    def mean(values, counted):
        total = jnp.where(counted, values, 0.0).sum()
        return total / jnp.maximum(counted.sum(dtype=values.dtype), 1.0)

    found = mean(-jnp.log(probability + EPSILON), positive)
    passed = mean(-jnp.log(1.0 - probability + EPSILON), negative)
    return (found + passed) / 2
