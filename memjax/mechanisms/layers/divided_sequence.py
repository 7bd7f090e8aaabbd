"""Linear recurrences over tokens divided among n devices.

A segment maps the memory before it by S -> P S + U. A device reads its own tokens from
an empty memory, which gives U, and without values from the identity, which gives P. The
n pairs, as small as memories, are sent to all devices and combined in the order of the
tokens: each device then has the memory S before its own. The share of S in a read is
the read of the identity times S, as reads are linear in the memory too.

Slots of GSA and ABC decay by factors of the tokens alone (`gsa.apply_share`),
and coefficients of Elastic Memory join by a matrix (`coefficients.before_share`).

Against an exchange of tokens for heads, as other mechanisms have it
(`memjax_kernels._src.common.partition`), no activations are sent and any number of
heads will do, but the recurrence runs twice.

Shapes: B batch, T the device's tokens, D model, H heads, K key, V value.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, PyTree

from memjax_kernels._src.common.partition import SEQUENCE

F32 = jnp.float32


def on_shares(
    read: Callable[[PyTree, PyTree], tuple[PyTree, Array]],
    fixed: PyTree,
    tokens: PyTree,
) -> tuple[PyTree, Array]:
    """read(fixed, tokens), run by each device on its share of the tokens.

    Args:
        read: gives a state, of which that of the last device counts, and an output
            [B, T, ...] of the device's own tokens.
        fixed: replicated on all devices.
        tokens: [B, n T, ...] in each leaf, divided along the axis "sequence" of the
            mesh of `jax.set_mesh`.
    """

    def with_axis(fixed, tokens):
        state, y = read(fixed, tokens)
        return jax.tree.map(lambda leaf: leaf[None], state), y

    along = P(None, SEQUENCE)
    states, y = jax.shard_map(
        with_axis,
        axis_names={SEQUENCE},
        in_specs=(P(), along),
        out_specs=(P(SEQUENCE), along),
        # Types would name this axis in what kernels keep for their gradients, which is
        # divided along the other axes alone.
        check_vma=False,
    )(fixed, tokens)
    return jax.tree.map(lambda leaf: leaf[-1], states), y


def is_first() -> Bool[Array, ""]:
    """Whether a device has the first tokens, inside `on_shares`."""
    return jax.lax.axis_index(SEQUENCE) == 0


def last_of_previous(x: Float[Array, "B T D"], count: int) -> Float[Array, "B count D"]:
    """The last tokens of the device before this one, and zeros on the first."""
    ways = jax.lax.axis_size(SEQUENCE)
    pairs = [(i, i + 1) for i in range(ways - 1)]
    return jax.lax.ppermute(x[:, -count:], SEQUENCE, pairs)


def join_shares(
    join: Callable[[PyTree, PyTree], PyTree], first: PyTree, share: PyTree
) -> tuple[PyTree, PyTree]:
    """Memories after all devices and before this one, inside `on_shares`.

    Args:
        join: (memory before a device, its share) -> memory after it.
        first: the memory before all of them.
        share: what this device's tokens do to a memory.
    """
    shares = jax.lax.all_gather(share, SEQUENCE)

    def both(before, share):
        return (join(before, share), before)

    after, befores = jax.lax.scan(both, first, shares)
    return after, jax.tree.map(lambda x: x[jax.lax.axis_index(SEQUENCE)], befores)


def linear_share(apply: Callable) -> Callable:
    """`Cell.apply_share` of a cell whose memory is one matrix [B, H, K, V].

    Both the memory after a segment and its reads must be linear in the memory before
    and the values. `apply` and what is returned take the configuration first.
    """

    def apply_share(config, params, memory, q, k, v, *others):
        (batch, _, heads, _), width = v.shape, k.shape[-1]
        unit = jnp.broadcast_to(jnp.eye(width, dtype=F32), (batch, heads, width, width))
        added, y = apply(config, params, None, q, k, v, *others)
        nothing = jnp.zeros((*v.shape[:3], width), v.dtype)
        kept, of_unit = apply(config, params, unit, q, k, nothing, *others)

        def join(before, share):
            kept, added = share
            after = jnp.einsum("bhij,bhjv->bhiv", kept, before, precision="highest")
            return after + added

        first = jnp.zeros_like(added) if memory is None else memory
        after, before = join_shares(join, first, (kept, added))
        reads = jnp.einsum(
            "bthk,bhkv->bthv", of_unit, before, preferred_element_type=F32
        )
        return after, (y.astype(F32) + reads).astype(y.dtype)

    return apply_share
