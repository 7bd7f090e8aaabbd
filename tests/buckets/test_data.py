"""Documents in a bucket equal those on a disk."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from memjax.buckets.bucket import Bucket, as_path
from memjax.buckets.local_copies import cached_files
from memjax.data import load_tokenizer, load_tokens
from memjax.data.documents import prepare as prepare_module
from memjax.data.documents.prepare import PrepareConfig, prepare

# What a store does otherwise is in `test_buckets.py`.
in_gs, in_s3 = (
    pytest.mark.parametrize("store", [name], indirect=True) for name in ("gs", "s3")
)
TOKENIZER = load_tokenizer("bytes")
SPLITS = ("train", "validation", "test")


@pytest.fixture(name="texts")
def _texts(tmp_path: Path) -> Path:
    """Files of every form, in folders of two kinds."""
    folder = tmp_path / "texts"
    for kind in ("code", "prose"):
        (folder / kind).mkdir(parents=True)
        for i in range(3):
            (folder / kind / f"{i}.txt").write_text(f"text {i} of {kind} " * (3 + i))
        lines = (f'{{"text": "line {i} of {kind}"}}\n' for i in range(3))
        (folder / kind / "lines.jsonl").write_text("".join(lines))
    table = pa.table({"text": [f"row {i}" * 9 for i in range(5)], "other": [0] * 5})
    parquet.write_table(table, folder / "prose" / "rows.parquet", row_group_size=2)
    (folder / "notes.pdf").write_bytes(b"not read")
    return folder


def upload(folder: Path, url: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    Bucket(url).upload(folder, [path.relative_to(folder).as_posix() for path in files])


def same(spec: str, other: str, cache: Path) -> None:
    for split in SPLITS:
        found, expected = (
            load_tokens(source, TOKENIZER, split, cache / name)
            for source, name in ((spec, "a"), (other, "b"))
        )
        assert [d[:2] for d in found] == [d[:2] for d in expected]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)


@in_gs
def test_a_folder_is_read_in_place(texts: Path, url: str, tmp_path: Path) -> None:
    upload(texts, url)
    same(f"folder:{url}", f"folder:{texts}", tmp_path)
    # What changes in the bucket is seen, and what does not is not read again.
    (texts / "code/0.txt").write_text("another text")
    Bucket(url).write("code/0.txt", b"another text")
    same(f"folder:{url}", f"folder:{texts}", tmp_path)


@in_gs
def test_a_file_that_cannot_be_read_is_named_by_its_url(
    texts: Path, url: str, tmp_path: Path
) -> None:
    upload(texts, url)
    Bucket(url).write("prose/bad.jsonl", b'{"text": "good"}\n{"txet": 1}\n')
    with pytest.raises(ValueError, match=f"{url}/prose/bad.jsonl:2: no column"):
        load_tokens(f"folder:{url}", TOKENIZER, "train", tmp_path)
    Bucket(url).write("prose/bad.jsonl", b'{"text": "good"}\n')
    Bucket(url).write("prose/bad.parquet", b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"bad\.parquet: not a readable parquet"):
        load_tokens(f"folder:{url}", TOKENIZER, "train", tmp_path)
    with pytest.raises(ValueError, match="is neither a file nor a folder"):
        load_tokens(f"folder:{url}-absent", TOKENIZER, "train", tmp_path)


@in_s3
def test_prepared_documents_are_written_and_read(
    texts: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = f"folder:{texts}"
    config = PrepareConfig(source, "bytes", shard_tokens=100, record_tokens=7)
    manifest = prepare(config, as_path(url))
    assert prepare(config, as_path(url)) == manifest
    assert not list((tmp_path / "cache/memjax/prepare").iterdir())
    same(f"prepared:{url}", source, tmp_path)
    # The copies are there the next time.
    copies = tmp_path / "a/buckets"
    before = {path: path.stat().st_mtime_ns for path in copies.rglob("*.array_record")}
    assert len(before) > 3
    same(f"prepared:{url}", source, tmp_path)
    assert before == {
        path: path.stat().st_mtime_ns for path in copies.rglob("*.array_record")
    }
    # A file that is gone is named, and another preparation is refused.
    name = manifest["shards"]["test"][0]["file"]
    Bucket(url).delete([name])
    with pytest.raises(ValueError, match=f"{name} must have"):
        load_tokens(f"prepared:{url}", TOKENIZER, "test", tmp_path / "c")
    other = PrepareConfig(source, "bytes", shard_tokens=99, record_tokens=7)
    with pytest.raises(ValueError, match="shard_tokens"):
        prepare(other, as_path(url))


@in_gs
def test_interrupted_preparation_has_no_manifest_and_resumes(
    texts: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = PrepareConfig(f"folder:{texts}", "bytes", shard_tokens=60, record_tokens=7)

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare_module, "put", stopped)
        prepare(config, as_path(url))
    assert not Bucket(url).entries()
    # Nor does a copy that was cut short hinder the next one.
    Bucket(url).write("train-00000.array_record", b"half")
    prepare(config, as_path(url))
    same(f"prepared:{url}", f"folder:{texts}", tmp_path)


def test_cached_files_follow_the_content(url: str, tmp_path: Path) -> None:
    bucket = Bucket(url)
    bucket.write("inner/a", b"one")
    first = cached_files(url, ["inner/a", "absent"], tmp_path)
    assert (first / "inner/a").read_bytes() == b"one"
    bucket.write("inner/a", b"two")
    second = cached_files(url, ["inner/a"], tmp_path)
    assert (second / "inner/a").read_bytes() == b"two" and second != first
