"""Weights and gates of the recurrent mechanisms.

Shapes: B batch, D model, H heads, K width of a head.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.mechanisms.base import axes
from memjax.mechanisms.layers.projections import Adapted, linear
from memjax_kernels._src.common.cpu import weigh
from memjax_kernels._src.common.partition import channels_by_heads
from memjax_kernels._src.stored_product import Stored


class Gate(NamedTuple):
    """An affine map from the token to one or more numbers for each head."""

    weight: Float[Array, "D ..."]
    bias: Float[Array, " N"]


#: Sharding axes of a gate of heads; see `MechanismConfig.param_axes`.
AXES = Gate(weight=axes("model", "heads"), bias=axes())


def draw_weight(key: PRNGKeyArray, *shape: int) -> Float[Array, "D ..."]:
    """Weights [D, ...] of a gate, scaled by the fan-in D."""
    return jax.random.normal(key, shape) * shape[0] ** -0.5


def init_gate(key: PRNGKeyArray, shape: tuple[int, ...], start: float) -> Gate:
    """A gate with sigmoid initialised to `start`."""
    # By the bias: the weight's part has mean 0.
    bias = np.log(start / (1 - start))
    return Gate(
        weight=draw_weight(key, *shape),
        bias=jnp.full(math.prod(shape[1:]), bias, jnp.float32),
    )


def flat_product(
    x: Float[Array, "*B D"], weight: Float[Array, "D ..."] | Adapted | Stored
) -> Float[Array, "*B N"]:
    """x times a weight, in the dtype of x, all axes of the outputs as one.

    Separate axes of heads and channels would have another layout on a TPU.
    """
    if isinstance(weight, Adapted | Stored):
        return linear(x, weight).reshape(*x.shape[:-1], -1)
    return weigh(x, weight.reshape(weight.shape[0], -1).astype(x.dtype))


def linear_logits(
    x: Float[Array, "*B D"], weight: Float[Array, "D ..."], *, of_heads: bool = True
) -> Array:
    """Gate logits [*B, *H] in float32, multiplied in the dtype of x.

    Where a sequence is divided among devices, those of [B, T, D] are divided by heads.
    Unless `of_heads`, no axis of the weight is of heads.
    """
    # The product runs in the dtype of the tokens; what follows, logs and sigmoids, in
    # float32.
    logits = flat_product(x, weight)
    if of_heads and x.ndim == 3:
        logits = channels_by_heads(logits, weight.shape[1])
    return logits.astype(jnp.float32).reshape(*x.shape[:-1], *weight.shape[1:])


def low_rank_logits(
    x: Float[Array, "*B D"], narrow: Float[Array, "D R"], widen: Float[Array, "R ..."]
) -> Array:
    """`linear_logits` of two matrices [*B, *H], both products in the dtype of x."""
    inner = linear_logits(x, narrow, of_heads=False).astype(x.dtype)
    return linear_logits(inner, widen)


def gate_logits(params: Gate, x: Float[Array, "*B D"]) -> Array:
    """Logits [*B, *H] of a gate for every token, in float32."""
    return _with_bias(params, x, linear_logits(x, params.weight))


def logits_of_gates(gates: Sequence[Gate], x: Float[Array, "*B D"]) -> list[Array]:
    """`gate_logits` of gates of one shape, by one product.

    Each product with so few columns takes as long as one with many, in its gradient of
    x above all.
    """
    weights = jnp.stack([gate.weight for gate in gates], axis=-1)
    logits = jnp.moveaxis(linear_logits(x, weights), -1, 0)
    return [_with_bias(gate, x, y) for gate, y in zip(gates, logits, strict=True)]


def half_life_logits(
    half_lives: tuple[float, float], count: int, damping: float = 1.0
) -> Float[Array, " N"]:
    """Logits z of gates sigmoid(z)^(1 / damping) with half-lives in geometric steps.

    Args:
        half_lives: of the first and the last gate, in tokens.
        count: number of gates.
        damping: divisor of the log gates.
    """
    rate = damping * np.log(2) / np.geomspace(half_lives[0], half_lives[1], count)
    return jnp.asarray(-np.log(np.expm1(rate)), jnp.float32)


def _with_bias(params, x, logits):
    shape = params.weight.shape[1:]
    return logits + params.bias.reshape((1,) * (x.ndim - 1) + shape)
