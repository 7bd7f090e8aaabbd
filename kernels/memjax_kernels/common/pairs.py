"""Two heads side by side, as the TPU kernels take them.

A register of a TPU has 128 lanes, and a head often 64 channels. Tokens lie in memory as
[C, H D], so that two neighbouring heads fill the lanes, and are read and written there
without a copy. What is computed of them has tokens along the lanes instead: the first
head's C, then the second's. Sums over slots are then sums over sublanes, which cost
little, and the gates of tokens are rows.

Shapes: P pairs, C tokens, D channels of a head; C2 and D2 are those of both. A product
of two heads at once needs one operand whose other half is zero: `diagonal`.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

F32 = jnp.float32


def first(shape: tuple[int, ...]) -> Bool[Array, "..."]:
    """True in the first head's lanes."""
    return lane(shape) < shape[-1] // 2


def lane(shape: tuple[int, ...]) -> Array:
    """The number of each lane."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def diagonal(x: Float[Array, "P C D2"]) -> Float[Array, "P C2 D2"]:
    """Each head's rows, the other's lanes cleared."""
    if x.dtype == jnp.bfloat16 and x.shape[1] % 16 == 0:
        # A word holds two rows: one AND clears both.
        words = pltpu.bitcast(x, jnp.int32)
        mask = jnp.where(first(words.shape), -1, 0)
        parts = jnp.concatenate([words & mask, words & ~mask], axis=1)
        return pltpu.bitcast(parts, jnp.bfloat16)
    here, zero = first(x.shape), jnp.zeros_like(x)
    return jnp.concatenate([jnp.where(here, x, zero), jnp.where(here, zero, x)], axis=1)


def own(x: Float[Array, "P C2 D2"]) -> Float[Array, "P C D2"]:
    """Undoes `diagonal`: of each head's rows the head's own lanes."""
    half = x.shape[1] // 2
    top, low = x[:, :half], x[:, half:]
    return jnp.where(first(top.shape), top, low)


def widen(
    x: Float[Array, "P _ 1"], y: Float[Array, "P _ 1"], width: int
) -> Float[Array, "P _ width"]:
    """A number of each head, in all of the head's lanes."""
    return jnp.where(first((*x.shape[:-1], width)), x, y)


def over_slots(reduce, x):
    """A reduction over slots, which lie along sublanes."""
    return reduce(x, axis=-2, keepdims=True)


def sum_slots(x: Float[Array, "P M L"]) -> Float[Array, "P 1 L"]:
    """Sums over slots."""
    return over_slots(jnp.sum, x)
