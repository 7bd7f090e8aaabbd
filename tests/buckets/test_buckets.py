"""Objects below a URL, and copies of small files."""

import re
from pathlib import Path

import pytest

from memjax.buckets.bucket import Bucket, as_path, is_bucket
from memjax.buckets.local_copies import WorkingCopy
from tests.buckets.stores import Store


def test_objects_are_written_listed_read_moved_and_deleted(url: str) -> None:
    bucket = Bucket(url)
    assert bucket.entries() == {}
    bucket.write("a/b", b"one")
    bucket.write("ab", b"three")
    assert {name: entry.size for name, entry in bucket.entries().items()} == {
        "a/b": 3,
        "ab": 5,
    }
    # A name that begins alike is no folder.
    assert list(bucket.entries("a")) == ["a/b"]
    before = bucket.entries()["a/b"].checksum
    bucket.write("a/b", b"two")
    assert bucket.entries()["a/b"].checksum not in ("", before)
    with pytest.raises(FileExistsError, match="cannot write"):
        bucket.write("a/b", b"three", new=True)
    bucket.move("a/b", "c/d")
    assert bucket.read("c/d") == b"two"
    bucket.delete(["c/d", "c/d", "never"])
    assert list(bucket.entries()) == ["ab"]
    with pytest.raises(FileNotFoundError, match=re.escape(f"cannot read {url}/c/d")):
        bucket.read("c/d")


def test_paths_on_disk_and_in_buckets_behave_alike(url: str, tmp_path: Path) -> None:
    for base in (url, str(tmp_path / "x")):
        folder = as_path(base) / "inner"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").write_text("text")
        assert str(folder / "file") == f"{base}/inner/file"
        assert (folder / "file").is_file() and not (folder / "other").is_file()
        assert as_path(folder) == folder
        assert is_bucket(folder) == (base == url)
        with (folder / "file").open("rb") as stream:
            assert stream.read() == b"text"
    # As the command line passes a URL on.
    assert str(as_path(Path(url))) == url


def test_a_working_copy_pushes_what_changed(url: str, tmp_path: Path) -> None:
    bucket = Bucket(url)
    bucket.write("old", b"old")
    bucket.write("profile/trace", b"large")
    bucket.write("checkpoints/5/large", b"large")
    copy = WorkingCopy(url, tmp_path, ["checkpoints"])
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["old"]
    with (tmp_path / "old").open("ab") as stream:
        stream.write(b" and new")
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile/second").write_bytes(b"trace")
    copy.push()
    assert bucket.read("old") == b"old and new"
    assert bucket.read("new") == b"new"
    assert bucket.read("profile/second") == b"trace"
    assert bucket.read("profile/trace") == b"large"
    # What did not change is not written again.
    bucket.write("new", b"of another")
    (tmp_path / "third").write_bytes(b"")
    copy.push()
    assert bucket.read("new") == b"of another"
    assert bucket.read("checkpoints/5/large") == b"large"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (("403 Forbidden", "AccessDenied"), "AccessDenied"),
        (("507 Insufficient Storage", "QuotaExceeded"), "QuotaExceeded"),
    ],
)
def test_answer_of_a_store_is_one_line(
    store: Store, url: str, answer: tuple[str, str], text: str
) -> None:
    store.refuse(answer)
    try:
        with pytest.raises(OSError, match=re.escape(f"cannot write {url}/a: ")) as said:
            Bucket(url).write("a", b"x")
    finally:
        store.refuse(None)
    assert text in str(said.value) and "\n" not in str(said.value)


def test_a_bucket_that_does_not_exist_is_named(store: Store) -> None:
    url = f"{store.scheme}://no-such-bucket/run"
    with pytest.raises(OSError, match=re.escape(f"cannot write {url}/a: ")):
        Bucket(url).write("a", b"x")
