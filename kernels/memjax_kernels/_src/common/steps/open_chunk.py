"""Tokens of the open chunk, for memories whose gradients are taken at a chunk's start.

Between two calls a state keeps the memory at the chunk's start and the tokens since;
the memory after these tokens follows from both. A call puts them in front of its own
tokens, so that every chunk is computed from its start, and drops their reads. A step
reads the memory and the open tokens, and writes the memory where its token completes
the chunk.

A state has its tokens as float32 [B, H, C, ...], at their places in the chunk and zeros
behind, which an op treats as no token; None where C = 1.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from memjax_kernels._src.common.chunks import where
from memjax_kernels._src.common.products import EXACT, Multiply
from memjax_kernels._src.common.steps.head_kernel import by_heads
from memjax_kernels._src.common.steps.in_place import change_if

# A NamedTuple of arrays.
Tokens = TypeVar("Tokens")


def empty(size: int, token: Tokens) -> Tokens | None:
    """An open chunk without tokens, of the shapes [B, H, ...] of one."""
    if size == 1:
        return None
    return jax.tree.map(
        lambda shape: jnp.zeros((*shape[:2], size, *shape[2:]), jnp.float32),
        token,
        is_leaf=lambda x: type(x) is tuple,
    )


def put_in_front(
    chunks: Tokens, tokens: Tokens | None, position: Int[Array, " B"] | None
) -> Tokens:
    """The open tokens before those of a call.

    Args:
        chunks: [B, n, C, H, ...] of `chunks.split`, at their places behind the others.
        tokens: of the state.
        position: their number; None is 0.
    """
    if tokens is None or position is None:
        return chunks
    size = jax.tree.leaves(tokens)[0].shape[2]
    here = jnp.arange(size)[None] < position[:, None]

    def join(x, before):
        before = jnp.moveaxis(before, 1, 2).astype(x.dtype)
        opened = here.reshape(*here.shape, *[1] * (before.ndim - 2))
        return x.at[:, 0].set(jnp.where(opened, before, x[:, 0]))

    return jax.tree.map(join, chunks, tokens)


def last(chunks: Tokens, time: int, position: Int[Array, " B"] | None) -> Tokens | None:
    """The tokens that stay open after a call.

    Args:
        chunks: [B, n, C, H, ...] of `put_in_front`, with all tokens.
        time: tokens of the call.
        position: open tokens before it; None is 0.
    """
    number, size = jax.tree.leaves(chunks)[0].shape[1:3]
    if size == 1:
        return None

    def of_last(x):
        if position is None:
            # Where the last chunk is full, none stays.
            x = x[:, time // size] if time % size else jnp.zeros_like(x[:, 0])
        else:
            end = position + time
            at = jnp.minimum(end // size, number - 1)
            x = jax.vmap(lambda x, i: x[i])(x, at)
            x = where(end % size > 0, x, jnp.zeros_like(x))
        return jnp.moveaxis(x, 2, 1).astype(jnp.float32)

    return jax.tree.map(of_last, chunks)


def step(
    read: Callable[..., Float[Array, "*B V"]],
    write: Callable[[Multiply, Tokens, PyTree], PyTree],
    q: Float[Array, "B H K"],
    token: Tokens,
    state: tuple[PyTree, Tokens | None, Int[Array, " B"]],
) -> tuple[tuple[PyTree, Tokens | None, Int[Array, " B"]], Float[Array, "B H V"]]:
    """One token.

    Args:
        read: (multiply, q [*B, K], tokens [*B, C, ...], memory [*B, ...]) -> the read
            after all tokens of a chunk.
        write: (multiply, tokens, memory) -> the memory after the chunk.
        q: query.
        token: [B, H, ...].
        state: the memory at the chunk's start, the open tokens and their number.

    Returns:
        The state after the token, and its read in float32.
    """
    memory, tokens, position = state
    q, token = jax.tree.map(lambda x: x.astype(jnp.float32), (q, token))
    if tokens is None:
        token = jax.tree.map(lambda x: x[:, :, None], token)
        y = read(EXACT, q, token, memory)
        return (write(EXACT, token, memory), None, position), y

    def append_and_read(multiply, place, rows, tokens, memory):
        q, token = rows
        tokens = _append(tokens, token, place)
        return tokens, read(multiply, q, tokens, memory)

    def complete(multiply, full, _, before, __):
        memory, tokens = before
        zeros = jax.tree.map(jnp.zeros_like, tokens)
        after = write(multiply, tokens, memory), zeros
        return jax.tree.map(
            lambda a, b: jnp.where(full(a.ndim) > 0, a, b), after, before
        ), ()

    def complete_all(before, full, q):
        return by_heads(complete, full, q, before, ())[0]

    size = jax.tree.leaves(tokens)[0].shape[2]
    tokens, y = by_heads(append_and_read, position, (q, token), tokens, memory)
    full = position == size - 1
    # Once in C tokens, where all batch elements are as far.
    before, given = (memory, tokens), (full.astype(jnp.int32), q)
    memory, tokens = change_if(complete_all, jnp.any(full), before, *given)
    return (memory, tokens, (position + 1) % size), y


def _append(tokens, token, place):
    """The tokens [*B, C, ...], one more at `place` of each batch element."""

    def put(x, new, axis):
        places = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
        new = new.reshape(*x.shape[:axis], 1, *x.shape[axis + 1 :])
        return jnp.where(places == place(x.ndim), new, x)

    axis = jax.tree.leaves(tokens)[0].ndim - 2
    return jax.tree.map(functools.partial(put, axis=axis), tokens, token)


def decays(
    g: Float[Array, "*B C"],
) -> tuple[Float[Array, "*B C 1"], Float[Array, "*B 1 1"]]:
    """exp of the sum of log gates behind each token, and of them all."""
    size = g.shape[-1]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), i) for i in (0, 1))
    # exp is zero from -104 on, and finite sums keep their gradients finite.
    g = jnp.maximum(g, -1e4)[..., None, :]
    behind = jnp.where(
        jnp.broadcast_to(column > row, (*g.shape[:-2], size, size)), g, 0.0
    )
    until, over = (jnp.exp(x.sum(axis=-1, keepdims=True)) for x in (behind, g))
    return until, over
