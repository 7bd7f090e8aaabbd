"""Bad input of all commands: one line that names the option, before any work."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest

from experiments.lab import options

ROOT = Path(options.__file__).parents[1]
FILES = sorted(x for x in ROOT.rglob("*.py") if "\ndef main(" in x.read_text())
NAMES = [".".join(x.relative_to(ROOT).with_suffix("").parts) for x in FILES]
PROGRAMS = {x: importlib.import_module(f"experiments.{x}") for x in NAMES}
#: Programs, bad options, and beginnings of messages.
REFUSED = """
corpus.comparison --held-out 7 | held_out must be in [8, 2147483647], got 7
corpus.comparison --destination pyproject.toml/x | destination must be in a folder that
elastic.tables --seeds 1 1 2 | seeds must all be distinct, got (1, 1, 2)
facts.study --rates nan | rates[0] must be in [1e-08, 1.0], got nan
facts.study --rates 0.03 0.01 | rates must ascend, got (0.03, 0.01)
facts.study --rates 0.03 | rates must have 0.01, got (0.03,)
facts.study --counts | counts must not be empty, got ()
facts.study --distances 100 | distances must be multiples of 256 up to 1300999,
facts.study --distances 1301248 | distances must be multiples of 256 up to 1300999,
facts.study --streams 1000000 | streams must be in [5, 1024], got 1000000
facts.study --budgets 99999 | budgets must suit all rows, got (99999,): hidden_dim
facts.study --seeds 0 1 | seeds must be at least 3 seeds, got (0, 1)
gpu.check --case foo --jobs 1 | case='foo' must be alone, got jobs=1, output=
gpu.check --jobs 0 | jobs must be in [1, 2147483647], got 0
gpu.fifteen_minutes --budgets 9000 | budgets must be at least 4 texts of context=8192,
gpu.fifteen_minutes --updates 5 | Unrecognized options
gpu.fifteen_minutes --corpus folder:no | corpus must be a folder that exists, got fold
hmt.length --source folder:no | source must be a folder that exists, got folder:no: make
memories.books --source folder:no | source must be a folder that exists, got folder:no:
memories.equal_bytes --corpus folder:no | corpus must be a folder that exists, got
hmt.length --curve 5 | targets and curve must be at least 4096, got 5
hmt.length --only foo | only[0] must be one of ('window with sinks',
memories.equal_bytes --context 256 | context must be 2 or more times window=256, got
memories.recall --only foo | only must be one of ('DeltaNet',
memories.recall --of contexts --test-rows 5 | test_rows=5 has no test in 'contexts'
memories.recall --columns bytes --only Transformer++ | columns must have one of ('width'
memories.recall --of contexts --columns bytes | columns must have one of ('width',) for
memories.equal_bytes --least 4 | least must be in [5,
mplus.retention --until 3 | until must be a multiple of 4, got 3
mplus.retention --output /proc/x/y | output must be in a folder that can be written,
mplus.retention --after 1 2 | after must be 0 and more numbers, got (1, 2)
speed.ops --shapes 1 0 1 1 0 | shapes[0][1] must be in [1,
tpu.cycles --list --only foo | only must be one of (
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_bad_input_is_refused_before_any_work(case, monkeypatch, capsys):
    line, message = case.split(" | ")
    name, *words = line.split()
    plan = ["--plan"] * hasattr(getattr(PROGRAMS[name], "Config", None), "plan")
    monkeypatch.setattr(sys, "argv", [name, *words, *plan])
    with pytest.raises(SystemExit) as ended:
        options.run(PROGRAMS[name].main)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    assert said.err.removeprefix("error: ").strip().startswith(message)


def test_a_missing_corpus_is_named_with_the_command_that_makes_it(tmp_path):
    options.require_corpus("corpus", f"folder:{tmp_path}")
    options.require_corpus("corpus", "embedded")
    made = "python -m experiments.corpus.comparison --destination no/c"
    for held_out, more in ((8, ""), (40, " --held-out 40")):
        with pytest.raises(ValueError, match=f"make it by {made}{more}$"):
            options.require_corpus("corpus", "folder:no/c", held_out)


def test_a_reader_that_ends_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tpu.cycles", "--list"])
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", out)
        options.run(PROGRAMS["tpu.cycles"].main)
    assert ended.value.code == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_number_and_list_has_its_range(name):
    text = Path(PROGRAMS[name].__file__ or "").read_text()
    assert text.endswith("run(main)\n") and "tyro.cli" not in text
    config = getattr(PROGRAMS[name], "Config", PROGRAMS[name].main)
    hints = options.hints_of(config, include_extras=True)
    free = [x for x in hints if x != "return" and not is_limited(hints[x])]
    # Names of rows that are checked later; the updates are no option.
    known = {"memories.recall": ["only"], "tpu.cycles": ["only"]}
    assert free == (known | {"gpu.fifteen_minutes": ["updates"]}).get(name, [])


def is_limited(hint, in_list=False):
    kind, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if get_origin(kind) is tuple:
        return all(is_limited(x, True) for x in get_args(kind))
    is_free = kind in (int, float, Path) or (in_list and kind is str)
    return not is_free or any(map(callable, limits))
