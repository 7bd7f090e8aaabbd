"""Renders all tables and plots from the result files, or checks them.

    python -m experiments.lab.render
    python -m experiments.lab.render --check  # exit code 1 if one is stale

Studies declare tables and plots (`experiments.lab.results`). A table is written into a
document between two marks:

    <!-- table: hmt/length -->
    ... (rendered)
    <!-- /table -->

The check refuses measured numbers outside of marks and code: a number with a decimal
point, a percentage, a number with ± or with a unit of time, memory or speed, anywhere
in a README below `experiments/`, and elsewhere in sections with "results" in the
heading. Names (Apache-2.0, Python 3.11) and versions are allowed.
"""

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import experiments
from experiments.lab.options import run
from experiments.lab.results import RESULTS, Figure, Table, load
from memjax.evaluation.provenance import commit_of

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"<!-- table: (?P<name>[\w/]+) -->\n(?P<body>.*?)<!-- /table -->", re.DOTALL
)
_CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)|https?://\S+", re.DOTALL)
_NAME = re.compile(r"Python \d+\.\d+|\d+\.\d+\.\d[\d.]*|[A-Za-z]-\d+\.\d+")
_MEASURED = re.compile(
    r"±|\d+\.\d+|\d ?%|\d ?(?:ns|µs|ms|s|kB|MB|GB|KiB|MiB|GiB|nats|GFLOP)\b|\dx\b"
)

Tables = Mapping[str, Table]
Figures = Mapping[str, Figure]


def declared() -> tuple[dict[str, Table], dict[str, Figure]]:
    """Tables and plots that the modules below `experiments` declare, by name."""
    walked = pkgutil.walk_packages(experiments.__path__, "experiments.")
    names = (x.name for x in walked if not x.name.endswith("__main__"))
    modules = map(importlib.import_module, names)
    found = [value for module in modules for value in vars(module).values()]
    tables = {x.name: x for x in found if isinstance(x, Table)}
    figures = {x.name: x for x in found if isinstance(x, Figure)}
    return tables, figures


def documents(root: Path) -> list[Path]:
    """READMEs, and pages of the documentation."""
    found = [root / "README.md"]
    for folder in ("experiments", "kernels", "memjax"):
        found += sorted((root / folder).rglob("README.md"))
    return found + sorted((root / "docs").rglob("*.md"))


def write(files: Iterable[Path], tables: Tables) -> None:
    """Renders the tables of these files anew."""
    for file in files:
        text = file.read_text("utf-8")
        fresh = replace(text, tables, file.parent)
        if fresh != text:
            file.write_text(fresh, "utf-8")
            print(f"wrote {file}")


def replace(text: str, tables: Tables, folder: Path) -> str:
    """A document's text with every block rendered anew; links are from `folder`."""

    def block(match: re.Match[str]) -> str:
        body = _markdown(tables[match["name"]], folder)
        return f"<!-- table: {match['name']} -->\n{body}<!-- /table -->"

    return _BLOCK.sub(block, text)


def problems(files: Iterable[Path], tables: Tables, root: Path) -> Iterator[str]:
    """Stale, unknown and unused tables, and measured numbers outside of tables."""
    shown: dict[str, Path] = {}
    for file in files:
        text = file.read_text("utf-8")
        for match in _BLOCK.finditer(text):
            name = match["name"]
            if name in shown:
                yield f"{file}: table {name} is in {shown[name]} too: link to it"
            shown[name] = file
            if name not in tables:
                yield f"{file}: table {name}: there is no such table"
                continue
            try:
                fresh = _markdown(tables[name], file.parent)
            except FileNotFoundError as error:
                yield f"{file}: table {name}: {error.filename} is missing"
                continue
            if fresh != match["body"]:
                program = "python -m experiments.lab.render"
                yield f"{file}: table {name} is stale: run {program}"
        if text.count("<!-- table:") != len(_BLOCK.findall(text)):
            yield f"{file}: a block has no end"
        whole = (root / "experiments") in file.parents
        for line, found in measured_outside(text, whole):
            yield f"{file}:{line}: {found!r} is measured, but stands in no table"
    for name in tables.keys() - shown.keys():
        # A study that has not been run yet has no result to show.
        if all(
            (RESULTS / f"{source}.json").is_file() for source in tables[name].sources
        ):
            yield f"table {name} is in no document"


def measured_outside(text: str, whole: bool) -> Iterator[tuple[int, str]]:
    """Line and text of every measured number outside of blocks and code.

    Unless `whole`, only sections of results are searched.
    """

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    for pattern in (_BLOCK, _CODE, _NAME):
        text = pattern.sub(blank, text)
    searched = whole
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#"):
            searched = whole or "results" in line.lower()
        if searched:
            for match in _MEASURED.finditer(line):
                yield number, line[max(0, match.start() - 8) : match.end()].strip()


def _markdown(table: Table, folder: Path) -> str:
    """The table with links to its result files, their devices, dates and commits."""
    content = table.content()
    columns = zip(*content.rows, strict=True)
    lines = ["| " + " | ".join(row) + " |" for row in (content.header, *content.rows)]
    # Columns of numbers alone are aligned to the right.
    numeric = (all(re.match(r"[-+\d]|$", cell) for cell in c) for c in columns)
    lines.insert(1, "".join("|--:" if x else "|---" for x in numeric) + "|")
    sources = []
    for name in table.sources:
        report = load(name)
        facts = filter(None, (report["device"], report["date"], commit_of(report)))
        link = os.path.relpath(RESULTS / f"{name}.json", folder)
        sources.append(f"[{name}.json]({link}): " + ", ".join(facts))
    below = "; ".join([*sources, *content.notes])
    return "\n".join(lines) + f"\n\n<sub>{below}</sub>\n"


def draw(figures: Figures, folder: Path = RESULTS) -> None:
    """Draws plots from their result files into a folder."""
    for name, figure in figures.items():
        figure.draw(load(figure.source), folder / f"{name}.png")
        print(f"drew {folder / name}.png")


def undeclared(figures: Figures) -> Iterator[str]:
    """Pictures that no study draws, and declared ones that are missing."""
    files = RESULTS.rglob("*.png")
    drawn = {str(file.relative_to(RESULTS).with_suffix("")) for file in files}
    for name in drawn - figures.keys():
        yield f"results/{name}.png is drawn by no study"
    for name in figures.keys() - drawn:
        yield f"results/{name}.png is missing: run python -m experiments.lab.render"


def main(check: bool = False) -> int:
    """Renders or checks tables and plots of all studies; `check` writes nothing."""
    tables, figures = declared()
    files = documents(ROOT)
    if not check:
        draw(figures)
        write(files, tables)
    wrong = [*problems(files, tables, ROOT), *undeclared(figures)]
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main)
