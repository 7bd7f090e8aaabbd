"""Marked blocks of READMEs and pages: rendering, and the check of what is outside.

A block is

    <!-- table: hmt/length -->
    ... (rendered)
    <!-- /table -->

Everything that is measured stands in a block. The rule of the check: outside of blocks
and of code, a number with a decimal point, a percentage, a number with ± or with a unit
of time, memory or speed counts as measured. Names such as Apache-2.0 or Python 3.11 and
versions with two points do not. The rule holds for the whole of a README below
`experiments/`, and elsewhere for the sections whose heading has the word "results".
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.lab.results import RESULTS
from experiments.tables.table import NotMeasured, Table, Tables, load
from memjax.evaluation.provenance import commit_of

_BLOCK = re.compile(
    r"<!-- table: (?P<name>[\w/]+) -->\n(?P<body>.*?)<!-- /table -->", re.DOTALL
)
_CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)|https?://\S+", re.DOTALL)
_NAME = re.compile(r"Python \d+\.\d+|\d+\.\d+\.\d[\d.]*|[A-Za-z]-\d+\.\d+")
_MEASURED = re.compile(
    r"±|\d+\.\d+|\d ?%|\d ?(?:ns|µs|ms|s|kB|MB|GB|KiB|MiB|GiB|nats|GFLOP)\b|\dx\b"
)


def render(name: str, tables: Tables, folder: Path) -> str:
    """The Markdown of a table, with links to the files that it comes from.

    Args:
        name: of the table.
        tables: all that there are.
        folder: of the README; links are relative to it.

    Raises:
        KeyError: there is no table of this name.
        FileNotFoundError: one of its result files is missing.
    """
    try:
        return _markdown(tables[name](), folder)
    except NotMeasured as missing:
        return f"Not measured yet: `{missing}`.\n"


def replace(text: str, tables: Tables, folder: Path) -> str:
    """A README's text with every block rendered anew; raises as `render`."""

    def block(match: re.Match[str]) -> str:
        body = render(match["name"], tables, folder)
        return f"<!-- table: {match['name']} -->\n{body}<!-- /table -->"

    return _BLOCK.sub(block, text)


def problems(text: str, tables: Tables, file: Path, whole: bool) -> Iterator[str]:
    """What is wrong with a README, a line each.

    Args:
        text: of the README.
        tables: all that there are.
        file: the README, for the messages and the links.
        whole: whether the rule holds for the whole text, or for its results alone.
    """
    for match in _BLOCK.finditer(text):
        name = match["name"]
        try:
            fresh = render(name, tables, file.parent)
        except KeyError:
            yield f"{file}: table {name}: there is no such table"
        except FileNotFoundError as error:
            yield f"{file}: table {name}: {error.filename} is missing"
        else:
            if fresh != match["body"]:
                yield f"{file}: table {name} is stale: run python -m experiments.tables"
    if text.count("<!-- table:") != len(_BLOCK.findall(text)):
        yield f"{file}: a block has no end"
    for line, found in measured_outside(text, whole):
        yield f"{file}:{line}: {found!r} is measured, but stands in no table"


def measured_outside(text: str, whole: bool) -> Iterator[tuple[int, str]]:
    """Line and text of every measured number outside of blocks and code."""
    blank = lambda match: re.sub(r"[^\n]", " ", match[0])
    for pattern in (_BLOCK, _CODE, _NAME):
        text = pattern.sub(blank, text)
    results = whole
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#"):
            results = whole or "results" in line.lower()
        if results:
            for match in _MEASURED.finditer(line):
                yield number, line[max(0, match.start() - 8) : match.end()].strip()


def _markdown(table: Table, folder: Path) -> str:
    rows = [table.header, *table.rows]
    assert all(len(row) == len(table.header) for row in rows), table.header
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    columns = zip(*table.rows, strict=True)
    lines.insert(1, "".join("|--:" if _numeric(c) else "|---" for c in columns) + "|")
    sources = [_source(name, folder) for name in table.sources]
    below = "; ".join([*sources, *table.notes])
    return "\n".join(lines) + f"\n\n<sub>{below}</sub>\n"


def _numeric(cells: Iterable[str]) -> bool:
    """Whether a column holds numbers alone, which are aligned to the right."""
    return all(re.match(r"[-+\d]|$", cell) for cell in cells)


def _source(name: str, folder: Path) -> str:
    """A link to a result file, with its device, date and commit."""
    report = load(name)
    link = os.path.relpath(RESULTS / f"{name}.json", folder)
    facts = [report["device"], report["date"], commit_of(report)]
    return f"[{name}.json]({link}): " + ", ".join(filter(None, facts))
