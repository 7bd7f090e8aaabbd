"""Two equal ways to compute the block recurrence by matrix products.

    C_{j+1} = P_j C_j + K_j F_j        M_j = R C_j        (eqs. 6 and 8)

`scan` takes the blocks in order. `direct` maps the whole history to each M_j, since the
transitions telescope: M_j = R K(0..t_j) F.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels.hippo import on_demand
from memjax_kernels.hippo.bank import HippoBank

Coefficients = Float[Array, "B N X"]
Memory = Float[Array, "B n M X"]


class Matrices(NamedTuple):
    """The matrices of each block, counted from the first of the call.

    Attributes:
        advance: (block, C [B, N, X]) -> P C [B, N, X].
        kernel: (block) -> K [R, N, L].
    """

    advance: Callable
    kernel: Callable


def banked(bank: HippoBank, start: Int[Array, " R"], length: int) -> Matrices:
    """From a bank that covers the blocks; all batch elements share `start`."""
    first = start[0] // length
    transitions, kernels = jnp.asarray(bank.transition), jnp.asarray(bank.kernel)
    return Matrices(
        advance=lambda block, c: on_demand.product(transitions[first + block][None], c),
        kernel=lambda block: kernels[first + block][None],
    )


def computed(order: int, start: Int[Array, " R"], length: int) -> Matrices:
    """Computed where they are needed; none is kept."""

    def advance(block, c):
        begin = start + block * length
        return on_demand.advance(begin, begin + length, c)

    def kernel(block):
        begin = start + block * length
        return on_demand.kernel(order, begin, begin + length, length)

    return Matrices(advance, kernel)


def scan(
    features: Float[Array, "B n L X"],
    coefficients: Coefficients,
    count: Int[Array, " B"],
    reconstruction: Float[Array, "M N"],
    matrices: Matrices,
) -> tuple[Coefficients, Memory]:
    """Takes the blocks one after the other; keeps one state."""

    # For the backward pass matrices are cheap to recompute and large to keep.
    @jax.checkpoint
    def absorb(block, c, f):
        written = on_demand.product(matrices.kernel(block), f)
        return matrices.advance(block, c) + written

    def read_and_absorb(c, item):
        block, f = item
        memory = read(reconstruction, c)
        complete = (block < count)[:, None, None]
        return jnp.where(complete, absorb(block, c, f), c), memory

    blocks = jnp.arange(features.shape[1], dtype=jnp.int32)
    c, memory = jax.lax.scan(
        read_and_absorb, coefficients, (blocks, jnp.moveaxis(features, 1, 0))
    )
    return c, jnp.moveaxis(memory, 0, 1)


def direct(
    features: Float[Array, "B n L X"],
    coefficients: Coefficients,
    start: Int[Array, " R"],
    count: Int[Array, " R"],
    reconstruction: Float[Array, "M N"],
) -> tuple[Coefficients, Memory]:
    """Maps the history to the memory tokens of each block, without transitions."""
    b, blocks, length, x = features.shape
    order = coefficients.shape[1]
    history = features.reshape(b, blocks * length, x)

    past = on_demand.to_nodes(coefficients)
    einsum = functools.partial(jnp.einsum, precision=on_demand.HIGHEST)

    # For the backward pass the maps are cheap to recompute and large to keep.
    @jax.checkpoint
    def tokens_of(block, past, history):
        stop = start + jnp.minimum(block, count) * length
        kernel = on_demand.kernel(order, start, stop, blocks * length)
        moved = on_demand.from_nodes(order, start, stop)
        from_history = einsum("mn,rnt->rmt", reconstruction, kernel)
        from_past = einsum("mn,rnq->rmq", reconstruction, moved)
        new = on_demand.product(from_history, history)
        return new + on_demand.product(from_past, past)

    @jax.checkpoint
    def coefficients_after(past, history):
        stop = start + count * length
        kernel = on_demand.kernel(order, start, stop, blocks * length)
        moved = on_demand.product(on_demand.from_nodes(order, start, stop), past)
        return moved + on_demand.product(kernel, history)

    memory = jax.lax.map(
        lambda block: tokens_of(block, past, history),
        jnp.arange(blocks, dtype=jnp.int32),
    )
    return coefficients_after(past, history), jnp.moveaxis(memory, 0, 1)


def read(
    reconstruction: Float[Array, "M N"], coefficients: Coefficients
) -> Float[Array, "B M X"]:
    """Memory tokens R C (eq. 8)."""
    return jnp.einsum(
        "mn,bnx->bmx", reconstruction, coefficients, precision=on_demand.HIGHEST
    )
