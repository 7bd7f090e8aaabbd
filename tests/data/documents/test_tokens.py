"""The token cache: filled once, checked always, mended when damaged."""

import inspect
import logging

import numpy as np
import pytest

from memjax.data import load_tokenizer, load_tokens
from memjax.data.documents import tokens


@pytest.fixture
def spec(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, size in (("a", 30), ("b", 20), ("c", 10)):
        (folder / f"{name}.txt").write_text(name * size)
    return f"folder:{folder}"


class _Counting:
    """The byte tokenizer, counting its calls."""

    vocab_size = 256
    digest = "counting"

    def __init__(self):
        self.calls = 0

    def encode(self, text):
        self.calls += 1
        return load_tokenizer("bytes").encode(text)

    def decode(self, ids):
        return load_tokenizer("bytes").decode(ids)


def test_tokens_are_the_text_mapped_from_disk(spec, tmp_path):
    (document,) = load_tokens(spec, load_tokenizer("bytes"), "train", tmp_path)
    assert (document.name, document.kind) == ("a.txt", "text")
    assert isinstance(document.tokens, np.memmap)
    assert document.tokens.dtype == np.int32
    np.testing.assert_array_equal(document.tokens, np.full(30, ord("a")))


def test_each_text_is_tokenised_once(spec, tmp_path):
    tokenizer = _Counting()
    for _ in range(3):
        load_tokens(spec, tokenizer, "train", tmp_path)
    assert tokenizer.calls == 1
    load_tokens(spec, tokenizer, "test", tmp_path)
    assert tokenizer.calls == 2


def test_another_tokenizer_or_text_is_another_entry(spec, tmp_path):
    load_tokens(spec, load_tokenizer("bytes"), "train", tmp_path)
    (bpe,) = load_tokens(spec, load_tokenizer("bpe4k"), "train", tmp_path)
    assert bpe.tokens[0] != ord("a")
    folder = tmp_path / "texts"
    (folder / "a.txt").write_text("z" * 31)
    (changed,) = load_tokens(spec, load_tokenizer("bytes"), "train", tmp_path)
    assert len(changed.tokens) == 31


def _flip(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        _flip,
        lambda file: file.write_bytes(file.read_bytes()[:-5]),
        lambda file: file.write_bytes(b""),
        lambda file: file.with_suffix(".sha256").unlink(),
        lambda file: file.with_suffix(".sha256").write_bytes(b"\xff"),
    ],
    ids=["bit flip", "truncated", "empty", "no digest", "foreign digest"],
)
def test_a_damaged_entry_is_built_anew(spec, tmp_path, caplog, damage):
    tokenizer = _Counting()
    load_tokens(spec, tokenizer, "train", tmp_path)
    (file,) = (tmp_path / "tokens").glob("*.npy")
    damage(file)
    with caplog.at_level(logging.WARNING):
        (document,) = load_tokens(spec, tokenizer, "train", tmp_path)
    assert file.name in caplog.text and "damaged" in caplog.text
    np.testing.assert_array_equal(document.tokens, np.full(30, ord("a")))
    assert tokenizer.calls == 2
    caplog.clear()
    load_tokens(spec, tokenizer, "train", tmp_path)
    assert tokenizer.calls == 2 and not caplog.text


def test_nothing_partial_is_left_behind(spec, tmp_path):
    load_tokens(spec, load_tokenizer("bytes"), "train", tmp_path)
    suffixes = sorted(file.suffix for file in (tmp_path / "tokens").iterdir())
    assert suffixes == [".npy", ".sha256"]


def test_default_cache_follows_xdg(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_tokens(spec, load_tokenizer("bytes"), "train")
    assert list((tmp_path / "xdg" / "memjax" / "tokens").glob("*.npy"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tokens.default_cache_dir() == tmp_path / ".cache" / "memjax"


def test_a_split_without_documents_says_why(tmp_path):
    (tmp_path / "only.txt").write_text("one document")
    with pytest.raises(ValueError, match="no document in split='test'.*three"):
        load_tokens(f"folder:{tmp_path}", load_tokenizer("bytes"), "test", tmp_path)


def test_an_unknown_split_is_refused_before_reading(tmp_path):
    # Without the annotation check of the tests, as users call it.
    plain = inspect.unwrap(load_tokens)
    with pytest.raises(ValueError, match="split='valid' must be one of train"):
        plain("folder:/nowhere", load_tokenizer("bytes"), "valid", tmp_path)  # pyright: ignore


class _Liar(_Counting):
    vocab_size = 50


class _Mute(_Counting):
    def encode(self, text):
        del text
        return np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(_Liar(), r"ids from 97 to 97.*\[0, 50\)"), (_Mute(), "encodes to no token")],
)
def test_a_tokenizer_that_breaks_its_word_is_refused(
    spec, tmp_path, tokenizer, message
):
    with pytest.raises(ValueError, match=message):
        load_tokens(spec, tokenizer, "train", tmp_path)
