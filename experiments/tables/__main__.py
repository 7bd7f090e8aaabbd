"""Renders the tables of READMEs and of docs/ from the result files, or checks them.

    python -m experiments.tables            # writes the tables anew
    python -m experiments.tables --check    # exit code 1 where one is stale

`blocks.py` tells how a table is marked, and what may not stand outside of one.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import tyro

from experiments.tables import (
    blocks,
    compare,
    cycles,
    gpu,
    hmt,
    mplus,
    papers,
    programs,
    recurrent,
    speed,
)
from experiments.tables.table import Tables

ROOT = Path(__file__).parents[2]
MODULES = (
    compare,
    cycles,
    gpu,
    hmt,
    mplus,
    papers,
    programs,
    recurrent,
    speed,
)
TABLES: Tables = {k: f for module in MODULES for k, f in module.TABLES.items()}


def readmes(root: Path) -> list[Path]:
    """The READMEs and the pages of the documentation, which the rule holds for."""
    found = [root / "README.md"]
    for folder in ("experiments", "kernels", "memjax"):
        found += sorted((root / folder).rglob("README.md"))
    return found + sorted((root / "docs").rglob("*.md"))


def write(files: Iterable[Path]) -> None:
    """Renders the tables of these files."""
    for file in files:
        text = file.read_text("utf-8")
        fresh = blocks.replace(text, TABLES, file.parent)
        if fresh != text:
            file.write_text(fresh, "utf-8")
            print(f"wrote {file}")


def check(files: Iterable[Path], root: Path) -> list[str]:
    """What is wrong with these files."""
    found = []
    for file in files:
        whole = (root / "experiments") in file.parents
        found += blocks.problems(file.read_text("utf-8"), TABLES, file, whole)
    return found


def main(check_only: bool) -> int:
    """Writes, or checks and prints what is wrong; returns the exit code."""
    files = readmes(ROOT)
    if not check_only:
        write(files)
    found = check(files, ROOT)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


def _command(check: bool = False) -> int:
    """Renders or checks the tables of READMEs and of the documentation.

    Args:
        check: only say what is wrong.
    """
    return main(check)


if __name__ == "__main__":
    sys.exit(tyro.cli(_command))
