"""Gated linear attention in chunks of matrix products."""

from jaxtyping import Array, Bool, Float

from memjax_kernels.linear_attention import chunks as linear_chunks

CHUNK_SIZE = 32


def gla_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    state: Float[Array, "B H K V"],
    reset: Bool[Array, "B T"] | None = None,
    *,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The recurrence of `gla_reference`."""
    body, tokens = linear_chunks.linear_group, (q, k, v, g)
    return linear_chunks.run(body, tokens, state, reset, chunk_size)
