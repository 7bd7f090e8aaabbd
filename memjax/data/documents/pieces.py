"""Texts in pieces: their tokens, and their characters, are those of the whole text.

Encoders of SentencePiece's kind put a space before what they are given, and its
decoders take it away again; of a piece that is neither right nor wanted.
"""

import re
from typing import Any

import numpy as np
from jaxtyping import Int32, Integer

from memjax.data.documents.tokenizer import JsonTokenizer, Tokenizer

#: Texts before a piece; one of them is in a token of its own.
ANCHORS = ("a", ".", "\n", "1")
#: Tokens before a piece that decide how its first is decoded.
CONTEXT = 8
#: What comes between texts.
SEPARATOR = "\n\n"
#: Characters at the end of a text, of which what follows changes the tokens.
TAIL = 64


def encode_after(tokenizer: Tokenizer, text: str) -> Int32[np.ndarray, " T"]:
    """The ids of a text that follows another."""
    if not isinstance(tokenizer, JsonTokenizer):
        return tokenizer.encode(text)
    for anchor in ANCHORS:
        whole, head = tokenizer.encode(anchor + text), tokenizer.encode(anchor)
        if len(head) and np.array_equal(whole[: len(head)], head):
            return whole[len(head) :]
    return tokenizer.encode(text)


def decode_after(
    tokenizer: Tokenizer,
    before: Integer[np.ndarray, " P"],
    ids: Integer[np.ndarray, " T"],
) -> str:
    """The text of ids that follow others."""
    before = before[-CONTEXT:]
    head = tokenizer.decode(before)
    whole = tokenizer.decode(np.concatenate([before, ids]))
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids)


def unsettled(tokenizer: Tokenizer, text: str) -> str:
    """The end of a text that has other tokens where `SEPARATOR` follows.

    Vocabularies as Llama 3's have one token for a full stop and the lines after it.
    """
    tail = text[-TAIL:]
    alone = encode_after(tokenizer, tail)
    longer = encode_after(tokenizer, f"{tail}{SEPARATOR}A")[: len(alone)]
    same = int(np.cumprod(alone[: len(longer)] == longer).sum())
    end = decode_after(tokenizer, alone[:same], alone[same:]) if same else ""
    return end if end and text.endswith(end) else ""


def escape_control_tokens(tokenizer: Tokenizer, text: str) -> str:
    """A text whose control tokens are read as plain text.

    Without, "<|im_end|>" in a text ends a turn, as it does with transformers. Behind
    the first character of each comes a word joiner, U+2060, which is not seen.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return text
    added: dict[int, Any] = tokenizer.backend.get_added_tokens_decoder()
    control = [t.content for t in added.values() if t.special and len(t.content) > 1]
    longest_first = sorted(control, key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
    return re.sub(pattern, lambda found: f"{found[0][0]}\u2060{found[0][1:]}", text)
