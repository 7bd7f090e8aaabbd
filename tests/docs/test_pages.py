"""The documentation's programs run as printed, and its links and names exist."""

import ast
import functools
import json
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import memjax_kernels
from memjax.cli.finetune import presets as finetune_presets
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.training.config import presets as training_presets
from tests import tiny

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {str(file.relative_to(DOCS)): file for file in sorted(DOCS.rglob("*.md"))}
ROOMS = ("mechanisms", "models", "conversation", "nnx", "data", "training")
ROOMS += ("evaluation",)
# What every page of a system tells.
SECTIONS = ["The idea", "The equations", "Use it", "Options", "Measured results"]
SECTIONS += ["What this does not show"]


def programs(page):
    """A page's blocks of Python as one program, with the page's own line numbers."""
    lines = [""] * (page.read_text().count("\n") + 1)
    for match in re.finditer(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        first = page.read_text()[: match.start(1)].count("\n")
        block = match[1].rstrip("\n").split("\n")
        lines[first : first + len(block)] = block
    return "\n".join(lines)


@functools.cache
def run_once(name):
    """What a page's program defines."""
    scope = {}
    exec(compile(programs(PAGES[name]), str(PAGES[name]), "exec"), scope)
    return scope


WITH_PROGRAMS = [name for name, page in PAGES.items() if programs(page).strip()]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_PROGRAMS)
def test_programs_run(name, tmp_path, monkeypatch):
    # A model of another size in the place of the one that is named: that of the pages
    # about HMT and M+, whose programs are compiled.
    if name == "pretrained.md":
        model = run_once("systems/hmt.md")["backbone"]
        text = TextInterface(tiny.tokenizer())
        model.save(tmp_path / "HuggingFaceTB" / "SmolLM2-135M", text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scope = run_once(name)
    for found in ("y", "state", "logits", "loss", "params", "model"):
        arrays = jax.tree.leaves(scope.get(found))
        floats = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
        assert all(np.isfinite(x).all() for x in floats), found


def test_every_page_stands_in_the_navigation_and_every_entry_exists():
    # mkdocs.yml names functions of Python in tags of its own.
    plain = re.sub(r"!ENV \[.*\]", "null", (ROOT / "mkdocs.yml").read_text())
    listed = set()

    def walk(entry):
        for part in entry if isinstance(entry, list) else entry.values():
            walk(part) if isinstance(part, list | dict) else listed.add(part)

    walk(yaml.safe_load(plain)["nav"])
    notebooks = {str(p.relative_to(DOCS)) for p in DOCS.glob("notebooks/*.ipynb")}
    assert listed == {*PAGES} | notebooks


def test_links_to_files_exist():
    hook = runpy.run_path(str(DOCS / "hooks" / "repository_links.py"))
    count = 0
    for name, page in PAGES.items():
        text = page.read_text()
        for link in hook["repository_links"](text, name):
            assert (ROOT / link.path).exists(), f"{name}: {link.path}"
            count += 1
        for target in re.findall(r"\]\(([\w./-]+)\)", text):
            assert (page.parent / target).exists(), f"{name}: {target}"
    assert count > 20


def test_files_and_presets_that_are_named_exist():
    presets = {*training_presets()}
    finetunings = {*finetune_presets()}
    for name, page in PAGES.items():
        text = page.read_text()
        for path in re.findall(
            r"`((?:memjax|kernels|experiments|tests)/[\w/.]+)`", text
        ):
            assert (ROOT / path).exists(), f"{name}: {path}"
        assert set(re.findall(r"memjax train ([\w-]+)", text)) <= presets, name
        assert set(re.findall(r"memjax finetune ([\w-]+)", text)) <= finetunings, name


def public_names(package):
    """What a package's `__init__` imports, with the module that it comes from."""
    tree = ast.parse((package / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_api_reference_has_every_public_name():
    folders = {f"{room}.md": ROOT / "memjax" / room for room in ROOMS}
    for page, folder in folders.items():
        shown = re.findall(r"^::: ([\w.]+)$", (DOCS / "api" / page).read_text(), re.M)
        missing = {*public_names(folder)} - {*shown}
        assert not missing, f"api/{page}: {missing}"
        assert len(shown) == len({*shown})


def test_the_api_reference_has_every_name_of_the_kernels():
    page = (DOCS / "api" / "kernels.md").read_text()
    shown = re.findall(r"^::: memjax_kernels\.(\w+)$", page, re.M)
    assert sorted(shown) == sorted(memjax_kernels.__all__)


def test_systems_have_the_same_sections():
    pages = [name for name in PAGES if name.startswith("systems/")]
    assert len(pages) == 5
    for name in pages:
        found = re.findall(r"^## (.*)$", PAGES[name].read_text(), re.M)
        assert [x for x in found if x in SECTIONS] == SECTIONS, name
        assert "](../pictures/" in PAGES[name].read_text(), name


@pytest.mark.slow
def test_pictures_are_what_the_program_draws(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "pictures"))
    runpy.run_path(str(DOCS / "pictures" / "draw.py"))["main"](tmp_path)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    committed = {x.name: x.read_text() for x in (DOCS / "pictures").glob("*.svg")}
    assert drawn == committed


def test_notebooks_are_committed_without_outputs():
    for notebook in DOCS.glob("notebooks/*.ipynb"):
        for cell in json.loads(notebook.read_text())["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None, (
                f"{notebook.name}: clear the outputs before committing"
            )
