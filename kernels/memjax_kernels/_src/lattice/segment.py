"""Runs chunk implementations of Lattice; `common.steps.segment` says what these are.

They take chunks of q, k and v with gates gamma and g, None without forgetting, and the
slots `start` and `empty`; the memory after a chunk is normalised.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.steps import segment
from memjax_kernels._src.lattice.memory import LatticeState, LatticeTokens


def in_chunks(
    implementation: Callable[..., tuple[Array, Array]],
    q: Float[Array, "B T H M"],
    k: Float[Array, "B T H M"],
    v: Float[Array, "B T H V"],
    gamma: Float[Array, "B T H"],
    g: Float[Array, "B T H"] | None,
    state: LatticeState | None,
    reset: Bool[Array, "B T"] | None,
    empty: LatticeState,
) -> tuple[LatticeState, Float[Array, "B T H V"]]:
    """Runs a chunk implementation; the other arguments are those of `lattice`."""
    tokens = LatticeTokens(k, v, gamma, jnp.zeros_like(gamma) if g is None else g)
    q, x, *flags, position = segment.cut(q, tokens, state, reset, empty)
    before, gates = state or empty, (x.gamma, None if g is None else x.g)
    given = Chunks((q, x.k, x.v), gates, *flags)
    start, y = implementation(given, before.start, empty.start)
    return segment.join(before, x, y, v.shape[1], position, start=start)
