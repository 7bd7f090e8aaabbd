"""What a result says of the code that it is from."""

import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from memjax.evaluation import provenance


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose code is where the module believes itself to be."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    module = tmp_path / "memjax" / "evaluation" / "provenance.py"
    results = tmp_path / provenance.RESULTS / "one.json"
    for file in (module, results):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    monkeypatch.setattr(provenance, "__file__", str(module))
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "one")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def version() -> provenance.Version:
    provenance.version.cache_clear()
    try:
        return provenance.version()
    finally:
        provenance.version.cache_clear()


def test_a_tree_as_committed_is_clean(repository):
    found = version()
    assert found.clean is True and found.commit and len(found.commit) >= 7


@pytest.mark.parametrize(
    "file, clean",
    [
        ("memjax/evaluation/provenance.py", False),
        ("memjax/new.py", False),
        ("notes.txt", True),
        ("experiments/results/one.json", True),
        ("experiments/results/two.json", True),
    ],
)
def test_changed_code_is_not_clean(repository, file, clean):
    Path(repository, file).write_text("2")
    assert version().clean is clean


def test_without_a_repository_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    assert version() == (None, None)


def test_a_result_holds_its_version(repository):
    provenance.version.cache_clear()
    found = provenance.provenance("why?", {"a": 1})
    provenance.version.cache_clear()
    assert found["clean"] is True and found["commit"] == version().commit


@pytest.mark.parametrize("name", ["experiments.study", "experiments.study.__main__"])
def test_a_package_that_is_run_is_named_as_it_was_called(monkeypatch, name):
    program = types.SimpleNamespace(__spec__=types.SimpleNamespace(name=name))
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.setattr(sys, "argv", ["x", "--seeds", "2"])
    command = provenance.provenance("q", {})["command"]
    assert command == "python -m experiments.study --seeds 2"
