"""Similarity of keys and queries, the retrieval scores of M+.

    p_j = mean_t sigmoid(q_t · k_j)

Without a gradient. Wang et al. (2025), https://arxiv.org/abs/2502.00592, section 3.2.

Shapes: B batch, T queries, M keys, K width.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from memjax_kernels._src.common import arguments, implementations
from memjax_kernels._src.sigmoid_scores import pallas_tpu, xla

Implementation = Literal["xla", "pallas_tpu"]


def sigmoid_scores(
    queries: Float[Array, "B T K"],
    query_mask: Bool[Array, "B T"],
    keys: Float[Array, "B M K"],
    *,
    implementation: Implementation | None = None,
) -> Float32[Array, "B M"]:
    """p of every key, in [0, 1]; 0 for a batch element without queries.

    Args:
        queries: q.
        query_mask: the queries that count; the others may be anything but NaN.
        keys: k.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on shapes that do not fit, or an implementation that is unknown or
            cannot run here.
    """
    sizes = arguments.check_shapes(queries=(queries, "B T K"), keys=(keys, "B M K"))
    arguments.require_array("query_mask", query_mask, "BT")
    arguments.check_mask("query_mask", query_mask, sizes["B"], sizes["T"])
    form = implementations.choose(
        "sigmoid_scores",
        implementation,
        {"xla": xla.sum_tanh, "pallas_tpu": pallas_tpu.sum_tanh_tpu},
        {"pallas_tpu": pallas_tpu.unsupported(keys)},
    )
    queries, keys = jax.lax.stop_gradient((queries, keys))
    # sigmoid(x) = (1 + tanh(x / 2)) / 2, and tanh(0) = 0: a query of zeros counts not.
    half = jnp.where(query_mask[..., None], 0.5 * queries, 0.0).astype(keys.dtype)
    count = query_mask.sum(axis=-1, dtype=jnp.float32)[:, None]
    some = jnp.where(count > 0, 1.0, 0.0)
    return 0.5 * (some + form(half, keys) / jnp.maximum(count, 1.0))
