"""Tokenizers of GGUF files: rebuilt so that they give the original's ids."""

import json
from pathlib import Path

import pytest
import tokenizers

from memjax.models.checkpoints.gguf.tokenizer import tokenizer_json

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = (
    "It's 12345 tokens, I'LL say: don't stop.\n\n\n1 And\t\r\n  22  x = 3.14;"
    "caf\u00e9 cafe\u0301 \u65e5\u672c\u8a9e \u00bd  ??!! <|end|>  word\n"
)


@pytest.fixture(scope="module", name="vocabulary")
def _vocabulary():
    """Tokens and merges of a small byte-level BPE."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=324,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([TEXT] * 3, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.eos_token_id": 0,
    }


def rebuilt(vocabulary, pre_tokenizer, **more):
    metadata = vocabulary | {"tokenizer.ggml.pre": pre_tokenizer} | more
    written = tokenizer_json(metadata, "file") or b""
    return tokenizers.Tokenizer.from_str(written.decode())


def split(tokenizer, text):
    """The parts of a text that merges never join."""
    parts = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in parts]


@pytest.mark.parametrize(
    "pre_tokenizer, text, parts",
    [
        ("gpt-2", " 12345 x", [" 12345", " x"]),
        ("gpt-2", "I'LL don't", ["I", "'", "LL", " don", "'t"]),
        ("gpt-2", "a\n\n1", ["a", "\n", "\n", "1"]),
        ("smollm", "  12 x", ["  ", "1", "2", " x"]),
        ("smollm", "a\n\n1", ["a", "\n\n", "1"]),
        ("llama-bpe", " 12345 I'LL", [" ", "123", "45", " I", "'LL"]),
        ("llama-bpe", "a.\n\n b", ["a", ".\n\n", " b"]),
        ("smaug-bpe", " 12345 I'LL", [" ", "123", "45", " I", "'LL"]),
        ("dbrx", " 12345 I'LL", [" ", "123", "45", " I", "'LL"]),
        ("qwen2", " 123 I'LL", [" ", "1", "2", "3", " I", "'LL"]),
        ("default", "12345 a,b", ["123", "45", " a", ",", "b"]),
        ("olmo", " 12345 I'LL", [" 12345", " I", "'", "LL"]),
        ("falcon3", " 12345 I'LL", [" ", "123", "45", " I", "'LL"]),
        ("falcon-h1", " 12345 I'LL", [" ", "123", "45", " I", "'LL"]),
        ("lfm2", " 12345 I'LL", [" ", "123", "45", " I", "'LL"]),
        ("mpt", " 12345 I'LL", [" 12345", " I", "'", "LL"]),
        ("granite-docling", "a\n\n1", ["a", "\n", "\n", "1"]),
        ("qwen35", "ni\u0303o 12", ["ni\u0303o", " ", "1", "2"]),
        ("tekken", "aLongWord's 123", ["a", "Long", "Word", "'s", " ", *"123"]),
        ("gpt-4o", "aLongWord's 1234", ["a", "Long", "Word's", " ", "123", "4"]),
        ("llama4", "NASAs HTML5 I'LL.\n", [*"NASAs| HTML|5| I'LL|.\n".split("|")]),
    ],
)
def test_named_pre_tokenizers(pre_tokenizer, text, parts, vocabulary):
    assert split(rebuilt(vocabulary, pre_tokenizer), text) == parts


@pytest.mark.parametrize(
    "pre_tokenizer", ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"]
)
def test_decoding_inverts_encoding(pre_tokenizer, vocabulary):
    tokenizer = rebuilt(vocabulary, pre_tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert 0 in ids and len(ids) < len(TEXT.encode())
    expected = TEXT.replace("e\u0301", "\u00e9") if pre_tokenizer == "qwen2" else TEXT
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_first_and_last_tokens_are_added_as_the_file_says(vocabulary):
    plain = rebuilt(vocabulary, "gpt-2").encode("a").ids
    flag = {"tokenizer.ggml.add_eos_token": True}
    assert rebuilt(vocabulary, "gpt-2", **flag).encode("a").ids == [*plain, 0]
    # Llama 3's and Mistral's begin with one where the file does not say.
    first = {"tokenizer.ggml.bos_token_id": 0}
    for pre in ("llama-bpe", "llama3", "llama-v3", "tekken", "falcon-h1", "lfm2"):
        assert rebuilt(vocabulary, pre, **first).encode("a").ids == [0, *plain]
        off = first | {"tokenizer.ggml.add_bos_token": False}
        assert rebuilt(vocabulary, pre, **off).encode("a").ids == plain
    assert rebuilt(vocabulary, "gpt-2", **first).encode("a").ids == plain


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pre": "tekken-9"}, "tokenizer.ggml.pre='tekken-9'"),
        ({"pre": None}, "tokenizer.ggml.pre=None"),
        ({"pre": ["gpt-2"]}, r"tokenizer.ggml.pre=\['gpt-2'\]"),
        ({"model": ["gpt2"]}, r"tokenizer.ggml.model=\['gpt2'\]"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5'.*tokenizer.json"),
        ({"model": "llama"}, "scores must hold 324 numbers"),
        ({"add_bos_token": 1}, "add_bos_token must be true or false, got 1"),
        ({"merges": ["a b c"]}, "the merge 'a b c'"),
        ({"merges": ["zz qq"]}, "the merge 'zz qq'"),
        ({"merges": 3}, "merges must list strings"),
        ({"tokens": ["a", "a"]}, "'a' appears twice"),
        ({"token_type": 1}, "token_type must hold 324 numbers"),
        ({"token_type": [1]}, "token_type must hold 324 numbers"),
        ({"eos_token_id": 324}, r"eos_token_id must be in \[0, 324\), got 324"),
    ],
)
def test_malformed_vocabularies_are_refused(changes, words, vocabulary):
    changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = vocabulary | {"tokenizer.ggml.pre": "gpt-2"} | changes
    with pytest.raises(ValueError, match=f"the.gguf.*{words}"):
        tokenizer_json(metadata, "the.gguf")


@pytest.fixture(scope="module", name="pieces")
def _pieces():
    return json.loads((GOLDEN / "sentencepiece.json").read_text())


def sentencepiece(pieces, **changes):
    metadata = {k: v for k, v in pieces.items() if k != "ids"} | {"model": "llama"}
    metadata = {f"tokenizer.ggml.{k}": v for k, v in (metadata | changes).items()}
    written = tokenizer_json(metadata, "the.gguf") or b""
    return tokenizers.Tokenizer.from_str(written.decode())


def test_sentencepiece_vocabularies_give_the_same_ids(pieces):
    tokenizer = sentencepiece(pieces)
    for text, ids in pieces["ids"].items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        if "\u2581" not in text:
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_sentencepiece_adds_a_first_token_by_default(pieces):
    start = {"bos_token_id": 1}
    assert sentencepiece(pieces, **start).encode("a").tokens == ["<s>", "\u2581a"]
    more = {"add_bos_token": False, "add_space_prefix": False}
    assert sentencepiece(pieces, **start, **more).encode("a").tokens == ["a"]


def test_unknown_token_may_be_special(pieces):
    """As in Gemma 3's files."""
    changes = {"token_type": [3, *pieces["token_type"][1:]], "unknown_token_id": 0}
    tokenizer = sentencepiece(pieces, **changes)
    for text, ids in pieces["ids"].items():
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
    assert tokenizer.model.unk_token == "<unk>"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"unknown_token_id": 700}, r"unknown_token_id must be in \[0, 700\)"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces changes texts"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap changes texts"),
        ({"scores": [0.0]}, "scores must hold 700 numbers"),
        ({"scores": ["0"] * 700}, "scores must hold 700 numbers"),
        ({"token_type": [1] * 700}, "one unknown token.*got \\[\\] and 256 bytes"),
        ({"tokens": [f"t{i}" for i in range(700)]}, "0 bytes"),
    ],
)
def test_malformed_sentencepiece_vocabularies_are_refused(changes, words, pieces):
    with pytest.raises(ValueError, match=f"the.gguf.*{words}"):
        sentencepiece(pieces, **changes)


def test_excessive_merges_are_refused(pieces):
    tokens = pieces["tokens"][:-1] + ["a" * 2**16]
    with pytest.raises(ValueError, match="too long: the pairs .* 4,29.,.*characters"):
        sentencepiece(pieces, tokens=tokens)
