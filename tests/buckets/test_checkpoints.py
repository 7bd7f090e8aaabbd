"""Checkpoints in a bucket: damage, interrupted saves, refusals."""

import json
import logging
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

from memjax.buckets.bucket import Bucket
from memjax.training.checkpoints import bucket_folder
from memjax.training.checkpoints.checkpoint import Checkpoints
from memjax.training.checkpoints.folder import CheckpointError, SaveError
from memjax.training.checkpoints.tree_spec import abstract
from tests.buckets.stores import Store


def state_of(seed: int) -> dict[str, jax.Array]:
    key = jax.random.key(seed)
    return {
        "weights": jax.random.normal(key, (40, 30)),
        "small": jnp.full((3,), seed, jnp.bfloat16),
        "key": key,
    }


def save(url: str, *steps: int, keep: int = 3) -> None:
    with Checkpoints(url, keep=keep) as checkpoints:
        checkpoints.restore(abstract(state_of(0)))
        for step in steps:
            checkpoints.save(step, state_of(step), {"at": step})


def newest(url: str) -> int | None:
    """The step that is restored; its content must be that of its step."""
    with Checkpoints(url) as checkpoints:
        found = checkpoints.restore(abstract(state_of(0)))
    if found is None:
        return None
    assert found.meta == {"at": found.step}
    saved = jax.tree.map(jax.random.key_data, found.state["key"])
    assert (saved == jax.random.key_data(state_of(found.step)["key"])).all()
    for name in ("weights", "small"):
        chex.assert_trees_all_equal(found.state[name], state_of(found.step)[name])
    return found.step


# The tests of damage save, restore and remove in both stores.
@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_newest_steps_are_restored_and_the_oldest_removed(url: str) -> None:
    assert newest(url) is None
    assert Bucket(url).entries() == {}
    save(url, 1, 2, 3, keep=2)
    with Checkpoints(url) as checkpoints:
        assert checkpoints.steps() == [2, 3]
    assert not Bucket(url).entries("1")
    assert newest(url) == 3
    with pytest.raises(ValueError, match="step 3 is already there"):
        save(url, 3)


def damage(bucket: Bucket, how: str, step: int = 2) -> str:
    """Spoils a step; what the message says of it."""
    names = [n for n in bucket.entries(f"{step}/state") if "/d/" in n]
    largest = max(names, key=lambda n: bucket.entries()[n].size)
    content = bucket.read(largest)
    if how == "changed":
        # Not the last: the server of the tests drops a line break there.
        bucket.write(largest, content[:9] + bytes([content[9] ^ 1]) + content[10:])
        return "differs from what was written (checksum)"
    if how == "cut":
        bucket.write(largest, content[:-1])
        return f"has {len(content) - 1} bytes, {len(content)} were written"
    if how == "missing":
        bucket.delete([largest])
        return "is missing"
    if how == "no digests":
        bucket.delete([f"{step}/digests.json"])
        return "digests.json is missing"
    bucket.write(f"{step}/digests.json", {"torn": b"{", "empty": b"{}"}[how])
    return "digests.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "ways"),
    [("gs", ("changed", "missing", "no digests", "torn", "empty")), ("s3", ("cut",))],
    indirect=["store"],
)
def test_damaged_steps_are_named_skipped_and_kept(
    url: str, caplog: pytest.LogCaptureFixture, ways: tuple[str, ...]
) -> None:
    damaged = range(2, 2 + len(ways))
    save(url, 1, *damaged, keep=9)
    bucket = Bucket(url)
    said = [damage(bucket, *given) for given in zip(ways, damaged, strict=True)]
    assert newest(url) == 1
    lines = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    for step, what in zip(damaged, said, strict=True):
        assert any(
            f"checkpoint {url}/{step} is damaged" in line and what in line
            for line in lines
        ), (step, what, lines)
    left = {step: set(bucket.entries(str(step))) for step in damaged}
    save(url, *damaged, damaged[-1] + 1)
    assert newest(url) == damaged[-1] + 1
    for step, names in left.items():
        kept = bucket.entries(f"{step}.damaged")
        assert {n.replace(".damaged/", "/") for n in kept} == names


def test_if_all_steps_are_damaged_training_does_not_start_over(gs: Store) -> None:
    url = gs.url("damaged")
    save(url, 2)
    damage(Bucket(url), "cut")
    with pytest.raises(CheckpointError, match=r"can be used; damaged: 2"):
        newest(url)


@pytest.mark.parametrize(
    ("store", "objects"),
    [("gs", 3), pytest.param("s3", 9, marks=pytest.mark.slow)],
    indirect=["store"],
)
def test_step_without_its_mark_is_ignored_and_removed(url: str, objects: int) -> None:
    save(url, 1, 2)
    bucket = Bucket(url)
    # What a kill leaves of a save: some objects, in some order, and not the last.
    names = [n for n in bucket.entries("2") if n != f"2/{bucket_folder.COMMITTED}"]
    bucket.delete([f"2/{bucket_folder.COMMITTED}", *names[objects:]])
    assert newest(url) == 1
    assert set(names[:objects]) <= set(bucket.entries())
    save(url, 3)
    assert not bucket.entries("2")
    assert newest(url) == 3


def test_failed_save_is_one_line_and_the_next_succeeds(
    gs: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = gs.url("failed")
    save(url, 1)
    write = Bucket.write

    def refused(bucket: Bucket, name: str, *args: Any, **options: Any) -> None:
        if name == "2/digests.json":
            raise OSError(13, f"cannot write {bucket.url}/{name}: Forbidden")
        write(bucket, name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "write", refused)
        with pytest.raises(SaveError, match="saving step 2 .*Forbidden") as said:
            save(url, 2)
    assert "\n" not in str(said.value)
    assert newest(url) == 1
    save(url, 2)
    assert newest(url) == 2


def test_folder_with_other_content_is_refused(url: str) -> None:
    Bucket(url).write("notes.txt", b"mine")
    with pytest.raises(ValueError, match=r"not a folder of memjax .* but notes\.txt"):
        Checkpoints(url)
    Bucket(url).write("memjax-checkpoints.json", json.dumps({"version": 9}).encode())
    with pytest.raises(ValueError, match="written by another version"):
        Checkpoints(url)


def test_several_processes_are_refused_on_s3(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.scheme == "gs":
        pytest.skip("several processes write there")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="must be on gs:// or a shared filesystem"):
        Checkpoints(url)
