"""What a model needs of packed rows, in which several documents lie in one row."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from memjax.mechanisms.base import MixerConfig
from memjax.mechanisms.layers import documents


def start_multiple(mixers: Sequence[MixerConfig]) -> int:
    """Documents of a packed row begin at multiples of so many tokens.

    Args:
        mixers: of the model, `ModelConfig.mixers`.

    Raises:
        ValueError: for a mixer whose memory cannot be cleared inside a segment.
    """
    chunks = []
    for mixer in dict.fromkeys(mixers):
        packed = mixer.build().packed
        if packed is None:
            raise ValueError(
                f"packed rows need mixers whose memory can be cleared inside a row, "
                f"got {_named(mixer)}; mode='chunked' and 'streamed' take any"
            )
        chunks.append(packed.chunk)
    return math.lcm(*chunks)


def check_starts(model: Any, x: Array, starts: Array) -> None:
    """Raises ValueError on starts that `LanguageModel.encode_packed` cannot read."""
    documents.check_starts(starts, x)
    multiple = start_multiple(model.config.mixers)
    if isinstance(starts, Tracer):
        return
    row, token = np.nonzero(np.asarray(starts))
    off = np.flatnonzero(token % multiple)
    if off.size:
        raise ValueError(
            f"starts must be at multiples of {multiple} tokens, as the mixers' chunks "
            f"are, got one in row {row[off[0]]} at token {token[off[0]]}"
        )


def _named(mixer: MixerConfig) -> str:
    """The mixer's name, and what of its settings stands in the way."""
    sinks = getattr(mixer, "sinks", 0)
    return f"{type(mixer).__name__}{f' with sinks={sinks}' if sinks else ''}"
