"""The shape of the house: who may import whom, and what no file may hold."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = [
    path
    for folder in ("memjax", "kernels", "experiments", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# What each room may import of the others. The command line stands above them all.
ALLOWED = {
    "memjax_kernels": set(),
    "memjax.mechanisms": {"memjax_kernels"},
    "memjax.nnx": {"memjax.mechanisms"},
    "memjax.models": {"memjax_kernels", "memjax.mechanisms", "memjax.nnx"},
    "memjax.data": set(),
    "memjax.evaluation": {
        "memjax.mechanisms",
        "memjax.nnx",
        "memjax.models",
        "memjax.data",
    },
    "memjax.training": {
        "memjax_kernels",
        "memjax.mechanisms",
        "memjax.nnx",
        "memjax.models",
        "memjax.data",
        "memjax.evaluation",
    },
}


def module_of(path):
    """The dotted name of a file, by where it is imported from."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path, name):
    """Dotted names that a file imports, `from a import b` as a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name):
    """The room of a module, or "" for what stands above or outside them."""
    inside = lambda room: name == room or name.startswith(f"{room}.")
    return next((room for room in ALLOWED if inside(room)), "")


LIBRARY = {module_of(p): p for p in PYTHON if p.parts[len(ROOT.parts)] != "tests"}
ROOMS = {name: path for name, path in LIBRARY.items() if room_of(name)}


def test_the_rooms_are_found():
    assert {room_of(name) for name in ROOMS} == set(ALLOWED)


@pytest.mark.parametrize("name", ROOMS)
def test_imports_go_one_way(name):
    room = room_of(name)
    for imported in imports_of(ROOMS[name], name):
        other = room_of(imported)
        assert other in {"", room} | ALLOWED[room], f"{name} imports {imported}"
        if room == "memjax_kernels":
            assert imported.split(".")[0] != "memjax", f"{name} imports {imported}"
        # Nothing in a room reaches up to what stands above the rooms.
        above = ("memjax.cli",)
        assert not imported.startswith(above), f"{name} imports {imported}"


def test_configurations_as_json_stand_below_the_rooms():
    path = ROOT / "memjax" / "config_io.py"
    for imported in imports_of(path, "memjax.config_io"):
        if imported.split(".")[0] in ("memjax", "memjax_kernels"):
            assert imported.startswith("memjax.checks"), imported


def test_checks_stand_below_everything():
    path = ROOT / "memjax" / "checks.py"
    assert {i.split(".")[0] for i in imports_of(path, "memjax.checks")} == {
        "collections",
        "difflib",
    }


def test_the_library_does_not_import_experiments_or_tests():
    programs = {path.stem for path in (ROOT / "experiments").glob("*.py")}
    for name, path in LIBRARY.items():
        if name.startswith("memjax"):
            roots = {imported.split(".")[0] for imported in imports_of(path, name)}
            assert not roots & (programs | {"experiments", "tests"}), name


def test_kernels_import_alone():
    """Also at run time: an op brings in no memjax."""
    names = sorted(name for name in ROOMS if room_of(name) == "memjax_kernels")
    program = (
        f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'memjax'))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_importing_is_quiet():
    """Also with libtpu installed on a machine without a TPU."""
    elsewhere = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            "import memjax, memjax.training.pretrain, memjax_kernels",
        ],
        capture_output=True,
        text=True,
        check=True,
        env=elsewhere,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_every_exported_mechanism_has_a_row_in_the_contract_test():
    exports = ast.parse((ROOT / "memjax/mechanisms/__init__.py").read_text())
    mechanisms = importlib.import_module("memjax.mechanisms")
    builders = {
        alias.name
        for node in exports.body
        if isinstance(node, ast.ImportFrom) and node.module != "memjax.mechanisms.base"
        for alias in node.names
    }
    assert len(builders) >= 4 and all(hasattr(mechanisms, name) for name in builders)
    contract = ast.parse((ROOT / "tests/mechanisms/test_contract.py").read_text())
    rows = next(
        node.value
        for node in contract.body
        if isinstance(node, ast.Assign)
        and any(getattr(target, "id", "") == "MECHANISMS" for target in node.targets)
    )
    names = {node.value for node in ast.walk(rows) if isinstance(node, ast.Constant)}
    assert builders <= names, f"no row for {builders - names}"


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_file_is_too_long_or_runs_what_it_reads(path):
    source = path.read_text()
    limit = 500 if "tests" in path.parts[len(ROOT.parts) :] else 400
    assert len(source.splitlines()) < limit
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None), *(a.name for a in node.names)]
            loaders = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
            assert not loaders & {(name or "").split(".")[0] for name in names}
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            # A test may run the examples of the README.
            assert called not in ("eval", "exec") or "tests" in path.parts
            if isinstance(node.func, ast.Attribute):
                yaml = ast.unparse(node.func) in ("yaml.load", "yaml.full_load")
                assert not yaml, "yaml.safe_load only"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle":
                    assert ast.unparse(keyword.value) == "False"
