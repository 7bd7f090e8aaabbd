"""Streaming of an answer's text while its tokens are sampled."""

from collections.abc import Callable, Sequence

import numpy as np

from memjax.data import Tokenizer
from memjax.data.documents.pieces import decode_after

# The decoded text of an incomplete character.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def answer_decoder(
    tokenizer: Tokenizer, prompt: np.ndarray, begin: str
) -> Callable[[np.ndarray], str]:
    """A decoder of answer tokens to the text that continues the prompt and `begin`."""

    def decode(row: np.ndarray) -> str:
        text = decode_after(tokenizer, prompt, row)
        # White space before an answer is no paragraph, and does not end it.
        shown = text.lstrip()
        within = begin and "\n" not in text[: len(text) - len(shown)]
        return text if within else f" {shown}" if begin and shown else shown

    return decode


def printer(
    decode: Callable[[np.ndarray], str],
    stop: Sequence[str],
    limit: int,
    ends: Sequence[int],
    write: Callable[[str], object],
) -> Callable[[np.ndarray], bool]:
    """A `stop_when` for `generate` that writes the new text, up to a stop text.

    Args:
        decode: of the tokenizer.
        stop: texts that end the output.
        limit: maximum tokens of the output; after the last, no text is held back.
        ends: tokens that end a text, which have no text of their own.
        write: called with each new part.
    """
    shown = 0
    # A possible beginning of a stop text is held back.
    behind = max(map(len, stop), default=1) - 1

    def stop_when(tokens: np.ndarray) -> bool:
        nonlocal shown
        row = tokens[0]
        text = decode(row[:-1] if row[-1] in ends else row)
        found = [text.index(part) for part in stop if part in text]
        over = bool(found) or len(row) == limit or row[-1] in ends
        last = min(found) if found else len(text) if over else len(text) - behind
        if not over and text.endswith(UNFINISHED):
            last = min(last, len(text.rstrip(UNFINISHED)))
        if last > shown:
            write(text[shown:last])
            shown = last
        return bool(found)

    return stop_when
