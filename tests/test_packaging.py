"""The package declares what it imports, and imports what it declares."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import memjax
from memjax.cli import help
from memjax.cli import main as cli

ROOT = Path(__file__).parent.parent
# Names of packages that are not those of their modules.
PACKAGES = {
    "jla": "jax-linear-attention",
    "orbax": "orbax-checkpoint",
    "tensorflow_datasets": "tensorflow-datasets",
}
BY_NAME = {"_import", "importlib.import_module"}


def normal(name):
    return re.sub("[-_.]+", "-", re.split(r"[><=;\[ ]", name)[0]).lower()


def imported():
    """Packages that files of memjax and its kernels import: at the top, and inside."""
    top, inside = set(), set()
    files = [*(ROOT / "memjax").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    for file in files:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
                # A name, or what an f-string begins with.
                texts = [
                    x for x in ast.walk(node.args[0]) if isinstance(x, ast.Constant)
                ]
                names = [str(text.value) for text in texts[:1]]
            else:
                continue
            modules = {name.split(".")[0] for name in names}
            modules -= {*sys.stdlib_module_names, "memjax", "memjax_kernels"}
            found = {normal(PACKAGES.get(name, name)) for name in modules}
            (top if node in tree.body else inside).update(found)
    return top, inside


def test_dependencies_are_what_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = set(map(normal, project["dependencies"]))
    extras = project["optional-dependencies"]
    optional = {
        normal(p)
        for e in ("buckets", "data", "hopper", "pretrained", "tracking")
        for p in extras[e]
    }
    top, inside = imported()
    assert top <= required <= top | inside
    assert inside - required == optional


def test_advice_to_install_works_from_a_clone():
    """No index has memjax: advice names the missing package."""
    files = [*(ROOT / "memjax").rglob("*.py"), *(ROOT / "memjax").rglob("*.md")]
    found = [file.name for file in files if "install 'memjax" in file.read_text()]
    assert not found


def test_help_and_version_need_no_jax():
    """Importing it takes seconds."""
    program = (
        "import sys\nfrom memjax.cli.entry import main\n"
        "main(['--version'])\nmain(['--help'])\n"
        "print(sorted({'jax', 'numpy', 'tyro', 'torch'} & {*sys.modules}))"
    )
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
    first, *_, last = done.stdout.splitlines()
    assert (first, last) == (f"memjax {memjax.__version__}", "[]")


def test_a_reader_that_goes_away_is_no_traceback():
    """As `memjax train --help | head -1` does."""
    command = [sys.executable, "-m", "memjax.cli.entry", "--help"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_help_says_what_the_commands_say():
    configured = {name: x.function for name, x in cli.CONFIGURED.items()}
    commands = configured | cli.COMMANDS
    assert {*commands} == {*help.COMMANDS}
    for name, command in commands.items():
        said = " ".join(str(command.__doc__).split("\n\n")[0].split())
        assert help.COMMANDS[name] == said


def test_an_editable_install_is_one_folder_that_type_checkers_read():
    """With packages in two, setuptools installs a hook, which they do not run."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    (folder,) = setuptools["setuptools"]["package-dir"].values()
    assert setuptools["setuptools"]["packages"]["find"]["where"] == [folder]
    for name, package in (("memjax", "memjax"), ("memjax_kernels", "kernels/")):
        link, place = ROOT / folder / name, ROOT / package
        assert (link / "__init__.py").is_file() and link.resolve().is_relative_to(place)
