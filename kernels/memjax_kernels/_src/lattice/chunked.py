"""Splits a segment into chunks and runs a chunk implementation on them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.lattice.memory import LatticeState, Rule
from memjax_kernels._src.lattice.segment import Chunks, Memory
from memjax_kernels._src.lattice.xla import lattice_xla_head

Implementation = Callable[..., tuple[Memory, Float[Array, "B n C H V"]]]


def in_chunks(
    implementation: Implementation,
    q: Float[Array, "B T H M"],
    k: Float[Array, "B T H M"],
    v: Float[Array, "B T H V"],
    gamma: Float[Array, "B T H"],
    g: Float[Array, "B T H"] | None,
    state: LatticeState | None,
    reset: Bool[Array, "B T"] | None,
    empty: LatticeState,
    rule: Rule,
) -> tuple[LatticeState, Float[Array, "B T H V"]]:
    """Runs a chunk implementation, which `segment` describes, on a segment.

    The implementation takes chunks that start with nothing pending; the chunk size is
    that of `empty`. The other arguments are those of `lattice`.
    """
    size, time = empty.chunk_size, q.shape[1]
    # Without a state, and in chunks of one token, every batch element starts a chunk.
    position = None if state is None or size == 1 else state.position
    state = empty if state is None else state
    # Padding of zeros writes nothing, as its rate is zero.
    tokens = _split(q, k, v, gamma, g, reset, size, position)
    if position is None:
        memory, y = implementation(tokens, state.start, empty.start, rule=rule)
    else:
        memory, y = _from_open_chunks(implementation, tokens, state, empty.start, rule)
    filled = state.position + time
    after = LatticeState(*memory, position=filled % size, chunk_size=size)
    return after, chunks.join(y, time, position)


def _split(q, k, v, gamma, g, reset, size, position) -> Chunks:
    batch, time = q.shape[:2]

    def split(x):
        return chunks.split(x, size, position)

    count = chunks.count_chunks(time, size, position is None)
    return Chunks(
        q=split(q),
        k=split(k),
        v=split(v),
        gamma=split(gamma),
        g=None if g is None else split(g),
        full=chunks.completed(count, size, time, position, batch),
        reset=None if reset is None else split(reset)[:, :, 0],
    )


def _from_open_chunks(implementation, tokens: Chunks, state, empty, rule):
    """The first chunk by XLA, since a part of it may be pending, then the others."""
    first = jax.tree.map(lambda x: x[:, :1], tokens)
    memory = (state.start, state.pending, state.decay)
    memory, y = lattice_xla_head(first, memory, empty, rule)
    if tokens.q.shape[1] == 1:
        return memory, y
    rest = jax.tree.map(lambda x: x[:, 1:], tokens)
    (start, pending, decay), more = implementation(rest, memory[0], empty, rule=rule)
    # Without a whole first chunk, a batch element has nothing in the others.
    short = ~tokens.full[:, 0]
    pending = jnp.where(short[:, None, None, None], memory[1], pending)
    decay = jnp.where(short[:, None], memory[2], decay)
    return (start, pending, decay), jnp.concatenate([y, more], axis=1)
