"""Segments cut at the chunks of every row: what the fast forms are given.

A form (xla.py, pallas_tpu.py, pallas_gpu.py) is a function

    form(tokens: Chunks, start, empty, *, rule) -> (start, pending, decay), y

of n >= 1 whole chunks that start with nothing pending: `run` lets XLA take the first
chunk of rows that come in the middle of one. For each row in turn, with M = `start`:

    for j in range(n):
        if cleared[j]: M = empty
        y[j], A, M_next = the chunk's reads, its written part, the normalised memory
        if complete[j]: M = M_next

Chunks after a row's last complete one hold its last tokens, or none, among zeros: M
stays, and the written part A of those chunks is the `pending` that is returned, 0
for rows that end with a chunk (likewise `decay`, 1 without forget="l2"). A token of
zeros, rate and log gate included, writes nothing, and its read is dropped. `start`
and `empty` are float32 [B, H, M, V], as are the memories returned; y [B, n, C, H, V]
has the dtype of v.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels.common import chunks
from memjax_kernels.lattice.memory import LatticeState, Rule


class Chunks(NamedTuple):
    """Tokens of a segment, cut into n chunks of C.

    Attributes:
        q: [B, n, C, H, M].
        k: [B, n, C, H, M].
        v: [B, n, C, H, V].
        gamma: [B, n, C, H].
        g: [B, n, C, H], or None without forgetting.
        complete: whether a row's tokens reach the end of each chunk.
        cleared: whether a row's memory is emptied before each chunk; None is never.
    """

    q: Float[Array, "B n C H M"]
    k: Float[Array, "B n C H M"]
    v: Float[Array, "B n C H V"]
    gamma: Float[Array, "B n C H"]
    g: Float[Array, "B n C H"] | None
    complete: Bool[Array, "B n"]
    cleared: Bool[Array, "B n"] | None


Memory = tuple[Float[Array, "B H M V"], Float[Array, "B H M V"], Float[Array, "B H"]]
Form = Callable[..., tuple[Memory, Float[Array, "B n C H V"]]]
Head = Callable[
    [Chunks, Memory, Float[Array, "B H M V"], Rule],
    tuple[Memory, Float[Array, "B n C H V"]],
]


def run(
    form: Form,
    head: Head,
    q: Float[Array, "B T H M"],
    k: Float[Array, "B T H M"],
    v: Float[Array, "B T H V"],
    gamma: Float[Array, "B T H"],
    g: Float[Array, "B T H"] | None,
    state: LatticeState,
    reset: Bool[Array, "B T"] | None,
    empty: Float[Array, "B H M V"],
    rule: Rule,
    *,
    in_phase: bool,
) -> tuple[LatticeState, Float[Array, "B T H V"]]:
    """Runs a form on a segment.

    Args:
        form: takes whole chunks.
        head: takes the first chunk of rows that may come in the middle of one.
        q: as `lattice`, like all up to `state`.
        k: keys.
        v: values.
        gamma: rates.
        g: log gates.
        state: the memory before the segment.
        reset: counts where a chunk starts only.
        empty: the memory after a reset.
        rule: the recurrence.
        in_phase: whether every row is known to start a chunk.
    """
    b, time = q.shape[:2]
    size = state.chunk_size
    position = None if in_phase else state.position
    cut = lambda x: chunks.split(x, size, position)
    count = chunks.count_chunks(time, size, in_phase)
    tokens = Chunks(
        q=cut(q),
        k=cut(k),
        v=cut(v),
        gamma=cut(gamma),
        g=None if g is None else cut(g),
        complete=chunks.completed(count, size, time, position, b),
        cleared=None if reset is None else cut(reset)[:, :, 0],
    )
    if in_phase:
        memory, y = form(tokens, state.start, empty, rule=rule)
    else:
        first = jax.tree.map(lambda x: x[:, :1], tokens)
        memory = (state.start, state.pending, state.decay)
        memory, y = head(first, memory, empty, rule)
        if count > 1:
            memory, y = _go_on(form, tokens, memory, y, empty, rule)
    filled = state.position + time
    state = LatticeState(*memory, position=filled % size, chunk_size=size)
    return state, chunks.join(y, time, position)


def _go_on(form, tokens, memory, y, empty, rule):
    """The chunks after the first, and what the first left where they are empty."""
    rest = jax.tree.map(lambda x: x[:, 1:], tokens)
    (start, pending, decay), more = form(rest, memory[0], empty, rule=rule)
    # A row that does not fill its first chunk has nothing in the others.
    short = ~tokens.complete[:, 0]
    pending = jnp.where(short[:, None, None, None], memory[1], pending)
    decay = jnp.where(short[:, None], memory[2], decay)
    return (start, pending, decay), jnp.concatenate([y, more], axis=1)
