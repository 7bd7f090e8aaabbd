"""Documents in a row: where each begins."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool

from memjax_kernels._src.common.arguments import require_array


def document_starts(segment_ids: Array) -> Bool[Array, "B T"]:
    """The `reset` of every op for rows that hold several documents.

    Args:
        segment_ids: integers [B, T], the document of each token, as attention kernels
            take them. They never fall along a row; inside jit that is the caller's
            promise.

    Returns:
        True at tokens whose document is another than that of the token before. The
        first token of a row goes on with the memory that is given.

    Raises:
        ValueError: if `segment_ids` are no integers [B, T], or fall.
    """
    require_array("segment_ids", segment_ids, "BT")
    dtype, shape = segment_ids.dtype, list(segment_ids.shape)
    if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"segment_ids must be integers [B, T], got {dtype}{shape}")
    if not isinstance(segment_ids, Tracer):
        ids = np.asarray(segment_ids)
        rows, tokens = np.nonzero(ids[:, 1:] < ids[:, :-1])
        if rows.size:
            row, token = rows[0], tokens[0] + 1
            raise ValueError(
                f"segment_ids must not fall along a row, got {ids[row, token]} after "
                f"{ids[row, token - 1]} at token {token} of row {row}"
            )
    return jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
