"""The token cache: filled once, checked, rebuilt when damaged."""

import hashlib
import inspect
import logging
import os
import resource

import numpy as np
import pytest

from memjax.data import load_tokenizer, load_tokens
from memjax.data.documents import folder, tokens


@pytest.fixture
def spec(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, size in (("a", 30), ("b", 20), ("c", 10)):
        (texts / f"{name}.txt").write_text(name * size)
    return f"folder:{texts}"


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
    assert isinstance(document.tokens, np.ndarray)
    assert not document.tokens.flags.writeable and _is_mapped(document.tokens)
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
    (tmp_path / "texts" / "a.txt").write_text("z" * 31)
    (changed,) = load_tokens(spec, load_tokenizer("bytes"), "train", tmp_path)
    assert len(changed.tokens) == 31


def _is_mapped(array):
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None


def test_documents_share_one_mapping(tmp_path):
    """With two files and an open mapping each, 1,600 met the limit of a system."""
    (tmp_path / "rows.jsonl").write_text('{"text": "ab"}\n' * 2000)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, limits[1]))
    try:
        documents = load_tokens(
            f"folder:{tmp_path}", load_tokenizer("bytes"), "train", tmp_path / "cache"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(documents) == 2000
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) <= 3
    np.testing.assert_array_equal(documents[1999].tokens, [97, 98])
    assert documents[1999].name == "rows.jsonl:2000"


def test_unchanged_files_are_read_and_hashed_once(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "SETTLED_SECONDS", -1)
    tokenizer = _Counting()
    load_tokens(spec, tokenizer, "train", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(folder, "read_rows", None)
        patched.setattr(hashlib, "file_digest", None)
        (again,) = load_tokens(spec, tokenizer, "train", tmp_path)
    assert again.name == "a.txt" and tokenizer.calls == 1
    (tmp_path / "texts" / "a.txt").write_text("b" * 30)
    (changed,) = load_tokens(spec, tokenizer, "train", tmp_path)
    assert changed.tokens[0] == ord("b")


def test_recently_changed_text_is_read_again(spec, tmp_path):
    """Its time of change may stay the same when it changes once more."""
    load_tokens(spec, load_tokenizer("bytes"), "train", tmp_path)
    file = tmp_path / "texts" / "a.txt"
    times = file.stat().st_mtime_ns
    file.write_text("z" * 30)
    os.utime(file, ns=(times, times))
    (changed,) = load_tokens(spec, load_tokenizer("bytes"), "train", tmp_path)
    assert changed.tokens[0] == ord("z")


def test_writers_with_equal_process_ids_do_not_interfere(spec, tmp_path):
    """Containers that share a cache number their processes alike."""

    class Slow(_Counting):
        # Another writer of the same tokens starts and ends while this one writes.
        def encode(self, text):
            if self.calls == 0:
                self.calls = 1
                load_tokens(spec, load_tokenizer("bytes"), "train", tmp_path)
            return load_tokenizer("bytes").encode(text)

    slow = Slow()
    slow.digest = load_tokenizer("bytes").digest
    (document,) = load_tokens(spec, slow, "train", tmp_path)
    np.testing.assert_array_equal(document.tokens, np.full(30, ord("a")))
    assert not list((tmp_path / "tokens").glob("*.tmp"))


def test_source_that_changes_between_readings_is_refused(spec, tmp_path):
    class Changing(_Counting):
        def encode(self, text):
            (tmp_path / "texts" / "b.txt").write_text("other")
            return super().encode(text)

    with pytest.raises(ValueError, match="'b.txt' changed while the source was read"):
        load_tokens(spec, Changing(), "train", tmp_path)


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
        lambda file: file.with_suffix(".index").write_bytes(b"\xff"),
        lambda file: _flip(file.with_suffix(".index")),
    ],
    ids=["bit flip", "truncated", "empty", "foreign index", "flipped index"],
)
def test_damaged_cache_entry_is_rebuilt(spec, tmp_path, caplog, damage):
    tokenizer = _Counting()
    load_tokens(spec, tokenizer, "train", tmp_path)
    (file,) = (tmp_path / "tokens").glob("*.tokens")
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
    assert suffixes == [".index", ".tokens"]


def test_default_cache_follows_xdg(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_tokens(spec, load_tokenizer("bytes"), "train")
    assert list((tmp_path / "xdg" / "memjax" / "tokens").glob("*.tokens"))
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
def test_tokenizer_with_ids_beyond_its_vocabulary_is_refused(
    spec, tmp_path, tokenizer, message
):
    with pytest.raises(ValueError, match=message):
        load_tokens(spec, tokenizer, "train", tmp_path)
