"""Checkpoints: damage found, nothing lost, nothing cast, failures loud."""

import functools
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from memjax.training.checkpoints import disk_folder
from memjax.training.checkpoints.checkpoint import (
    CheckpointError,
    Checkpoints,
    DiskFullError,
    SaveError,
)
from memjax.training.checkpoints.checksums import problems
from memjax.training.checkpoints.tree_spec import abstract
from tests.training.processes import Process


class State(NamedTuple):
    """A state as training has it."""

    params: dict[str, jax.Array]
    optimizer: Any
    key: jax.Array
    empty: None
    step: jax.Array


def make_state(step: int, size: int = 64) -> State:
    w = jax.random.normal(jax.random.key(step), (size, size))
    params = {"w": w, "b": jnp.arange(3, dtype=jnp.bfloat16)}
    return State(
        params,
        optax.adamw(1e-3).init(params),
        jax.random.key(step),
        None,
        jnp.asarray(step, jnp.int32),
    )


def as_bytes(state: Any) -> list[bytes]:
    plain = state._replace(key=jax.random.key_data(state.key))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def save_steps(folder: Path, steps: list[int], **options: Any) -> None:
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"position": step})


def data_file(step_folder: Path) -> Path:
    files = (p for p in step_folder.glob("state/**/*") if p.is_file())
    return max(files, key=lambda p: p.stat().st_size)


def flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def test_round_trip_keeps_every_bit_and_type(tmp_path: Path) -> None:
    state = make_state(5)
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.restore(abstract(state)) is None
        assert not (tmp_path / "c").exists()
        checkpoints.save(5, state, {"nested": {"x": [1, None]}})
    with Checkpoints(tmp_path / "c") as checkpoints:
        found = checkpoints.restore(abstract(state))
    assert found is not None and found.step == 5
    assert found.meta == {"nested": {"x": [1, None]}}
    assert jax.tree.structure(found.state) == jax.tree.structure(state)
    assert as_bytes(found.state) == as_bytes(state)
    assert found.state.key.dtype == state.key.dtype
    assert found.state.params["b"].dtype == jnp.bfloat16


def test_state_may_be_donated_while_it_is_written(tmp_path: Path) -> None:
    @functools.partial(jax.jit, donate_argnums=0)
    def advance(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"w": x["w"] + 1}

    state = {"w": jnp.zeros((1500, 1500))}
    with Checkpoints(tmp_path) as checkpoints:
        for step in range(1, 4):
            state = advance(state)
            checkpoints.save(step, state, {})
            for _ in range(20):
                state = advance(state)
        checkpoints.wait()
        found = checkpoints.restore(abstract(state))
    assert found is not None
    # 20 steps on from each of the two saves before.
    np.testing.assert_array_equal(found.state["w"], np.full((1500, 1500), 43.0))


def truncate(folder: Path) -> str:
    path = data_file(folder)
    os.truncate(path, path.stat().st_size // 2)
    return path.name


def flip_data(folder: Path) -> str:
    path = data_file(folder)
    flip(path)
    return path.name


def remove(folder: Path) -> str:
    path = data_file(folder)
    path.unlink()
    return path.name


def flip_meta(folder: Path) -> str:
    flip(folder / "record" / "metadata")
    return "record/metadata"


def remove_digests(folder: Path) -> str:
    (folder / "digests.json").unlink()
    return "digests.json"


def truncate_digests(folder: Path) -> str:
    os.truncate(folder / "digests.json", 100)
    return "digests.json"


def empty(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return "digests.json"


DAMAGES = [truncate, flip_data, remove, flip_meta]
DAMAGES += [remove_digests, truncate_digests, empty]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_is_named_left_and_stepped_over(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, [1, 2])
    file = damage(tmp_path / "2")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with caplog.at_level(logging.ERROR), Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(abstract(make_state(0)))
    assert found is not None and found.step == 1 and found.meta == {"position": 1}
    assert as_bytes(found.state) == as_bytes(make_state(1))
    [message] = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
    assert str(tmp_path / "2") in message and file in message
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_one_flipped_bit_in_any_file_is_found(tmp_path: Path) -> None:
    save_steps(tmp_path, [1])
    files = [p for p in (tmp_path / "1").glob("*/**/*") if p.is_file()]
    assert len(files) > 5
    for path in files:
        for at in (0.0, 0.7, 1.0):
            flip(path, at)
            [wrong] = problems(tmp_path / "1")
            assert path.name in wrong
            flip(path, at)
    assert problems(tmp_path / "1") == []


def test_all_damaged_raises_and_lists_them(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2])
    flip_data(tmp_path / "1")
    truncate(tmp_path / "2")
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"damaged: 2, 1"):
            checkpoints.restore(abstract(make_state(0)))
    assert (tmp_path / "1").is_dir() and (tmp_path / "2").is_dir()


def test_saving_a_damaged_step_again_sets_it_aside(tmp_path: Path) -> None:
    for name in ("2.damaged", "2.damaged-2"):
        if not (tmp_path / "1").exists():
            save_steps(tmp_path, [1, 2])
        flip_data(tmp_path / "2")
        bad = data_file(tmp_path / "2").read_bytes()
        with Checkpoints(tmp_path) as checkpoints:
            found = checkpoints.restore(abstract(make_state(0)))
            assert found is not None and found.step == 1
            checkpoints.save(2, make_state(2), {})
        assert data_file(tmp_path / name).read_bytes() == bad
        assert problems(tmp_path / "2") == []
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(
            ValueError, match="step 2 cannot be saved.*step 2 is already"
        ):
            checkpoints.save(2, make_state(2), {})


def test_keep_counts_only_good_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2, 3, 4, 5], keep=3)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [3, 4, 5]
        flip_data(tmp_path / "4")
        truncate(tmp_path / "5")
        found = checkpoints.restore(abstract(make_state(0)))
        assert found is not None and found.step == 3
        # Without a look at the newer ones first, and older than they are.
        flip_data(tmp_path / "3")
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, make_state(2), {})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 4, 5]
        found = checkpoints.restore(abstract(make_state(0)))
        assert found is not None and found.step == 2
        checkpoints.save(4, make_state(4), {})
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4, 5]
        found = checkpoints.restore(abstract(make_state(0)))
        assert found is not None and found.step == 4
        with pytest.raises(ValueError, match="step 3 cannot be .*step 4 is already"):
            checkpoints.save(3, make_state(3), {})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            dict(w=np.zeros((64, 32), np.float32), b=np.zeros(3, jnp.bfloat16)),
            "'w'.*64,32.*64,64",
        ),
        (
            dict(w=np.zeros((64, 64), np.float32), b=np.zeros(3, np.float32)),
            "'b'.*float32.*bfloat16",
        ),
        (dict(w=np.zeros((64, 64), np.float32)), "'b'.*expected no such leaf"),
        (
            dict(
                w=np.zeros((64, 64), np.float32),
                b=np.zeros(3, jnp.bfloat16),
                c=np.zeros(2, np.float32),
            ),
            r"'c'.*expected float32\[2\], found no such leaf",
        ),
    ],
)
def test_another_structure_is_refused_by_name(
    tmp_path: Path, params: Any, message: str
) -> None:
    state = make_state(1)
    save_steps(tmp_path, [1])
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(abstract(state._replace(params=params)))


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="abfs://bucket/x"):
        Checkpoints("abfs://bucket/x")
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(ValueError, match="step must be at least 0, got -1"):
            checkpoints.save(-1, make_state(1), {})
        with pytest.raises(ValueError, match="meta must be JSON"):
            checkpoints.save(1, make_state(1), {"x": object()})
        with pytest.raises(ValueError, match=r"leaf \['n'\] must be a JAX array.*int"):
            checkpoints.save(1, {"n": 3}, {})


def test_foreign_folder_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match=r"not a folder of memjax.*thesis\.txt"):
        Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        Checkpoints(tmp_path / "thesis.txt")
    save_steps(tmp_path / "c", [1])
    marker = tmp_path / "c" / "memjax-checkpoints.json"
    marker.write_text(json.dumps({"format": "memjax checkpoints", "version": 99}))
    with pytest.raises(ValueError, match="another version"):
        Checkpoints(tmp_path / "c")


def test_remains_of_killed_saves_are_ignored_then_cleared(tmp_path: Path) -> None:
    save_steps(tmp_path, [1])
    for name in ("2.orbax-checkpoint-tmp", "0.deleted"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "half").write_bytes(b"x" * 100)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.restore(abstract(make_state(0)))
        assert found is not None and found.step == 1
        assert (tmp_path / "2.orbax-checkpoint-tmp").exists()
        checkpoints.save(2, make_state(2), {})
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"1", "2", "memjax-checkpoints.json", ".lock"}


def test_two_runs_cannot_save_in_one_folder(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as first, Checkpoints(tmp_path) as second:
        first.save(1, make_state(1), {})
        with pytest.raises(SaveError, match="another process"):
            second.save(2, make_state(2), {})
        first.wait()
        assert second.restore(abstract(make_state(0))) is not None


def test_no_room_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, [1])
    usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(disk_folder.shutil, "disk_usage", lambda _: usage)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(DiskFullError, match="10000 free"):
            checkpoints.save(2, make_state(2), {})
    assert [p.name for p in tmp_path.glob("2*")] == []
    assert problems(tmp_path / "1") == []


def test_disk_that_fills_during_a_save(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before a save is deceived, so that the write itself must fail."""
    key = jax.random.key(0)
    small, large = ({"w": jax.random.normal(key, (n, n))} for n in (128, 2048))
    folder = small_disk / "c"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, small, {})
        checkpoints.wait()
        usage = shutil.disk_usage(folder)._replace(free=10**12)
        monkeypatch.setattr(disk_folder.shutil, "disk_usage", lambda _: usage)
        checkpoints.save(2, large, {})
        with pytest.raises(DiskFullError, match="saving step 2 in"):
            checkpoints.wait()
        monkeypatch.undo()
        # What the failed save had written does not keep the disk full.
        assert not list(folder.glob("2*"))
        assert shutil.disk_usage(folder).free > 5 * 2**20
        found = checkpoints.restore(abstract(small))
        assert found is not None and found.step == 1
        checkpoints.save(3, small, {})


def test_full_disk_is_refused(small_disk: Path) -> None:
    state = {"w": jnp.ones((512, 512))}
    with Checkpoints(small_disk / "c") as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        free = shutil.disk_usage(small_disk).free
        (small_disk / "filler").write_bytes(b"x" * (free - 500_000))
        with pytest.raises(DiskFullError, match="no room"):
            checkpoints.save(2, state, {})
        found = checkpoints.restore(abstract(state))
        assert found is not None and found.step == 1


def test_failure_in_the_background_surfaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(5, "the cable was pulled")

    def failing(checkpoints: Checkpoints) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(disk_folder, "write_digests", fail)
            checkpoints.save(2, make_state(2), {})
            thread = checkpoints._writer._async_manager._thread
            assert thread is not None
            thread.join()

    save_steps(tmp_path, [1])
    with Checkpoints(tmp_path) as checkpoints:
        for surface in (
            checkpoints.check,
            checkpoints.wait,
            lambda: checkpoints.save(3, make_state(3), {}),
        ):
            failing(checkpoints)
            with pytest.raises(SaveError, match="saving step 2 .* cable was pulled"):
                surface()
            checkpoints.check()
    with pytest.raises(SaveError, match="cable"):
        with Checkpoints(tmp_path) as checkpoints:
            failing(checkpoints)
    with pytest.raises(KeyError) as caught:
        with Checkpoints(tmp_path) as checkpoints:
            failing(checkpoints)
            raise KeyError("mine")
    assert "cable was pulled" in caught.value.__notes__[0]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]


def reshard(folder: Path) -> None:
    """Saves on one mesh of eight devices, and restores on others."""
    assert jax.device_count() == 8
    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    key = jax.random.key_data(jax.random.key(3))

    def place(*shape: int) -> tuple[Sharding, Sharding]:
        mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "tensor"))
        return NamedSharding(mesh, P("data", "tensor")), NamedSharding(mesh, P())

    spec, whole = place(2, 4)
    state = {
        "w": jax.device_put(values, spec),
        "key": jax.device_put(jax.random.key(3), whole),
    }
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {})
    one = SingleDeviceSharding(jax.devices()[0])
    for spec, whole in (place(2, 4), place(8, 1), place(1, 8), (one, one)):
        target = {
            "w": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=spec),
            "key": jax.ShapeDtypeStruct((), state["key"].dtype, sharding=whole),
        }
        with Checkpoints(folder) as checkpoints:
            found = checkpoints.restore(target)
        assert found is not None
        assert found.state["w"].sharding == spec, (found.state["w"].sharding, spec)
        assert found.state["key"].sharding == whole
        assert np.asarray(found.state["w"]).tobytes() == values.tobytes()
        assert (jax.random.key_data(found.state["key"]) == key).all()
    print("all meshes agree")


@pytest.mark.slow
def test_restores_onto_other_meshes(
    tmp_path: Path, with_devices: Callable[[int], dict[str, str]]
) -> None:
    process = Process(reshard, tmp_path / "c", environment=with_devices(8))
    assert "all meshes agree" in process.require_end()
    # And in this process, which has one device.
    target = {
        "w": jax.ShapeDtypeStruct((16, 8), jnp.float32),
        "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype),
    }
    with Checkpoints(tmp_path / "c") as checkpoints:
        found = checkpoints.restore(target)
    values = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    assert found is not None
    np.testing.assert_array_equal(found.state["w"], values)
