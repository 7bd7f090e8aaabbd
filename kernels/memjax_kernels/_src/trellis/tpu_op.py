"""Trellis as an op of kernels of `common.packs.chunkwise`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.gate_sums import FORGETS_ALL
from memjax_kernels._src.common.packs.chunkwise import (
    Chunks,
    Layout,
    Op,
    Static,
    kernels_of,
)
from memjax_kernels._src.trellis import packed
from memjax_kernels._src.trellis.chunk import Options
from memjax_kernels._src.trellis.segment import Tokens
from memjax_kernels._src.trellis.xla import trellis_xla


def op_of(
    forward: Callable[..., None], backward: Callable[..., None], **brought: Any
) -> Callable[..., Any]:
    """The op of two kernels with `chunk.Options`; see `chunkwise.Op`."""

    def of(kernel):
        def run(*refs, layout, options, multiply):
            phi, activation = options
            kernel(*refs, layout=layout, options=Options(phi, activation, multiply))

        return run

    rows: Any = {"gate_rows": True, "of_gates": _of_gates}
    return kernels_of(
        Op("trellis", of(forward), of(backward), _in_xla, **rows, **brought)
    )


def run(
    op: Callable[..., Any],
    layout: Layout,
    x: Tokens,
    memory: tuple[Array, Array],
    empty: tuple[Array, Array] | None,
    *,
    phi: str,
    activation: str,
    interpret: Any,
) -> tuple[tuple[Array, Array], Array]:
    """Runs an `op_of` kernels in this layout; see `segment`."""
    tokens = packed.Chunk(x.q, x.k, x.v, x.alpha)
    chunks = Chunks(tokens, (x.gamma, x.g), x.full, x.reset)
    return op(Static((phi, activation), layout, interpret), chunks, memory, empty)


def _of_gates(d: Float[Array, "B n C H _"], x: Chunks) -> tuple[Array, Array]:
    """Of gamma in its passes, then of g, as gradients of both gates."""
    gamma, g = x.gates
    d_gamma, d_g = jnp.split(d, [gamma.shape[-1]], axis=-1)
    # Gates clamped to the lowest have no gradient.
    return d_gamma, jnp.where(g > FORGETS_ALL, d_g, 0.0)


def _in_xla(options, x: Chunks, memory, empty):
    """The function of the kernels."""
    phi, activation = options
    tokens = Tokens(*x.tokens, *x.gates, full=x.full, reset=x.reset)
    return trellis_xla(tokens, memory, empty, phi=phi, activation=activation)
