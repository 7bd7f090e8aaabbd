"""A batch of tokens, the input of a training step."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float32, Int32


class Batch(NamedTuple):
    """Next-token prediction for B sequences of T positions; numpy or JAX arrays.

    Attributes:
        tokens: [B, T], inputs.
        targets: [B, T], the token after each input.
        mask: [B, T], 1 where the target counts, 0 where the position is padding.
        reset: [B], True where a sequence's memory must be cleared before this batch.
            In rows of several documents [B, T], True at the first token of each.
    """

    tokens: Int32[Array, "B T"] | Int32[np.ndarray, "B T"]
    targets: Int32[Array, "B T"] | Int32[np.ndarray, "B T"]
    mask: Float32[Array, "B T"] | Float32[np.ndarray, "B T"]
    reset: Bool[Array, "B ..."] | Bool[np.ndarray, "B ..."]
