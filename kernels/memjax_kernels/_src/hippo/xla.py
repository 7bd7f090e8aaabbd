"""Three equal ways to run the block recurrence, as matrix products.

    C_{j+1} = P_j C_j + K_j F_j        M_j = R C_j        (eqs. 6 and 8)

`scan` takes the blocks in order. `associative` combines (P, K F) pairs in a tree.
`direct` maps the whole history to each M_j, since the transitions telescope:
M_j = R K(0..t_j) F.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax_kernels._src.hippo import on_demand
from memjax_kernels._src.hippo.bank import HippoBank

Coefficients = Float[Array, "B N X"]
Memory = Float[Array, "B n M X"]


class Matrices(NamedTuple):
    """How one block moves the memory on; `block` counts from the call's first."""

    absorb: Callable  # (block, C [B, N, X], F [B, L, X]) -> [B, N, X]: P C + K F
    transition: Callable  # (block) -> [R, N, N]: P
    write: Callable  # (block, F [B, L, X]) -> [B, N, X]: K F


def banked(bank: HippoBank, start: Int[Array, " R"], length: int) -> Matrices:
    """Looks matrices up; all rows share `start`, and the bank covers the blocks."""
    # The bank has one matrix a block: all batch elements must be at the same one.
    first = start[0] // length
    transitions, kernels = jnp.asarray(bank.transition), jnp.asarray(bank.kernel)

    def transition(block):
        return transitions[first + block][None]

    def write(block, f):
        return on_demand.product(kernels[first + block][None], f)

    return Matrices(
        absorb=lambda block, c, f: (
            on_demand.product(transition(block), c) + write(block, f)
        ),
        transition=transition,
        write=write,
    )


def computed(order: int, start: Int[Array, " R"], length: int) -> Matrices:
    """Computes matrices where they are needed.

    Blocks that are no shorter than the order are written through their own nodes.
    """

    def edges(block):
        return (start + block * length, start + (block + 1) * length)

    def advance(block, c):
        return on_demand.advance(*edges(block), c)

    def transition(block):
        eye = jnp.broadcast_to(jnp.eye(order), (start.shape[0], order, order))
        return advance(block, eye)

    def write(block, f):
        kernel = on_demand.kernel(order, *edges(block), length)
        return on_demand.product(kernel, f)

    def absorb(block, c, f):
        return advance(block, c) + write(block, f)

    def write_at_nodes(block, f):
        first, last = edges(block)
        factor = on_demand.from_nodes(order, first, last, last)
        return on_demand.product(factor, on_demand.block_at_nodes(order, f))

    def absorb_at_nodes(block, c, f):
        past, own = on_demand.to_nodes(c), on_demand.block_at_nodes(order, f)
        return on_demand.absorb(*edges(block), past, own)

    if order > length:
        return Matrices(absorb, transition, write)
    return Matrices(absorb_at_nodes, transition, write_at_nodes)


def scan(
    features: Float[Array, "B n L X"],
    coefficients: Coefficients,
    count: Int[Array, " B"],
    reconstruction: Float[Array, "M N"],
    matrices: Matrices,
) -> tuple[Coefficients, Memory]:
    """Blocks one after the other, with one state in memory."""

    # Matrices are cheap to compute again and large to save for the backward pass.
    absorb = jax.checkpoint(matrices.absorb)

    def read_and_absorb(c, item):
        block, f = item
        memory = read(reconstruction, c)
        # Every block is read, but one that is not full is absorbed by a later call.
        complete = (block < count)[:, None, None]
        return jnp.where(complete, absorb(block, c, f), c), memory

    blocks = jnp.arange(features.shape[1], dtype=jnp.int32)
    c, memory = jax.lax.scan(
        read_and_absorb, coefficients, (blocks, jnp.moveaxis(features, 1, 0))
    )
    return c, jnp.moveaxis(memory, 0, 1)


def associative(
    features: Float[Array, "B n L X"],
    coefficients: Coefficients,
    count: Int[Array, " B"],
    reconstruction: Float[Array, "M N"],
    matrices: Matrices,
) -> tuple[Coefficients, Memory]:
    """Combines (P, U) pairs in a tree of depth log n, with all states in memory.

    By the compiler's estimates for a v5e with a bank, L = 2048, n = 16, N = 64 and 1024
    channels, it takes 17.0 cycles a token where `scan` takes 23.8, though it makes more
    operations.
    """
    blocks = jnp.arange(features.shape[1], dtype=jnp.int32)
    order = coefficients.shape[1]
    complete = (blocks[:, None] < count[None])[:, :, None, None]
    transitions = jax.vmap(matrices.transition)(blocks)
    # Where a block is not complete the state stays: P = I, U = 0.
    transitions = jnp.where(complete, transitions, jnp.eye(order)[None, None])
    written = jax.vmap(matrices.write)(blocks, jnp.moveaxis(features, 1, 0))
    written = jnp.where(complete, written, 0.0)

    def combine(early, late):
        p, u = early
        p_late, u_late = late
        multiply = jax.vmap(on_demand.product)
        return multiply(p_late, p), multiply(p_late, u) + u_late

    products, sums = jax.lax.associative_scan(combine, (transitions, written))
    after = jax.vmap(on_demand.product, (0, None))(products, coefficients) + sums
    states = jnp.concatenate([coefficients[None], after])
    memory = jax.vmap(lambda c: read(reconstruction, c))(states[:-1])
    return states[-1], jnp.moveaxis(memory, 0, 1)


def direct(
    features: Float[Array, "B n L X"],
    coefficients: Coefficients,
    start: Int[Array, " R"],
    count: Int[Array, " R"],
    reconstruction: Float[Array, "M N"],
) -> tuple[Coefficients, Memory]:
    """Maps the history to the memory tokens of each block; forms no transition."""
    b, blocks, length, x = features.shape
    order = coefficients.shape[1]
    history = features.reshape(b, blocks * length, x)

    # Its factor of the transition does not depend on the block, and is applied once.
    past = on_demand.to_nodes(coefficients)
    einsum = functools.partial(jnp.einsum, precision=on_demand.HIGHEST)

    def maps(number):
        """Of the past and the history to the coefficients after some blocks."""
        stop = start + number * length
        kernel = on_demand.kernel(order, start, stop, blocks * length)
        return on_demand.from_nodes(order, jnp.zeros_like(start), start, stop), kernel

    # The maps are cheap to compute again and large to save for the backward pass.
    @jax.checkpoint
    def tokens_of(block, past, history):
        moved, kernel = maps(jnp.minimum(block, count))
        from_history = einsum("mn,rnt->rmt", reconstruction, kernel)
        from_past = einsum("mn,rnq->rmq", reconstruction, moved)
        new = on_demand.product(from_history, history)
        return new + on_demand.product(from_past, past)

    @jax.checkpoint
    def coefficients_after(past, history):
        moved, kernel = maps(count)
        return on_demand.product(moved, past) + on_demand.product(kernel, history)

    memory = jax.lax.map(
        lambda block: tokens_of(block, past, history),
        jnp.arange(blocks, dtype=jnp.int32),
    )
    return coefficients_after(past, history), jnp.moveaxis(memory, 0, 1)


def read(
    reconstruction: Float[Array, "M N"], coefficients: Coefficients
) -> Float[Array, "B M X"]:
    """Memory tokens R C (eq. 8)."""
    return on_demand.product(reconstruction[None], coefficients)
