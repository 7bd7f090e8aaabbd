"""Tokens of a document in the records of a file."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int32


class RecordTokens:
    """The ids of one document; `[a:b]` reads the records with these ids.

    Slicing, length and conversion are those of an int32 array [T].

    Attributes:
        vocab_size: of the tokenizer; every id is below it.
    """

    dtype, ndim = np.dtype(np.int32), 1

    def __init__(
        self,
        record: Callable[[int], Int32[np.ndarray, " R"]],
        first: int,
        length: int,
        record_tokens: int,
        vocab_size: int,
    ):
        self._record, self._first, self._length = record, first, length
        self._record_tokens, self.vocab_size = record_tokens, vocab_size

    def __len__(self) -> int:
        return self._length

    @property
    def size(self) -> int:
        """T."""
        return self._length

    @property
    def shape(self) -> tuple[int]:
        """[T]."""
        return (self._length,)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice) or key.step not in (None, 1):
            return np.asarray(self)[key]
        begin, end, _ = key.indices(self._length)
        if end <= begin:
            return np.zeros(0, np.int32)
        size = self._record_tokens
        first, last = begin // size, (end - 1) // size
        parts = [self._record(self._first + i) for i in range(first, last + 1)]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return joined[begin - first * size : end - first * size]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[:], dtype)
