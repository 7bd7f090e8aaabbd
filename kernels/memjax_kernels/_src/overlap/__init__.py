"""The overlap of a token's key with the earlier keys of its chunk.

    left_t = Π_s (1 - γ_s ⟨k_s, k_t⟩²)        s over the tokens of t's chunk before t

A memory whose gradients are all taken at the chunk's start corrects a key that repeats
too often; steps γ_t left_t correct it once. No state passes from chunk to chunk.

Shapes: B batch, T time, H heads, K key.
"""

import functools
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from memjax_kernels._src.common import arguments, chunks, implementations
from memjax_kernels._src.overlap import pallas_tpu
from memjax_kernels._src.overlap.xla import in_chunks

Implementation = Literal["xla", "pallas_tpu"]


def overlap(
    k: Float[Array, "B T H K"],
    gamma: Float[Array, "B T H"],
    *,
    chunk_size: int,
    implementation: Implementation | None = None,
) -> Float32[Array, "B T H"]:
    """The product for every token; 1 at the first of a chunk.

    Args:
        k: keys of unit norm, or zeros; not checked.
        gamma: rates in [0, 1].
        chunk_size: C, at least 1; the first token begins a chunk.
        implementation: which code runs; None is the fastest that can.

    Raises:
        ValueError: on shapes that do not fit, known rates out of range, or an
            implementation that is unknown or cannot run here.
    """
    return overlap_with_keys(
        k, gamma, chunk_size=chunk_size, implementation=implementation
    )[1]


def overlap_with_keys(
    k: Float[Array, "B T H K"],
    gamma: Float[Array, "B T H"],
    *,
    chunk_size: int,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H K"], Float32[Array, "B T H"]]:
    """The keys as they are, and their `overlap`.

    For keys that are used again: the backward kernel adds both gradients, where XLA
    would read and write all of them once more to do so. Arguments and errors are those
    of `overlap`.
    """
    arguments.check_sizes(chunk_size=chunk_size)
    arguments.check_shapes(k=(k, "B T H K"), gamma=(gamma, "B T H"))
    arguments.check_range("gamma", gamma, 0.0, 1.0)
    form = implementations.choose(
        "overlap",
        implementation,
        {
            "xla": functools.partial(_xla, chunk_size=chunk_size),
            "pallas_tpu": functools.partial(
                pallas_tpu.overlap_tpu, chunk_size=chunk_size
            ),
        },
        {"pallas_tpu": pallas_tpu.unsupported(k, chunk_size)},
    )
    return form(k, gamma.astype(jnp.float32))


def _xla(k, gamma, *, chunk_size):
    def split(x):
        return chunks.split(x, chunk_size, None)

    return k, chunks.join(in_chunks(split(k), split(gamma)), k.shape[1], None)
