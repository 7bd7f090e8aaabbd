"""Attention of a few queries to a cache whose rows hold all heads.

    y_h = Σ_s softmax_s(q_h · k_s,g / √K) v_s,g        g = ⌊h G / H⌋, s seen

On a TPU a row of at least 128 numbers is stored without padding; a matrix of a few
heads of 64 takes up to three times its bytes.

Shapes: B batch, Q queries of a head, S slots, H heads, G heads of keys and values, K
key.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.cached_attention import pallas_tpu
from memjax_kernels._src.common import arguments, gradients, implementations

Implementation = Literal["xla", "pallas_tpu"]


def cached_attention(
    q: Float[Array, "B Q H K"],
    keys: Float[Array, "B S J"],
    values: Float[Array, "B S J"],
    seen: Bool[Array, "B Q S"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B Q H"]]:
    """y of every query in the dtype of q, and its mass log Σ_s exp(score_s) in float32.

    Scores and sums are float32. A query that sees nothing has a finite y and a
    mass of at most -1e30: weighted by its mass it does not count.

    Args:
        q: queries; on a TPU the time grows with their number, and not the bytes read.
        keys: of all heads of a slot, J = G K; head g has the channels from g K on.
        values: likewise. Slots that no query sees must be finite too.
        seen: the slots that each query sees.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on shapes that do not fit, or an implementation that is unknown or
            cannot run here.
    """
    sizes = arguments.check_shapes(
        q=(q, "B Q H K"), keys=(keys, "B S J"), values=(values, "B S J")
    )
    arguments.require_array("seen", seen, "BQS")
    wanted = (sizes[letter] for letter in "BQS")
    arguments.check_mask("seen", seen, *wanted, axes="BQS")
    groups, rest = divmod(sizes["J"], sizes["K"])
    if rest or sizes["H"] % groups:
        raise ValueError(
            f"keys must have {sizes['K']} channels of each head, of as many heads as "
            f"divide {sizes['H']}, got {sizes['J']}"
        )
    forms = {"xla": attend, "pallas_tpu": gradients.like(attend, pallas_tpu.attend_tpu)}
    reasons = {"pallas_tpu": pallas_tpu.unsupported(q, keys)}
    form = implementations.choose("cached_attention", implementation, forms, reasons)
    return form(q, keys, values, seen)


def attend(
    q: Float[Array, "B Q H K"],
    keys: Float[Array, "B S J"],
    values: Float[Array, "B S J"],
    seen: Bool[Array, "B Q S"],
) -> tuple[Float[Array, "B Q H K"], Float[Array, "B Q H"]]:
    """`cached_attention` by XLA."""

    def split_heads(x):
        return x.reshape(*x.shape[:2], -1, q.shape[-1]).astype(q.dtype)

    y, mass = jax.nn.dot_product_attention(
        q,
        split_heads(keys),
        split_heads(values),
        mask=seen[:, None],
        return_residual=True,
    )
    # The library's is in the dtype of the queries.
    return y, mass.astype(jnp.float32)
