"""Names of the public packages: none hides a module, and docs/api shows true paths."""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import memjax

PAGES = Path(__file__).parent.parent / "docs" / "api"
PACKAGES = (
    "memjax",
    "memjax.conversation",
    "memjax.data",
    "memjax.evaluation",
    "memjax.mechanisms",
    "memjax.models",
    "memjax.nnx",
    "memjax.training",
    "memjax_kernels",
)


def pages() -> dict[str, list[str]]:
    """The names that each page shows, by the package that its title names."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        lines = page.read_text().splitlines()
        names = [line.removeprefix("::: ") for line in lines if line.startswith(":::")]
        found[lines[0].removeprefix("# ").strip()] = names
    return found


def resolved(path: str) -> object:
    """The object of a dotted path: a module, or an attribute of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return getattr(resolved(owner), name)


# Imports everything, which takes seconds where annotations are checked.
@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_no_attribute_hides_a_submodule(package):
    module = importlib.import_module(package)
    submodules = {info.name for info in pkgutil.iter_modules(module.__path__)}
    hidden = {
        f"{package}.{name}"
        for name in submodules & set(dir(module))
        if not isinstance(getattr(module, name), ModuleType)
    }
    assert not hidden, f"attributes named as modules: {sorted(hidden)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_the_api_page_are_attributes_of_the_package(package):
    module = importlib.import_module(package)
    listed, shown = dir(module), pages()[package]
    missing = {
        f"{package}.{name}"
        for path in shown
        for name in [path.rpartition(".")[2]]
        if name not in listed or getattr(module, name) is not resolved(path)
    }
    assert shown and not missing, f"missing: {sorted(missing)}"


def test_every_package_has_a_page_and_is_an_attribute_of_memjax():
    assert set(pages()) == set(PACKAGES)
    for package in PACKAGES:
        name = package.removeprefix("memjax.")
        if name != package:
            assert memjax.__getattr__(name) is importlib.import_module(package)
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        memjax.__getattr__("lod")
