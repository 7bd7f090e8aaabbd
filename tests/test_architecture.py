"""The shape of the library: who may import whom, and what no file may hold."""

import ast
import importlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each room and the rooms that it may import, lowest first.
ROOMS = {
    "memjax_kernels": (),
    "memjax.buckets": (),
    "memjax.mechanisms": ("memjax_kernels",),
    "memjax.nnx": ("memjax.mechanisms",),
    "memjax.data": ("memjax.buckets",),
    # A pretrained model comes with its tokenizer.
    "memjax.models": (
        "memjax.buckets",
        "memjax_kernels",
        "memjax.mechanisms",
        "memjax.nnx",
        "memjax.data",
    ),
    "memjax.evaluation": (
        "memjax.buckets",
        "memjax.mechanisms",
        "memjax.nnx",
        "memjax.models",
        "memjax.data",
    ),
    "memjax.training": (
        "memjax.buckets",
        "memjax_kernels",
        "memjax.mechanisms",
        "memjax.nnx",
        "memjax.models",
        "memjax.data",
        "memjax.evaluation",
    ),
    # Compiles what trains, scores and generates.
    "memjax.aot": (
        "memjax_kernels",
        "memjax.mechanisms",
        "memjax.models",
        "memjax.data",
        "memjax.evaluation",
        "memjax.training",
    ),
    # Opens any model, and claims its folder as a run does.
    "memjax.conversation": (
        "memjax.buckets",
        "memjax.models",
        "memjax.data",
        "memjax.training",
    ),
    "memjax.cli": (
        "memjax.buckets",
        "memjax.mechanisms",
        "memjax.nnx",
        "memjax.models",
        "memjax.data",
        "memjax.evaluation",
        "memjax.training",
        "memjax.conversation",
        "memjax.aot",
    ),
    "experiments": (
        "memjax.buckets",
        "memjax_kernels",
        "memjax.mechanisms",
        "memjax.nnx",
        "memjax.models",
        "memjax.data",
        "memjax.evaluation",
        "memjax.training",
        "memjax.conversation",
        "memjax.aot",
        "memjax.cli",
    ),
}
# Files at the root of memjax, below all rooms; `memjax` itself re-exports rooms.
SHARED = ("memjax.checks", "memjax.config_io", "memjax.leaving", "memjax.status")
# Says its version, and imports its packages when they are used.
ROOT_MODULE = "memjax"
UNSAFE = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def module_of(path: Path) -> str:
    """The dotted name of a file, by where it is imported from."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(*folders: str) -> list[Path]:
    return [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]


SOURCES = {
    module_of(path): path for path in python_files("memjax", "kernels", "experiments")
}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def imported_modules(node: ast.AST, importer: str) -> list[str]:
    """Modules of this repository that an import statement loads."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{importer} imports relatively"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    found = []
    for name in names:
        # `from a import b` loads a.b where that is a module, else a.
        name = name if name in SOURCES else name.rpartition(".")[0]
        found += [name] if name in SOURCES else []
    return found


def imports(name: str) -> list[str]:
    return [m for node in ast.walk(TREES[name]) for m in imported_modules(node, name)]


def room_of(name: str) -> str | None:
    def inside(room):
        return name == room or name.startswith(f"{room}.")

    return next((room for room in ROOMS if inside(room)), None)


def test_imports_go_one_way():
    rooms = {room_of(name) for name in SOURCES} - {None}
    assert rooms == set(ROOMS)
    for name in SOURCES:
        room = room_of(name)
        if name in SHARED:
            assert set(imports(name)) <= set(SHARED), f"{name} imports {imports(name)}"
        if room is None:
            continue
        for imported in imports(name):
            if imported in (*SHARED, ROOT_MODULE) and room != "memjax_kernels":
                continue
            assert room_of(imported) in (room, *ROOMS[room]), (
                f"{name} imports {imported}"
            )


def test_no_imports_in_circles():
    """A package's `__init__` re-exports: it is no link of a chain."""
    edges = {
        name: {m for m in imports(name) if SOURCES[m].name != "__init__.py"}
        for name in SOURCES
        if SOURCES[name].name != "__init__.py"
    }
    done: set[str] = set()

    def visit(name: str, chain: tuple[str, ...]) -> None:
        assert name not in chain, " -> ".join((*chain[chain.index(name) :], name))
        if name not in done:
            for imported in sorted(edges[name]):
                visit(imported, (*chain, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_imports_stand_at_the_top():
    """None is hidden in a function or a condition, but those of optional packages."""
    for name, tree in TREES.items():
        if name == ROOT_MODULE:
            # Imports its packages on first use; a type checker sees them at once.
            continue
        top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if id(node) not in top:
                assert not imported_modules(node, name), (
                    f"{name}:{getattr(node, 'lineno', 0)} hides an import"
                )


def test_rooms_are_of_a_size_to_walk_through():
    root = [p for p in (ROOT / "memjax").glob("[!_]*") if p.is_file()]
    assert len(root) <= 5, f"files at the root of memjax: {root}"
    models = [p for p in (ROOT / "memjax/models").iterdir() if p.name[0] != "_"]
    assert len(models) <= 14, f"files and folders of memjax/models: {models}"
    named = [path for path in SOURCES.values() if path.name != "__init__.py"]
    for folder, count in Counter(path.parent for path in named).items():
        assert count <= 15, f"{folder} has {count} files"


def is_dispatched_on(owner: str, node: ast.ClassDef) -> bool:
    """Whether a class is a model, a run, a stage or a mechanism's configuration."""
    if not owner.startswith("memjax."):
        return False
    methods = {getattr(member, "name", "") for member in node.body}
    ends = ("Run", "RunConfig", "Stage", "Stages", "Params")
    return bool(methods & {"features", "build", "cell"}) or node.name.endswith(ends)


def test_no_isinstance_on_models_runs_stages_and_mechanisms():
    """A new kind brings its members; nobody asks elsewhere which kind one is."""
    owners = {
        node.name: name
        for name, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and is_dispatched_on(name, node)
    }
    assert {"HMT", "TrellisConfig", "CellConfig", "FinetuneRun"} <= set(owners)
    for name in SOURCES:
        if room_of(name) == "experiments":
            continue
        for node in ast.walk(TREES[name]):
            asked: list[ast.expr] = []
            if isinstance(node, ast.Call) and len(node.args) == 2:
                called = getattr(node.func, "id", "")
                asked = node.args[1:] if called in ("isinstance", "issubclass") else []
            elif isinstance(node, ast.MatchClass):
                asked = [node.cls]
            for tree in asked:
                for part in ast.walk(tree):
                    kind = str(getattr(part, "attr", getattr(part, "id", None)))
                    assert owners.get(kind, name) == name, (
                        f"{name}:{tree.lineno} asks whether something is a {kind}"
                    )


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment or None,
    )


@pytest.mark.slow
def test_kernels_import_alone():
    """Also at run time: an op brings in no memjax."""
    names = sorted(name for name in SOURCES if room_of(name) == "memjax_kernels")
    done = run_python(
        f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] == 'memjax'))"
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_importing_is_quiet():
    """Also with libtpu installed on a machine without a TPU."""
    elsewhere = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = run_python("import memjax, memjax.cli.main, memjax_kernels", **elsewhere)
    assert (done.stdout, done.stderr) == ("", "")


def test_every_exported_mechanism_has_a_row_in_the_contract_test():
    mechanisms = importlib.import_module("memjax.mechanisms")
    configs = {name for name in dir(mechanisms) if name.endswith("Config")}
    # What configurations of mechanisms derive from.
    configs -= {"MechanismConfig", "CellConfig", "HeadsConfig", "RecurrentConfig"}
    assert len(configs) >= 4
    contract = ast.parse((ROOT / "tests/mechanisms/test_contract.py").read_text())
    rows = next(
        node.value
        for node in contract.body
        if isinstance(node, ast.AnnAssign)
        and getattr(node.target, "id", "") == "CONFIGS"
    )
    assert rows is not None
    names = {node.id for node in ast.walk(rows) if isinstance(node, ast.Name)}
    assert configs <= names, f"no row for {configs - names}"


def test_no_file_is_too_long_or_runs_what_it_reads():
    for path in python_files("memjax", "kernels", "experiments", "tests"):
        source, where = path.read_text(), str(path.relative_to(ROOT))
        is_test = where.startswith("tests/")
        assert len(source.splitlines()) < (500 if is_test else 400), where
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None), *(a.name for a in node.names)]
                loaded = {(name or "").split(".")[0] for name in names}
                assert not UNSAFE & loaded, f"{where} imports {UNSAFE & loaded}"
            elif isinstance(node, ast.Call):
                # A test may run the examples of the README.
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                assert is_test or called not in ("eval", "exec"), f"{where}: {called}"
                yaml = ast.unparse(node.func) in ("yaml.load", "yaml.full_load")
                assert not yaml, f"{where}: yaml.safe_load only"
                for keyword in node.keywords:
                    if keyword.arg == "allow_pickle":
                        assert ast.unparse(keyword.value) == "False", where
