"""Answers about injected text: asking, judging, and shares of right answers.

An answer is right if it occurs in what is generated greedily, as in the published
programs of M+ (Wang et al., 2025, https://arxiv.org/abs/2502.00592, section 4.3). Each
is recorded as a mark: "2" where the text begins with the answer, "1" where it occurs in
it, "0" where it does not, "-" where the method could not be asked.
"""

import functools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from experiments.lab import results
from experiments.mplus import models
from experiments.mplus.methods import Method
from experiments.mplus.samples import Samples
from memjax.data import Tokenizer

NOT_ASKED = "-"
#: Variants of a method: with adapters, with another retriever.
TUNED, FITTED = "tuned", "retriever fitted afterwards"
#: Draws of subjects for an interval.
RESAMPLES = 10_000


def query_batches(
    method: Method,
    batches: Sequence[Samples],
    tokenizer: Tokenizer,
    *,
    after: Sequence[int],
    answer: int,
    took: list[float],
) -> Iterator[list[str]]:
    """Injects each batch of samples chunk by chunk and yields marks of its answers.

    Of a batch one string for each number of chunks of `after`, in rising order, with a
    mark for each fact. `took` gets each query's seconds a fact.
    """
    for batch in batches:
        memory = method.start(len(batch.facts))
        marks = []
        for count, chunk in enumerate([batch.context, *batch.chunks][: after[-1] + 1]):
            memory = method.inject(memory, chunk)
            if count in after:
                began = time.monotonic()
                found = method.query(memory, batch.prompts, answer)
                took.append((time.monotonic() - began) / len(batch.facts))
                if found is None:
                    marks.append(NOT_ASKED * len(batch.facts))
                    continue
                texts = map(tokenizer.decode, found)
                pairs = zip(batch.facts, texts, strict=True)
                marks.append("".join(mark(fact.answer, text) for fact, text in pairs))
        yield marks


def mark(answer: str, text: str) -> str:
    """The mark of a text."""
    if text.lstrip().startswith(answer):
        return "2"
    return "1" if answer in text else "0"


def right(marks: str) -> Float64[np.ndarray, " F"]:
    """1 for each fact whose answer occurs in the generated text, else 0.

    NaN for those that could not be asked.
    """
    values = {"0": 0.0, "1": 1.0, "2": 1.0, NOT_ASKED: math.nan}
    return np.asarray([values[x] for x in marks], np.float64)


def accuracy(shares: Float64[np.ndarray, " F"]) -> dict[str, Any]:
    """Mean over facts with its interval; of one seed a fact counts 0 or 1."""
    shares = shares[np.isfinite(shares)]
    count = len(shares)
    low, high = wilson(shares.sum(), count)
    mean = float(shares.mean()) if count else math.nan
    return {"questions": count, "accuracy": mean, "low": low, "high": high}


def difference(
    shares: Float64[np.ndarray, " F"],
    base: Float64[np.ndarray, " F"],
    subjects: Sequence[str],
) -> dict[str, float] | None:
    """Share of right answers minus a base's, paired by fact; None without common facts.

    The interval of 95% is of the bootstrap over subjects, because facts of one subject
    have a context in common. Shares are the means over seeds.
    """
    asked = np.isfinite(shares) & np.isfinite(base)
    if not asked.any():
        return None
    shares, base = shares[asked], base[asked]
    _, groups = np.unique(np.asarray(subjects)[asked], return_inverse=True)
    sums = np.bincount(groups, weights=shares - base)
    sizes = np.bincount(groups)
    drawn = _resamples(len(sums))
    low, high = np.quantile((drawn @ sums) / (drawn @ sizes), [0.025, 0.975])
    mean = float((shares - base).mean())
    return {"mean": mean, "low": float(low), "high": float(high)}


@functools.lru_cache(maxsize=2)
def _resamples(groups: int) -> np.ndarray:
    """Bootstrap counts of each group, [RESAMPLES, groups]."""
    equal = np.full(groups, 1 / groups)
    return np.random.default_rng(0).multinomial(groups, equal, size=RESAMPLES)


def wilson(hits: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share; (0, 1) if nothing was counted."""
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, hits / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = share * (1 - share) / count + z**2 / (4 * count**2)
    half = z * math.sqrt(spread) / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def variant(name: str, row: Mapping[str, Any]) -> str:
    """A name with the row's adapters and retriever."""
    parts = {TUNED: row["tuned"], FITTED: row.get("retriever")}
    return ", ".join([name, *(part for part, has in parts.items() if has)])


def by_method(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of one method joined over seeds, by name.

    "after" has an `accuracy` a distance, of the facts that all seeds were asked, and
    "gain" M+'s share minus this row's, or None.
    """
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"].values():
        rows_of.setdefault(variant(row["method"], row), []).append(row)
    shares_of = {
        name: [_mean(part) for part in zip(*(x["marks"] for x in rows), strict=True)]
        for name, rows in rows_of.items()
    }
    subjects = [fact["subject"] for fact in result["facts"]]

    def ahead(name: str, i: int) -> dict[str, float] | None:
        if name == "M+" or "M+" not in shares_of:
            return None
        first, second = shares_of["M+"][i], shares_of[name][i]
        count = min(len(first), len(second))
        return difference(first[:count], second[:count], subjects[:count])

    return {
        name: {
            "label": variant(rows[0]["label"], rows[0]),
            "seeds": [row["seed"] for row in rows if row["seed"] is not None],
            "recipes": [stage for row in rows for stage in row["recipe"]],
            "kept_bytes": rows[0]["kept_bytes"],
            "took": [x for row in rows for x in row.get("query_seconds", ())],
            "after": [accuracy(x) for x in shares_of[name]],
            "gain": [ahead(name, i) for i in range(len(result["distances"]))],
        }
        for name, rows in rows_of.items()
    }


def _mean(marks: Sequence[str]) -> np.ndarray:
    """Share of right answers of each fact, over the seeds that were asked it."""
    count = min(map(len, marks))
    return np.mean([right(row[:count]) for row in marks], axis=0)


@results.table("mplus/retention")
def retention(result: Mapping[str, Any]) -> results.Rows:
    """Right answers by distance, with the size of the state."""
    asked = len(result["facts"])
    after = [results.number(distance, 0) for distance in result["distances"]]
    measured = {
        f"{row['date']} in {commit}"
        for row in result["rows"].values()
        for commit in row["commits"]
    }
    yield f"rows measured {', '.join(sorted(measured))}"
    methods = by_method(result).values()
    timed = any(method["took"] for method in methods)
    for method in methods:
        count = max(row["questions"] for row in method["after"])
        seeds = len(method["seeds"])
        # Where a method could not be asked, it has no state to answer from.
        pairs = zip(method["kept_bytes"], method["after"], strict=True)
        sizes = [size for size, row in pairs if row["questions"]]
        most = max(sizes, key=lambda size: sum(size.values()))
        cells = {
            "right answers (95% interval)": method["label"]
            + (f", {seeds} seeds" if seeds > 1 else ""),
            "facts": str(count) if count == asked else f"{count} of {asked}",
        }
        of_all = {"state, MB": sum(most.values()), "on the device": most["device"]}
        for part, size in of_all.items():
            cells[part] = results.number(size / 1e6, 2 if size < 1e6 else 0)
        if timed:
            took = float(np.median(method["took"] or np.nan))
            cells["s a question"] = results.number(took, 2)
        for distance, row in zip(after, method["after"], strict=True):
            share = "{accuracy:.2f} ({low:.2f} to {high:.2f})".format(**row)
            share = share if row["questions"] else "beyond its positions"
            cells[f"after {distance} tokens"] = share
        for distance, row in zip(after, method["gain"], strict=True):
            interval = "{mean:+.2f} ({low:+.2f} to {high:+.2f})"
            words = interval.format(**row) if row else ""
            cells[f"M+ ahead by, after {distance}"] = words
        yield cells
        yield from map(models.recipe_text, method["recipes"])


stages = results.table("mplus/stages")(retention.rows)
