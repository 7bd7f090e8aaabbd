"""Splits a segment into chunks and runs a chunk implementation on them."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import chunks
from memjax_kernels._src.common.steps import open_chunk
from memjax_kernels._src.lattice.memory import LatticeState, LatticeTokens, Rule
from memjax_kernels._src.lattice.segment import Chunks

Implementation = Callable[
    ..., tuple[Float[Array, "B H M V"], Float[Array, "B n C H V"]]
]


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

    The chunk size is that of `empty`. The other arguments are those of `lattice`.
    """
    size, (batch, time) = empty.chunk_size, q.shape[:2]
    # Without a state, and in chunks of one token, every batch element starts a chunk.
    position = None if state is None or size == 1 else state.position
    before = empty if state is None else state

    def split(x):
        return chunks.split(x, size, position)

    # Padding of zeros writes nothing, as its rate is zero.
    tokens = LatticeTokens(
        split(k), split(v), split(gamma), None if g is None else split(g)
    )
    opened = before.tokens
    if opened is not None and g is None:
        opened = opened._replace(g=None)
    tokens = open_chunk.put_in_front(tokens, opened, position)
    count = chunks.count_chunks(time, size, position is None)
    full = chunks.completed(count, size, time, position, batch)
    resets = None if reset is None else split(reset)[:, :, 0]
    given = Chunks(split(q), *tokens, full=full, reset=resets)
    start, y = implementation(given, before.start, empty.start, rule=rule)
    if g is None:
        tokens = tokens._replace(g=jnp.zeros_like(tokens.gamma))
    left = open_chunk.last(tokens, time, position)
    after = LatticeState(start, left, (before.position + time) % size, size)
    return after, chunks.join(y, time, position)
