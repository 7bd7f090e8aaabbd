"""Attention of one token to the keys and values of a cache, in which heads are joined.

    y_h = Σ_s softmax_s(q_h · k_s,g / √K) v_s,g        g = ⌊h G / H⌋, s seen

A slot of the cache is one row of all heads: on a TPU a row of 128 numbers and more is
stored without padding, where a matrix of a few heads of 64 takes up to three times its
bytes.

Shapes: B batch, S slots, H heads, G heads of keys and values, K key.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels.cached_attention import pallas_tpu
from memjax_kernels.common import arguments, gradients, implementations

Implementation = Literal["xla", "pallas_tpu"]


def cached_attention(
    q: Float[Array, "B H K"],
    keys: Float[Array, "B S J"],
    values: Float[Array, "B S J"],
    seen: Bool[Array, "B S"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "B H K"]:
    """y of every head, in the dtype of q; scores and sums are float32.

    Args:
        q: queries.
        keys: of all heads of a slot, J = G K; head g has the channels from g K on.
        values: likewise. What no query sees must be finite.
        seen: the slots that the queries see, at least one.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on shapes that do not fit, or an implementation that is unknown or
            cannot run here.
    """
    sizes = arguments.check_shapes(
        q=(q, "B H K"), keys=(keys, "B S J"), values=(values, "B S J")
    )
    arguments.check_mask("seen", seen, sizes["B"], sizes["S"])
    groups, rest = divmod(sizes["J"], sizes["K"])
    if rest or sizes["H"] % groups:
        raise ValueError(
            f"keys must have {sizes['K']} channels of each head, of as many heads as "
            f"divide {sizes['H']}, got {sizes['J']}"
        )
    forms = {
        "xla": attend,
        "pallas_tpu": gradients.like(attend, pallas_tpu.attend_tpu),
    }
    reasons = {"pallas_tpu": pallas_tpu.unsupported(q, keys)}
    form = implementations.choose("cached_attention", implementation, forms, reasons)
    return form(q, keys, values, seen)


def attend(
    q: Float[Array, "B H K"],
    keys: Float[Array, "B S J"],
    values: Float[Array, "B S J"],
    seen: Bool[Array, "B S"],
) -> Float[Array, "B H K"]:
    """`cached_attention` by XLA."""
    apart = lambda x: x.reshape(*x.shape[:2], -1, q.shape[-1]).astype(q.dtype)
    mask = seen[:, None, None]
    y = jax.nn.dot_product_attention(q[:, None], apart(keys), apart(values), mask=mask)
    return jnp.asarray(y[:, 0])
