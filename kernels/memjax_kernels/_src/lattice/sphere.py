"""Slots on the unit sphere: arrays [..., M, V], a slot a row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.lattice.memory import Rule


def directions(
    start: Float[Array, "*B M V"], rule: Rule
) -> tuple[Float[Array, "*B M V"], Float[Array, "*B M 1"]]:
    """phi(s) and 1 / |s| of every slot: s and 1 where slots are on the sphere.

    A slot of zeros has direction 0 and norm 1: its next write fills it.
    """
    if rule.normalize:
        return start, jnp.ones_like(start[..., :1])
    inverse = _inverse_norms(start, empty=1.0)
    return start * inverse, inverse


def l2_normalize(rows: Float[Array, "*B M V"]) -> Float[Array, "*B M V"]:
    """Rows divided by their norms; a row of zeros stays."""
    # A slot of zeros has no direction; the next write gives it one.
    return rows * _inverse_norms(rows, empty=0.0)


def shrink(x: Float[Array, "*B M V"], log_gate: Float[Array, "*B 1 1"]) -> Array:
    """Soft threshold by -log_gate (eq. 18)."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) + log_gate, 0.0)


def inverse_norm(
    decay: Float[Array, "*B _ _"], across: Float[Array, "*B _ _"]
) -> Float[Array, "*B _ _"]:
    """1 / |s| of a slot made of `decay` of a unit vector and of a part across it.

    Args:
        decay: how much of the unit vector is left.
        across: squared norm of the other part, a difference that may round below 0.
    """
    return jax.lax.rsqrt(jnp.maximum(decay * decay + jnp.maximum(across, 0.0), 1e-30))


def _inverse_norms(rows, empty):
    squares = jnp.sum(rows * rows, axis=-1, keepdims=True)
    filled = squares > 0
    # The inner where keeps the root's gradient finite at zero: the outer one alone
    # would give 0 * inf.
    return jnp.where(filled, jax.lax.rsqrt(jnp.where(filled, squares, 1.0)), empty)
