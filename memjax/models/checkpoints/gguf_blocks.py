"""Number formats of GGUF tensors, to float32.

A quantised row is cut into blocks of 32 values; a block holds a scale d in float16, in
Q4_1 also a minimum m, and the values q. The formats below need NumPy alone; the
optional package `gguf` dequantises the others (K-quants and so on).

    Q8_0: x = d q, q int8      Q4_0: x = d (q - 8)      Q4_1: x = d q + m, q in [0, 16)
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8


def _q8_0(blocks: UInt8[np.ndarray, "N 34"]) -> Float32[np.ndarray, "N 32"]:
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    return scale * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: UInt8[np.ndarray, "N 18"]) -> Float32[np.ndarray, "N 32"]:
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    return scale * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _q4_1(blocks: UInt8[np.ndarray, "N 20"]) -> Float32[np.ndarray, "N 32"]:
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    least = blocks[:, 2:4].view("<f2").astype(np.float32)
    return scale * _nibbles(blocks[:, 4:]) + least


def _nibbles(packed: UInt8[np.ndarray, "N 16"]) -> Float32[np.ndarray, "N 32"]:
    """The low halves of the bytes are values 0 to 15, the high halves 16 to 31."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _floats(dtype) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: blocks.view(dtype).astype(np.float32)


class Format(NamedTuple):
    """Values and bytes of a block, and what turns [N, bytes] into [N, values]."""

    name: str
    values: int
    bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


# By the number that stands in the file.
FORMATS = {
    0: Format("F32", 1, 4, _floats("<f4")),
    1: Format("F16", 1, 2, _floats("<f2")),
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    30: Format("BF16", 1, 2, _floats(ml_dtypes.bfloat16)),
}


def size_in_bytes(shape: tuple[int, ...], kind: int, what: str) -> int:
    """Bytes of a tensor.

    Args:
        shape: row-major; a row is the last axis.
        kind: number of the format.
        what: what an error calls the tensor.

    Raises:
        ValueError: if the format is not known, or rows are not whole blocks.
    """
    known = _format(kind, what)
    if min(shape) < 1:
        raise ValueError(f"{what} has the shape {list(shape)}, an axis of 0")
    if shape[-1] % known.values:
        raise ValueError(
            f"{what} has rows of {shape[-1]} values; "
            f"{known.name} wants a multiple of {known.values}"
        )
    return math.prod(shape) // known.values * known.bytes


def to_float32(raw: UInt8[np.ndarray, " S"], kind: int) -> Float32[np.ndarray, " N"]:
    """Dequantises the bytes of whole blocks."""
    known = _format(kind, "the tensor")
    return known.decode(raw.reshape(-1, known.bytes)).reshape(-1)


def _format(kind: int, what: str) -> Format:
    if kind in FORMATS:
        return FORMATS[kind]
    try:
        import gguf
    except ImportError:
        names = [known.name for known in FORMATS.values()]
        raise ValueError(
            f"{what} has the number format {kind}; without the optional package gguf "
            f"(pip install gguf) only {names} are read"
        ) from None
    try:
        named = gguf.GGMLQuantizationType(kind)
        values, size = gguf.GGML_QUANT_SIZES[named]
        # Integers and formats that the library cannot decode are told apart here.
        gguf.dequantize(np.zeros((1, size), np.uint8), named)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"{what} has the number format {kind}, which is not a known "
            f"quantisation: {error}"
        ) from error
    return Format(
        named.name, values, size, lambda blocks: gguf.dequantize(blocks, named)
    )
