"""Objects below a URL, and copies of small files."""

import re
from pathlib import Path

import pytest

from memjax.buckets import store as store_module
from memjax.buckets.bucket import Bucket, as_path, is_bucket
from memjax.buckets.local_copies import WorkingCopy
from tests.buckets.faults import WRITES, Fault
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
    ("answer", "advice"),
    [
        ("403 AccessDenied", "check the credentials"),
        ("400 ExpiredToken", "check the credentials"),
        ("507 QuotaExceeded", "try again later"),
    ],
)
def test_answer_of_a_store_is_one_line(
    store: Store, url: str, answer: str, advice: str
) -> None:
    with store.failing(Fault(answer, WRITES)):
        with pytest.raises(OSError, match=re.escape(f"cannot write {url}/a: ")) as said:
            Bucket(url).write("a", b"x")
    assert answer.split()[1] in str(said.value) and advice in str(said.value)
    assert "\n" not in str(said.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "written", "read"),
    [
        ("gs", "503 SlowDown", "cut"),
        ("s3", "cut", "500 InternalError"),
        ("s3", "slow", "slow"),
    ],
    indirect=["store"],
)
def test_a_fault_that_passes_is_not_noticed(
    store: Store, url: str, tmp_path: Path, written: str, read: str
) -> None:
    bucket, content = Bucket(url), bytes(range(256)) * 400
    (tmp_path / "up").write_bytes(content)
    with store.failing(Fault(written, times=1)):
        bucket.upload(tmp_path, ["up"])
        assert store.proxy.met == 1
    with store.failing(Fault(read, "GET", times=1)):
        bucket.download(["up"], tmp_path / "down")
        assert store.proxy.met == 1
    assert (tmp_path / "down/up").read_bytes() == content


@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_a_store_that_never_answers_is_waited_for_in_one_line(
    store: Store,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(store_module, "WAITING", 0.1)
    monkeypatch.setattr(store_module, "GIVING_UP", 0.3)
    bucket = Bucket(url)
    with store.failing(Fault("silent")):
        for _ in range(2):
            with pytest.raises(OSError, match="no answer within .*try again later"):
                bucket.write("a", b"x")
    # gcsfs looks for credentials, and says so in a process's first test of it.
    [record] = [r for r in caplog.records if r.name.startswith("memjax")]
    assert f"cannot write {url}/a yet" in record.getMessage()


def test_a_bucket_that_does_not_exist_is_named(store: Store) -> None:
    url = f"{store.scheme}://no-such-bucket/run"
    with pytest.raises(OSError, match=re.escape(f"cannot write {url}/a: ")):
        Bucket(url).write("a", b"x")
