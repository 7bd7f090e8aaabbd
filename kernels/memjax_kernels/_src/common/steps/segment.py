"""Segments of ops whose gradients are taken at the memory of a chunk's start.

Such an op brings chunk implementations (`xla`, `pallas_tpu`, `pallas_gpu`),

    f(x: Chunks, memory, empty, ...) -> (memory, y)

For each batch element and chunk j, in order, with M the memory:

    if reset[j]: M = empty                                  where `reset` is None, never
    y[j], M_next = the chunk's reads, the memory after it
    if full[j]: M = M_next                                  where `full` is None, always

Chunks after the last full one hold the last tokens, or none, among zeros. A token of
zeros, rates and log gates included, writes nothing; its read is dropped. Memories are
float32 [B, H, ...], and y [B, n, C, H, V] has the dtype of v. Everything is
differentiable in tokens, memory and empty.

States are dataclasses of memories, `tokens` of the open chunk, `position` and
`chunk_size`: see `open_chunk`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.arguments import check_range
from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.common.token_scan import scan_tokens


def cut(
    q: Float[Array, "B T H K"],
    tokens: PyTree[Float[Array, "B T H ..."]],
    state: Any,
    reset: Bool[Array, "B T"] | None,
    empty: Any,
) -> tuple[Any, ...]:
    """A segment in chunks, behind the open tokens: q, tokens, full, reset, position.

    Args:
        q: queries.
        tokens: all else of a token that the state keeps.
        state: before the segment; None is `empty`.
        reset: where the memory is emptied before a token, the first of a chunk.
        empty: the state of a new document, whose chunk size is that of the segment.
    """
    size, (batch, time) = empty.chunk_size, q.shape[:2]
    # Without a state, and in chunks of one token, every batch element starts a chunk.
    position = None if state is None or size == 1 else state.position

    def split(x):
        return chunks.split(x, size, position)

    tokens = jax.tree.map(split, tokens)
    tokens = open_chunk.put_in_front(tokens, (state or empty).tokens, position)
    number = chunks.count_chunks(time, size, position is None)
    whole = position is None and time % size == 0
    full = None if whole else chunks.completed(number, size, time, position, batch)
    # A reset counts at the first token of a chunk; others were refused, or give NaN.
    starts = None if reset is None else split(reset)[:, :, 0]
    return split(q), tokens, full, starts, position


def join(
    before: Any,
    tokens: PyTree[Float[Array, "B n C H ..."]],
    y: Float[Array, "B n C H V"],
    time: int,
    position: Int[Array, " B"] | None,
    **memories: PyTree,
) -> tuple[Any, Float[Array, "B T H V"]]:
    """The state after T tokens that were `cut`, with its memories, and their reads."""
    after = dataclasses.replace(
        before,
        **memories,
        tokens=open_chunk.last(tokens, time, position),
        position=(before.position + time) % before.chunk_size,
    )
    return after, chunks.join(y, time, position)


def by_tokens(
    step: Callable[..., tuple[Any, Float[Array, "B H V"]]],
    tokens: tuple[Float[Array, "B T ..."] | None, ...],
    state: Any,
    reset: Bool[Array, "B T"] | None,
    empty: Any,
) -> tuple[Any, Float[Array, "B T H V"]]:
    """The same by a loop of step(*token, state) -> (state, y)."""

    def one_token(*given):
        *token, clear, state = given
        if clear is not None:
            state = chunks.replace(clear & (state.position == 0), empty, state)
        return step(*token, state)

    return scan_tokens(one_token, (*tokens, reset), empty if state is None else state)


def scan_chunks(
    advance: Callable[..., tuple[PyTree, Float[Array, "B H C V"]]],
    x: Chunks,
    memory: PyTree[Float[Array, "B H ..."]],
    empty: PyTree[Float[Array, "B H ..."]],
    remat_every: int,
) -> tuple[PyTree[Float[Array, "B H ..."]], Float[Array, "B n C H V"]]:
    """A chunk implementation by XLA: a scan over chunks.

    Args:
        advance: (memory, tokens, gates) -> (memory, y) of a chunk, all [B, H, C, ...].
        x: the chunks.
        memory: before the first.
        empty: after a reset.
        remat_every: chunks between two memories that are saved for the backward pass.
    """

    def one_chunk(memory, item):
        given, full, reset = item
        if reset is not None:
            memory = chunks.replace(reset, empty, memory)
        after, y = advance(memory, *given)
        y = y.astype(x.tokens[2].dtype)
        # A chunk that stays open leaves the memory at its start.
        return after if full is None else chunks.replace(full, after, memory), y

    # [B, n, C, H, ...] -> [n, B, H, C, ...]
    items = jax.tree.map(lambda x: jnp.moveaxis(x, (1, 3), (0, 2)), x[:2])
    flags = jax.tree.map(jnp.transpose, x[2:])
    memory, y = chunks.scan(one_chunk, memory, (items, *flags), remat_every=remat_every)
    return memory, jnp.moveaxis(y, (0, 2), (1, 3))


def check_state(name: str, state: Any, like: Callable[[], Any]) -> None:
    """Raises ValueError unless a state called "state" or "empty" is as `like()`.

    It must be of the same type, chunk size, shapes and dtypes, and at a position in its
    chunk where that is known, an empty one at its start.
    """
    expected = jax.eval_shape(like)
    if type(state) is not type(expected):
        kind, got = type(expected).__name__, type(state).__name__
        raise ValueError(f"{name} must be a {kind}, got {got}")
    if state.chunk_size != expected.chunk_size:
        raise ValueError(
            f"{name} must be of chunk_size={expected.chunk_size}, got one of "
            f"chunk_size={state.chunk_size}: the chunk is part of the function"
        )
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    if jax.tree.structure(state) != jax.tree.structure(expected):
        raise ValueError(f"{name} must have the arrays {leaves}, got {state}")
    for (path, leaf), got in zip(leaves, jax.tree.leaves(state), strict=True):
        if got.shape != leaf.shape or got.dtype != leaf.dtype:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must be "
                f"{leaf.dtype}{list(leaf.shape)}, got {got.dtype}{list(got.shape)}"
            )
    last = expected.chunk_size - 1 if name == "state" else 0
    check_range(f"{name}.position", state.position, 0.0, float(last))


def check_states(
    state: Any,
    empty: Any,
    like: Callable[[], Any],
    default: Callable[[], Any] | None = None,
) -> Any:
    """The empty memory: given, or else `default()`, `like()` for None.

    Raises:
        ValueError: as `check_state`.
    """
    for name, given in (("state", state), ("empty", empty)):
        if given is not None:
            check_state(name, given, like)
    if empty is None:
        return (default or like)()
    # Of an empty memory nothing but its slots counts.
    none = jax.tree.map(jnp.zeros_like, (empty.tokens, empty.position))
    return dataclasses.replace(empty, tokens=none[0], position=none[1])
