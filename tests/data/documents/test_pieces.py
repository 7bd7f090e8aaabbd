"""Pieces of a text have the tokens, and the characters, of the whole text."""

import functools

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from memjax.data.documents.pieces import (
    decode_after,
    encode_after,
    escape_control_tokens,
    unsettled,
)
from memjax.data.documents.tokenizer import ByteTokenizer, Tokenizer, parse_tokenizer
from tests import tiny

SPACE = "\u2581"


def sentencepiece(legacy: bool) -> Tokenizer:
    """As Llama 2's: a space before what it encodes, none before what it decodes."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [*"abehinot.Q:", SPACE, f"{SPACE}a", f"{SPACE}t", "th", "he"]
    words += [f"{SPACE}th", f"{SPACE}the"]
    merges = [(SPACE, "a"), (SPACE, "t"), (f"{SPACE}t", "h"), (f"{SPACE}th", "e")]
    made = tokenizers.Tokenizer(
        BPE({w: i for i, w in enumerate(words)}, merges, byte_fallback=True)
    )
    if legacy:
        steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        made.normalizer = normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", False)
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens([AddedToken("</s>", normalized=False)])
    return parse_tokenizer(made.to_str().encode(), "sentencepiece")


def byte_level() -> Tokenizer:
    """As Llama 3's, where a full stop and the lines after it are one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u010a", "\u010a"), (".", "\u010a\u010a"), ("\u0120", "t")]
    words = [*alphabet, *(left + right for left, right in merges)]
    made = tokenizers.Tokenizer(BPE({w: i for i, w in enumerate(words)}, merges))
    cut = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    return parse_tokenizer(made.to_str().encode(), "bytes")


KINDS = {
    "legacy": functools.partial(sentencepiece, True),
    "first": functools.partial(sentencepiece, False),
    "byte level": byte_level,
    "bytes": ByteTokenizer,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "texts",
    [
        ("a the b.", "the a"),
        ("the\n", "a"),
        ("a", "\n\nthe", "b. a."),
        ("\u00e9 a", "the \u00e9"),
    ],
)
def test_tokens_of_texts_are_those_of_the_whole(kind, texts):
    tokenizer = KINDS[kind]()
    whole, read, pending = "\n\n".join(texts), [], ""
    for i, text in enumerate(texts):
        text = pending + ("\n\n" if i else "") + text
        pending = unsettled(tokenizer, text)
        text = text.removesuffix(pending)
        read += (encode_after if i else type(tokenizer).encode)(
            tokenizer, text
        ).tolist()
    read += encode_after(tokenizer, pending).tolist()
    assert read == tokenizer.encode(whole).tolist()


def test_full_stop_waits_for_what_follows():
    assert unsettled(byte_level(), "A text.") == "."
    assert unsettled(byte_level(), "A text") == ""
    assert unsettled(sentencepiece(True), "a the.") == ""
    assert unsettled(tiny.tokenizer(), "abc") == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["b a the", "a\u00e9\n the </s> a", "the b.\n\nQ: a"])
def test_streamed_text_is_that_of_the_whole(kind, text):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        head = tokenizer.decode(ids[:cut])
        if "\ufffd" not in head and whole.startswith(head):
            after = decode_after(tokenizer, ids[:cut], ids[cut:])
            assert head + after == whole
            # Token by token, and without those that the tokenizer lacks.
            parts = [decode_after(tokenizer, ids[:cut], ids[cut : cut + 1])]
            assert parts[0] == "\ufffd" or whole.startswith(head + parts[0])


def test_nothing_follows_nothing():
    none = np.zeros(0, np.int32)
    assert decode_after(byte_level(), none, none) == ""
    assert encode_after(byte_level(), "").tolist() == []


def test_control_tokens_of_a_text_can_be_escaped():
    tokenizer = sentencepiece(True)
    text = "a </s> b"
    assert 1 in tokenizer.encode(text)
    escaped = escape_control_tokens(tokenizer, text)
    assert 1 not in tokenizer.encode(escaped)
    assert escaped.replace("\u2060", "") == text
    for plain in (ByteTokenizer(), byte_level()):
        assert escape_control_tokens(plain, text) == text
