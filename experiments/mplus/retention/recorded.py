"""The result file of knowledge retention: rows that are added one by one.

    facts      what was asked, in order
    distances  tokens between fact and question
    rows       by name: "window, device, tuned, seed 1"; of each distance a string with
               a mark for each fact, in the order of `facts` (`retention.mark`)

A row that was stopped has the marks of the facts that it was asked; the next call goes
on from there. Facts are drawn in a random order, so the first ones are a fair sample.
"""

import contextlib
import datetime
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.results import write_report
from experiments.mplus import answers as retention
from memjax.data import Question
from memjax.evaluation.provenance import device_name, version

QUESTION = "what does a model still know that was injected many tokens ago?"


class ResultFile:
    """A result file that programs may share: each adds its rows under a lock.

    Args:
        output: the file's path without its ending.
        settings: of the program that writes; those in `Shared` must be the file's.
    """

    #: Settings that all rows of a file have in common.
    SHARED = ("chunk", "answer", "batch", "carry", "known", "split", "seed")

    def __init__(self, output: Path, settings: Mapping[str, Any]):
        self._output, self._settings = output, dict(settings)

    def read(self) -> dict[str, Any] | None:
        """What the file has; None if there is none.

        Raises:
            ValueError: if it was written with other settings.
        """
        file = Path(f"{self._output}.json")
        if not file.exists():
            return None
        found = json.loads(file.read_text("utf-8"))
        for name in self.SHARED:
            old, new = found["config"][name], self._settings[name]
            if old != new:
                raise ValueError(
                    f"{name}={new!r} must be that of the rows in {file}, {old!r}; "
                    "or give another output"
                )
        return found

    def facts(self) -> list[Question]:
        """Those of the file; none if there is no file."""
        found = self.read()
        return [] if found is None else [Question(**x) for x in found["facts"]]

    def begin(self, facts: Sequence[Question], common: Mapping[str, Any]) -> None:
        """Makes the file, or checks that it has these facts and distances.

        Args:
            facts: in the order in which they are asked.
            common: what all rows have in common, the distances among it.

        Raises:
            ValueError: if the file has others.
        """
        with self._locked():
            found = self.read()
            asked = [fact._asdict() for fact in facts]
            if found is None:
                self._write({"facts": asked, **common, "rows": {}})
            elif (found["facts"], found["distances"]) != (asked, common["distances"]):
                raise ValueError(
                    f"{self._output}.json must have the same facts and distances, "
                    "it has others: give another output"
                )

    def row(self, name: str) -> dict[str, Any] | None:
        """A row as it stands; None if it was not begun."""
        found = self.read()
        return None if found is None else found["rows"].get(name)

    def write_row(self, name: str, row: Mapping[str, Any]) -> None:
        """Puts a row into the file, with the commit and the date."""
        with self._locked():
            found = self.read()
            assert found is not None
            before = found["rows"].get(name, {})
            commits = [*before.get("commits", [])]
            if (now := _commit()) not in commits:
                commits.append(now)
            found["rows"][name] = {
                **row,
                "date": datetime.date.today().isoformat(),
                "commits": commits,
                "device": device_name(),
                "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
            }
            keep = ("facts", "distances", "majority_exact", "rows")
            self._write({part: found[part] for part in keep})

    def _write(self, contents: Mapping[str, Any]) -> None:
        write_report(self._output, QUESTION, self._settings, contents)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The folder is locked, so that no lock file is left among the results.
        self._output.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._output.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _commit() -> str:
    commit, clean = version()
    return f"{commit} with changes" if clean is False else str(commit)


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return "experiments.mplus.retention" if spec is None else spec.name


def variant(name: str, row: Mapping[str, Any]) -> str:
    """A method's name with what the row adds to it: adapters, another retriever."""
    parts = {"tuned": row["tuned"], "retriever fitted afterwards": row.get("retriever")}
    return ", ".join([name, *(part for part, has in parts.items() if has)])


def row_name(row: Mapping[str, Any]) -> str:
    """The key of a row."""
    name, seed = variant(row["method"], row), row["seed"]
    return name if seed is None else f"{name}, seed {seed}"


def by_method(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of one method joined over seeds, with their shares and gains.

    Returns:
        By method and `variant`: "label", "seeds", "questions",
        "recipe", "kept_bytes", "after", one `retention.accuracy` a distance, and
        "gain", M+'s share over this row's, paired, one a distance; None for M+ itself
        and without it. Shares are of the facts that all seeds were asked.
    """
    joined: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"].values():
        joined.setdefault(variant(row["method"], row), []).append(row)
    distances = range(len(result["distances"]))
    shares = {
        name: [_mean([row["marks"][i] for row in rows]) for i in distances]
        for name, rows in joined.items()
    }
    subjects = [fact["subject"] for fact in result["facts"]]
    ours = shares.get("M+")

    def against(other, i):
        count = 0 if ours is None else min(len(ours[i]), len(other))
        if ours is None or not count or other is ours[i]:
            return None
        return retention.gain(ours[i][:count], other[:count], subjects[:count])

    return {
        name: {
            "label": variant(rows[0]["label"], rows[0]),
            "seeds": [row["seed"] for row in rows if row["seed"] is not None],
            "recipes": [row["recipe"] for row in rows if row["recipe"]],
            "kept_bytes": rows[0]["kept_bytes"],
            "after": [retention.accuracy(x) for x in shares[name]],
            "gain": [against(x, i) for i, x in enumerate(shares[name])],
        }
        for name, rows in joined.items()
    }


def _mean(marks: Sequence[str]) -> np.ndarray:
    """Share of right answers of each fact, over seeds that were asked it."""
    count = min(map(len, marks))
    return np.mean([retention.right(row[:count]) for row in marks], axis=0)
