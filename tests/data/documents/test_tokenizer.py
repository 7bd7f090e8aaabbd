"""Tokenizers: lossless, honest about their ids, strict about their names."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.corpus import build_tokenizer
from memjax.data import load_tokenizer
from memjax.data.documents.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SHIPPED = {name: load_tokenizer(name) for name in ("bytes", "bpe4k")}


@pytest.mark.parametrize("name", SHIPPED)
@settings(deadline=None)
@given(text=TEXT)
def test_decode_inverts_encode(name, text):
    tokenizer = SHIPPED[name]
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert not ids.size or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size


def test_vocabularies_and_digests():
    assert SHIPPED["bytes"].vocab_size == 256
    assert SHIPPED["bpe4k"].vocab_size == 4096
    assert SHIPPED["bytes"].digest != SHIPPED["bpe4k"].digest
    assert all(isinstance(tokenizer, Tokenizer) for tokenizer in SHIPPED.values())


def test_bpe_is_shorter_than_bytes_and_splits_digits():
    text = "the whole of the theorem in 1234"
    bpe = SHIPPED["bpe4k"]
    assert len(bpe.encode(text)) < len(SHIPPED["bytes"].encode(text)) / 2
    assert len(bpe.encode("1234")) == 4


def test_a_json_file_is_read_from_its_path(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(build_tokenizer.train_tokenizer(["aaab abab"] * 20, 260))
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.decode(tokenizer.encode("ab aab")) == "ab aab"
    assert 256 <= tokenizer.vocab_size <= 260


def test_truncation_and_padding_in_the_file_are_not_obeyed(tmp_path):
    content = json.loads(build_tokenizer.train_tokenizer(["ab"], 256))
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file = tmp_path / "cuts.json"
    file.write_text(json.dumps(content))
    assert len(load_tokenizer(str(file)).encode("a b c d e")) == 9


def test_command_writes_what_load_reads(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("some words, some more words\n" * 9)
    config = build_tokenizer.Config(
        destination=tmp_path / "own.json",
        source=f"folder:{tmp_path / 'texts'}",
        vocab_size=270,
    )
    build_tokenizer.main(config)
    size = load_tokenizer(str(config.destination)).vocab_size
    assert 256 < size <= 270
    assert f"1 documents, {size} ids" in capsys.readouterr().out
    with pytest.raises(ValueError, match="vocab_size=255"):
        build_tokenizer.main(dataclasses.replace(config, vocab_size=255))


def test_unknown_name_gets_its_near_match():
    with pytest.raises(ValueError, match="'bpe4'.*did you mean 'bpe4k'"):
        load_tokenizer("bpe4")


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="bad.json.*not a tokenizers JSON"):
        load_tokenizer(str(file))


@pytest.mark.parametrize("name", SHIPPED)
def test_ids_out_of_range_are_refused(name):
    with pytest.raises(ValueError, match="range from -1 to 5000"):
        SHIPPED[name].decode(np.array([-1, 5000], np.int32))


@pytest.mark.parametrize("name", SHIPPED)
def test_lone_surrogates_are_refused(name):
    with pytest.raises(ValueError, match="surrogates"):
        SHIPPED[name].encode("a\ud800")
