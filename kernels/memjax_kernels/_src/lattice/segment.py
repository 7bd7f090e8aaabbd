"""The signature and meaning of all chunk implementations.

Every one (`xla.lattice_xla`, `pallas_tpu.lattice_tpu`, ...) has this signature:

    f(tokens: Chunks, start, empty, *, rule) -> (start, pending, decay), y

for n >= 1 full chunks with nothing pending: `chunked` gives XLA the first chunk, which
an earlier call may have opened. For each batch element, with
M = `start`:

    for j in range(n):
        if reset[j]: M = empty
        y[j], A, M_next = the chunk's reads, its written part, the normalised memory
        if full[j]: M = M_next

Chunks after the last full one hold the last tokens, or none, among zeros: M stays,
and the written part A of those chunks is the `pending` that is returned, 0 for batch
elements that end with a chunk (likewise `decay`, 1 without forget="l2"). A token of
zeros, rate and log gate included, writes nothing, and its read is dropped. `start` and
`empty` are float32 [B, H, M, V], as are the memories returned; y [B, n, C, H, V] has
the dtype of v.
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


Memory = tuple[Float[Array, "B H M V"], Float[Array, "B H M V"], Float[Array, "B H"]]
