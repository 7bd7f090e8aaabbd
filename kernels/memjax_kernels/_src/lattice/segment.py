"""The signature and meaning of all chunk implementations.

Every one (`xla.lattice_xla`, `pallas_tpu.lattice_tpu`, ...) has this signature:

    f(tokens: Chunks, start, empty, *, rule) -> start, y

For each batch element, with M = `start`:

    for j in range(n):
        if reset[j]: M = empty
        y[j], M_next = the chunk's reads, the normalised memory after it
        if full[j]: M = M_next

Chunks after the last full one hold the last tokens, or none, among zeros: M stays. A
token of zeros, rate and log gate included, writes nothing, and its read is dropped.
`start` and `empty` are float32 [B, H, M, V], as is the memory returned; y
[B, n, C, H, V] has the dtype of v.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float


class Chunks(NamedTuple):
    """Tokens of a segment, cut into n chunks of C.

    Attributes:
        q: [B, n, C, H, M].
        k: [B, n, C, H, M].
        v: [B, n, C, H, V].
        gamma: [B, n, C, H].
        g: [B, n, C, H], or None without forgetting.
        full: whether a batch element's tokens reach the end of each chunk.
        reset: whether its memory is emptied before each chunk; None is never.
    """

    q: Float[Array, "B n C H M"]
    k: Float[Array, "B n C H M"]
    v: Float[Array, "B n C H V"]
    gamma: Float[Array, "B n C H"]
    g: Float[Array, "B n C H"] | None
    full: Bool[Array, "B n"]
    reset: Bool[Array, "B n"] | None
