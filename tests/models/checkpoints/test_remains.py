"""What a killed import leaves is cleared by the next one to the same folder."""

from pathlib import Path

from memjax.models.checkpoints.hf.safetensors_write import atomic_folder


def test_temporary_folders_of_killed_writers_are_removed(
    tmp_path: Path,
) -> None:
    for name in (".out.1", ".out.99", ".out.old", ".outer.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".out.7").write_text("a file")
    with atomic_folder(tmp_path / "out") as writing:
        (writing / "file").write_text("whole")
        with atomic_folder(tmp_path / "another"):
            pass
        writing.rename(writing.with_name(".out.5"))
        with atomic_folder(tmp_path / "out") as second:
            (second / "file").write_text("first")
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"out", "another", ".out.5", ".out.old", ".outer.1", ".out.7"}
        (tmp_path / "out" / "file").unlink()
        writing.with_name(".out.5").rename(writing)
    assert (tmp_path / "out" / "file").read_text() == "whole"
