"""Prepared tokens: equal documents and batches, checks, interruptions."""

import copy
import itertools
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.data import (
    chunked_batches,
    load_tokenizer,
    load_tokens,
    packed_batches,
    streamed_batches,
)
from memjax.data.documents import prepare as prepare_module
from memjax.data.documents import prepared
from memjax.data.documents.prepare import PrepareConfig, prepare
from memjax.data.documents.record_tokens import RecordTokens

TOKENIZER = load_tokenizer("bytes")
SPLITS = ("train", "validation", "test")


@pytest.fixture(name="source")
def _source(tmp_path):
    """Twelve documents in two kinds, in order of name."""
    for i in range(12):
        folder = tmp_path / "texts" / ("prose" if i % 3 else "code")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02}.txt").write_text(f"text {i} " * (1 + 5 * i % 7))
    return f"folder:{tmp_path}/texts"


def config_of(source, **changes):
    """Small records and files, so that there are several of each."""
    small = dict(tokenizer="bytes", shard_tokens=100, record_tokens=7)
    return PrepareConfig(source, **{**small, **changes})


def content_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_prepared_documents_equal_tokenised_texts(source, tmp_path):
    manifest = prepare(config_of(source), tmp_path / "ready")
    assert len(manifest["shards"]["train"]) > 1
    for split in SPLITS:
        texts = load_tokens(source, TOKENIZER, split, tmp_path)
        ready = load_tokens(f"prepared:{tmp_path}/ready", TOKENIZER, split)
        assert [d[:2] for d in ready] == [d[:2] for d in texts]
        assert [d.digest for d in ready] == [d.digest for d in texts]
        for a, b in zip(ready, texts, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            assert np.asarray(a.tokens).dtype == a.tokens.dtype == np.int32
        for make in (chunked_batches, packed_batches, streamed_batches):
            batches = [make(d, 8, 2, seed=3, vocab_size=256) for d in (ready, texts)]
            for left, right in itertools.islice(zip(*batches, strict=True), 9):
                for a, b in zip(left, right, strict=True):
                    np.testing.assert_array_equal(a, b)
            # So a run goes on where it was after its texts were prepared.
            assert batches[0].get_state() == batches[1].get_state()


@settings(deadline=None, max_examples=100)
@given(
    length=st.integers(1, 40),
    size=st.integers(1, 9),
    begin=st.none() | st.integers(-45, 45),
    end=st.none() | st.integers(-45, 45),
)
def test_slices_equal_those_of_the_array(length, size, begin, end):
    ids = np.arange(length, dtype=np.int32) * 3
    # Another document lies before and behind.
    records = [np.array([7], np.int32)] * 2
    records += [*np.split(ids, range(size, length, size)), records[0]]
    tokens = RecordTokens(lambda i: records[i], 2, length, size, 200)
    np.testing.assert_array_equal(tokens[begin:end], ids[begin:end])
    np.testing.assert_array_equal(tokens[::-2], ids[::-2])
    assert len(tokens) == tokens.size == length and tokens[-1] == ids[-1]


@pytest.mark.slow
def test_files_do_not_depend_on_the_number_of_workers(source, tmp_path):
    folders = [tmp_path / f"{workers}" for workers in (1, 2)]
    for folder, workers in zip(folders, (1, 2), strict=True):
        prepare(config_of(source, workers=workers), folder)
    assert content_of(folders[0]) == content_of(folders[1])


@pytest.mark.parametrize("stopped_at", [0, 1, 5, 9])
def test_interrupted_preparation_resumes(source, tmp_path, monkeypatch, stopped_at):
    prepare(config_of(source), tmp_path / "whole")
    tokenise, calls = prepare_module.tokenise, []

    def failing(document, tokenizer):
        calls.append(document.name)
        if len(calls) == stopped_at + 1:
            raise KeyboardInterrupt
        return tokenise(document, tokenizer)

    monkeypatch.setattr(prepare_module, "tokenise", failing)
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        prepare(config_of(source), folder)
    with pytest.raises(ValueError, match="written when memjax data prepare is done"):
        load_tokens(f"prepared:{folder}", TOKENIZER, "train")
    finished = {file: file.stat().st_mtime_ns for file in folder.glob("*-*.json")}
    prepare(config_of(source), folder)
    assert content_of(folder) == content_of(tmp_path / "whole")
    # What was finished is not made again.
    assert finished == {file: file.stat().st_mtime_ns for file in finished}
    assert bool(finished) == (stopped_at > 5)


def test_progress_counts_characters_and_finished_files_are_unchanged(source, tmp_path):
    seen = []
    prepare(config_of(source), tmp_path / "ready", lambda *x: seen.append(x))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] and len(seen) == 12
    before = content_of(tmp_path / "ready")
    prepare(config_of(source), tmp_path / "ready", lambda *x: seen.append(x))
    assert content_of(tmp_path / "ready") == before and len(seen) == 12


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer": "bpe4k"},
            "another preparation: tokenizer_digest was",
        ),
        ({"record_tokens": 8}, "record_tokens was 7 and is now 8"),
        ({"shard_tokens": 99}, "shard_tokens was 100 and is now 99"),
        ({"source": "embedded"}, "holds another preparation: documents was"),
    ],
)
def test_folder_with_other_content_is_refused(
    source, tmp_path, monkeypatch, done, changes, message
):
    folder = tmp_path / "ready"
    if done:
        prepare(config_of(source), folder)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, "_tokenised", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prepare(config_of(source), folder)
    before = content_of(folder)
    with pytest.raises(ValueError, match=message):
        prepare(config_of(**{"source": source, **changes}), folder)
    assert content_of(folder) == before


def test_a_folder_with_other_files_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match="must be a new or an empty folder"):
        prepare(config_of(source), tmp_path)


def test_another_tokenizer_is_refused(source, tmp_path):
    prepare(config_of(source), tmp_path / "ready")
    with pytest.raises(ValueError, match="was prepared with tokenizer='bytes'"):
        load_tokens(f"prepared:{tmp_path}/ready", load_tokenizer("bpe4k"), "train")


def test_a_vocabulary_that_is_too_small_is_refused(source, tmp_path):
    prepare(config_of(source), tmp_path / "ready")
    documents = load_tokens(f"prepared:{tmp_path}/ready", TOKENIZER, "train")
    with pytest.raises(ValueError, match="of 256 ids; vocab_size=99 allows"):
        packed_batches(documents, 8, 1, seed=0, vocab_size=99)


def damage_length(folder):
    file = folder / "train-00001.array_record"
    file.write_bytes(file.read_bytes()[:-1])


def damage_version(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 1}))


def damage_index(folder):
    file = folder / "train-00000.json"
    file.write_text(file.read_text().replace("prose", "verse"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_length, "train-00001.array_record must have [0-9,]+ bytes"),
        (lambda f: os.remove(f / "train-00000.array_record"), "but there is nothing"),
        (damage_index, "train-00000.json is not as it was written"),
        (lambda f: os.remove(f / "train-00000.json"), "is not as it was written"),
        (damage_version, "is of version 1, this memjax reads 2"),
    ],
)
def test_changed_files_are_named(source, tmp_path, damage, message):
    prepare(config_of(source), tmp_path / "ready")
    damage(tmp_path / "ready")
    with pytest.raises(ValueError, match=message):
        load_tokens(f"prepared:{tmp_path}/ready", TOKENIZER, "train")


def test_damaged_tokens_are_found_where_they_are_read(source, tmp_path):
    prepare(config_of(source, record_tokens=1000), tmp_path / "ready")
    documents = load_tokens(f"prepared:{tmp_path}/ready", TOKENIZER, "train")
    ids = np.asarray(documents[0].tokens)
    file = tmp_path / "ready" / "train-00000.array_record"
    content = bytearray(file.read_bytes())
    # Behind the file's header, where the first document is.
    content[100:140] = bytes(40)
    file.write_bytes(content)
    damaged = load_tokens(f"prepared:{tmp_path}/ready", TOKENIZER, "train")
    assert len(damaged[0].tokens) == len(ids)
    with pytest.raises(ValueError, match="train-00000.array_record is damaged"):
        damaged[0].tokens[:3]


def test_a_text_without_a_token_is_named(source, tmp_path, monkeypatch):
    empty = type(TOKENIZER)
    monkeypatch.setattr(empty, "encode", lambda *_: np.zeros(0, np.int32))
    with pytest.raises(ValueError, match="'code/00.txt' encodes to no token"):
        prepare(config_of(source), tmp_path / "ready")


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="workers must be"):
        PrepareConfig(workers=0)


def test_a_manifest_that_is_no_object_is_refused(tmp_path):
    (tmp_path / prepared.MANIFEST).write_text("[1]")
    with pytest.raises(ValueError, match=r"manifest.json must be an object, got \[1\]"):
        prepared.read_manifest(tmp_path)


def changes(record):
    """Copies of a record, each with one field removed or of another type."""
    for key in record if isinstance(record, dict) else range(len(record)):
        rest = copy.deepcopy(record)
        if isinstance(record, dict):
            del rest[key]
            yield rest
        for other in (None, "x", -1, [], {}, 1.5):
            yield (
                copy.deepcopy(rest) | {key: other}
                if isinstance(rest, dict)
                else ([*record[:key], other, *record[key + 1 :]])
            )
        if isinstance(record[key], dict | list):
            for inner in changes(record[key]):
                whole = copy.deepcopy(record)
                whole[key] = inner
                yield whole


def test_every_field_of_a_manifest_is_checked(source, tmp_path):
    folder = tmp_path / "ready"
    prepare(config_of(source), folder)
    file = folder / prepared.MANIFEST
    whole = json.loads(file.read_text())

    def contents():
        documents = load_tokens(f"prepared:{folder}", TOKENIZER, "train")
        return [(d.name, d.digest) for d in documents]

    expected, refused = contents(), 0
    changed = [*changes(whole), whole | {"surplus": 1}]
    for record in changed:
        file.write_text(json.dumps(record))
        try:
            assert contents() == expected
        except ValueError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
            refused += 1
    # The others are names of source and tokenizer, and digests that resuming compares.
    assert refused > len(changed) - 20
    # As the manifest lists its files, so one that it has lost.
    shards = whole["shards"] | {"train": whole["shards"]["train"][:-1]}
    file.write_text(json.dumps(whole | {"shards": shards}))
    with pytest.raises(ValueError, match="does not list train-"):
        contents()
