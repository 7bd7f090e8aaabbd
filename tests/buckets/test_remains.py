"""What a killed import leaves is cleared by the next one to the same folder."""

from pathlib import Path

from memjax.buckets.writing import UNFINISHED, atomic_folder


def test_temporary_folders_of_killed_writers_are_removed(tmp_path: Path) -> None:
    def name(number):
        return f".out.{number:016x}{UNFINISHED}"

    others = {".out.2024", ".out.old", f".outer.{1:016x}{UNFINISHED}"}
    others.add(f".out.notes{UNFINISHED}")
    for folder in (name(1), name(99), *others):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"half")
    (tmp_path / name(7)).write_text("a file")
    with atomic_folder(tmp_path / "out") as writing:
        (writing / "file").write_text("whole")
        with atomic_folder(tmp_path / "another"):
            pass
        writing.rename(writing.with_name(name(5)))
        with atomic_folder(tmp_path / "out") as second:
            (second / "file").write_text("first")
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"out", "another", name(5), name(7), *others}
        (tmp_path / "out" / "file").unlink()
        writing.with_name(name(5)).rename(writing)
    assert (tmp_path / "out" / "file").read_text() == "whole"
