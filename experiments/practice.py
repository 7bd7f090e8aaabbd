"""Which memory to take: a table and three plots across all studies.

`docs/which-memory.md` shows them. The words are advice, from `practice.txt`; every
number is read from the result files of the studies.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.facts.tables import by_distance
from experiments.hmt.rows import Row
from experiments.lab.measure import KINDS
from experiments.lab.results import (
    Lookup,
    Rows,
    figure,
    load,
    number,
    table,
    written,
)
from experiments.memories.recall_tables import score
from experiments.mplus.answers import by_method
from experiments.speed.hybrids import LENGTHS
from experiments.tpu.cycles import SUMMARY, cycles_of
from memjax.evaluation.drawing import apart, drawing, log_ticks, source_of
from memjax.models import HMTConfig
from memjax.training.finetune.segment_stage import SegmentStage

EQUAL, FACTS = "memories/equal_bytes", "mplus/retention"
LENGTH, RECALL, LOG = "hmt/smollm2/length", "memories/columns/recall", "facts/study"
BOOKS, CYCLES, HYBRIDS = "memories/books_window8", "tpu/cycles", "speed/hybrids"
#: A token of text is stored as an int32.
BYTES_OF_ID = 4
#: Rows of the second plot in the study at equal bytes; HMT there is strictly causal.
SAVING = {
    "full-tuned": "full attention",
    "reread-tuned": "re-read window",
    "gated-deltanet-shared": "window and Gated DeltaNet, shared",
    "wide-shared-tuned": "window of these bytes",
    "hmt": "HMT, strictly causal",
    "rmt": "RMT",
}
FITTED = "M+, retriever fitted afterwards"
#: Rows of the third plot, in two panels; windows that end there.
ASKED = (
    "BM25, tuned",
    "window, all, tuned",
    "window, device, tuned",
    FITTED,
    "M+",
    "MemoryLLM",
)
LOGGED = ("DeltaNet", "TTT", "Lattice", "learned cache", "text, LZMA")
COLUMNS = "you have|text|you need|take|evidence|do not take|not known".split("|")
Result = dict[str, Any]


def _each(find: Callable[[str], str]) -> Lookup:
    """Several keys, parted by slashes, each with its name."""
    return Lookup(lambda keys: "; ".join(f"{x} {find(x)}" for x in keys.split("/")))


@table("practice", EQUAL, FACTS, LENGTH, RECALL, LOG, BOOKS, CYCLES, HYBRIDS)
def practice(*results: Result) -> Rows:
    """A row a situation: what to take, the evidence, and what is not known."""
    yield from written(Path(__file__).with_suffix(".txt"), COLUMNS, _evidence(*results))
    yield "nats saved a token are on proofs / code / prose"


def _evidence(*results: Result) -> dict[str, Any]:
    """The figures that the table's cells name."""
    equal, facts, length, recall, log, books, cycles, hybrids = results
    methods, published = by_method(facts), hybrids["rows"][1]

    def answered(i: int) -> dict[str, str]:
        return {k: number(x["after"][i]["accuracy"], 2) for k, x in methods.items()}

    def size(name: str) -> str:
        """The largest state."""
        found = [x["device"] + x["host"] for x in methods[name]["kept_bytes"]]
        most = max(found) / 1e6
        return f"{number(most, 2 if most < 1 else 0)} MB"

    def saved(key: str) -> str:
        name, base, *seed = key.split("/")
        found = _saving(equal, name, base, *map(int, seed))
        return " / ".join(f"{x:+.3f}" for x in found)

    def recalled(name: str) -> str:
        # Medians over seeds, states of equal bytes.
        of, length = (name, "bytes"), recall["task"]["lengths"][1]
        runs = [x for x in recall["rows"] if (x["name"], x["column"]) == of]
        found = (np.median([score(x, n, length) for x in runs]) for n in (16, 32))
        few, many = (number(float(x), 2) for x in found)
        return f"{few} ({many})"

    def logged(name: str) -> str:
        few, many = (by_distance(log, name, n)[-2] for n in (16, 64))
        return f"{few:.0%} ({many:.0%})"

    def counted(name: str) -> str:
        return cycles_of(cycles["cases"][f"{SUMMARY[name]}/both"], 1)

    sizes = zip(published["bytes"], LENGTHS, strict=True)
    grown = [f"{number(x / 1e6, 1)} MB after {n:,} tokens" for x, n in sizes]
    trained = {k: x for k, x in books["models"].items() if "state_bytes" in x}
    listed = (f"{k} {number(x['perplexity'], 1)}" for k, x in trained.items())
    by_length = length["perplexity"]["all"]
    return {
        "middle": f"{facts['distances'][2]:,}",
        "last": f"{facts['distances'][-1]:,}",
        "late": f"{log['config']['distances'][-2]:,}",
        "sooner": answered(2),
        "right": answered(-1),
        "size": Lookup(size),
        "saved": Lookup(saved),
        "longest": {name: number(x[-1], 1) for name, x in by_length.items()},
        "pairs": _each(recalled),
        "logged": _each(logged),
        "counted": _each(counted),
        "published": published["name"],
        "grown": " and ".join(grown),
        "books": "; ".join(listed),
    }


def _row(equal: Result, name: str, seed: int = 0) -> Result:
    rows = equal["rows"]
    (found,) = (x for x in rows if (x["row"], x["seed"]) == (name, seed))
    return found


def _saving(equal: Result, name: str, base: str, seed: int = 0) -> list[float]:
    """Nats a token that a row saves over another, by kind of text."""
    ours, theirs = (_row(equal, x, seed)["perplexity"] for x in (name, base))
    return [float(np.log(theirs[kind] / ours[kind])) for kind in KINDS]


@figure("practice/bytes", source=EQUAL)
def plot_bytes(equal: Result, path: Path) -> None:
    """State size against the tokens read, and where what grows meets what does not."""
    length, facts = load(LENGTH), load(FACTS)
    sizes = {k: row["state_bytes"] for k, row in length["models"].items()}
    growing = {"full attention": _bytes_a_token(length), "text": BYTES_OF_ID}
    constant = {
        "M+": sum(by_method(facts)["M+"]["kept_bytes"][-1].values()),
        "window and memory": _row(equal, "gated-deltanet-shared")["bytes"],
        "HMT": sizes["HMT, strictly causal"],
    }
    tokens, most = 10.0 ** np.arange(1.5, 9.1, 0.25), 1e11
    source = f"{source_of(equal)}; {LENGTH}, {FACTS}"
    title = "State of SmolLM2-135M, float32; where it is as large as what grows"
    with drawing(path, size=(8.5, 5.0), title=title, source=source) as drawn:
        axes = drawn.grid[0, 0]
        for i, (name, slope) in enumerate(growing.items()):
            bytes_ = np.where(slope * tokens <= most, slope * tokens, np.nan)
            drawn.line(axes, tokens, bytes_, name, i, marker="")
        for i, (name, size) in enumerate(constant.items(), len(growing)):
            drawn.line(axes, tokens, np.full_like(tokens, size), name, i, marker="")
            # Above its line, but where another line is.
            place, side = ((8, -15), "left") if name == "HMT" else ((-6, 6), "right")
            for slope in growing.values():
                at = size / slope, size
                axes.plot(*at, "o", color="black", markersize=5)
                offset: Any = {"xytext": place, "textcoords": "offset points"}
                axes.annotate(_short(at[0]), at, **offset, horizontalalignment=side)
        ticks = 10.0 ** np.arange(2, 12)
        axes.set(xscale="log", yscale="log", xlabel="tokens read", ylim=(1e2, most))
        axes.set_xticks(ticks[:8], map(_short, ticks[:8]))
        axes.set_yticks(ticks, [f"{_short(x, ' ')}B" for x in ticks])
        axes.minorticks_off()
        axes.set_ylabel("bytes")


def _bytes_a_token(length: Result) -> float:
    """Of full attention, at the longest text that it reads."""
    read = length["perplexity"]["all"]["full attention"]
    longest = [n for n, x in zip(length["lengths"], read, strict=True) if x][-1]
    return length["models"]["full attention"]["state_bytes"] / longest


def _short(count: float, space: str = "") -> str:
    """A count with two digits or three: 263, 3.0M, 103M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            digits = 1 if count < 10 * size and count % size else 0
            return f"{count / size:.{digits}f}{space}{unit}"
    return f"{count:.0f}{space}"


@figure("practice/saved", source=EQUAL)
def plot_saved(equal: Result, path: Path) -> None:
    """Nats saved over the tuned window, against bytes and tokens read for one."""
    # As in that study; what is not named reads each token once.
    hmt = HMTConfig(segment_length=256, summary_source="previous")
    rmt = HMTConfig(segment_length=256, num_sensory_tokens=0, retrieval=False)
    reads = {"reread-tuned": 2.0}
    for name, config in (("hmt", hmt), ("rmt", rmt)):
        reads[name] = Row(name, (SegmentStage(hmt=config),)).reads
    title = "Nats a token saved over the tuned window: proofs ●, code ■, prose ▲"
    panels: Any = dict(columns=2, sharey=True, size=(11, 5.0))
    with drawing(path, title=title, source=source_of(equal), **panels) as drawn:
        left, right = drawn.grid[0]
        # What has equal bytes, or reads as much, stands side by side.
        bytes_ = [np.log10(_row(equal, name)["bytes"]) for name in SAVING]
        places = {left: 10 ** np.asarray(apart(bytes_, [0.16] * len(bytes_)))}
        times = apart([reads.get(n, 1.0) for n in SAVING], [0.07] * len(bytes_))
        places[right] = np.asarray(times)
        for i, (name, label) in enumerate(SAVING.items()):
            found = _saving(equal, name, "window-tuned")
            for axes, x in places.items():
                at, named = [x[i]] * len(found), axes is right
                drawn.line(axes, at, found, label, i, marker="", named=named)
                for marker, y in zip("os^", found, strict=True):
                    drawn.line(axes, at[:1], [y], "", i, marker=marker, named=False)
        for axes in (left, right):
            axes.axhline(0, color="0.3", linewidth=1)
        left.set(xscale="log", xlabel="bytes of the state")
        left.set_ylabel("nats/token; above 0 is better")
        right.set(xlabel="tokens that the backbone reads for one", xlim=(0.7, 2.2))


@figure("practice/distance", source=FACTS)
def plot_distance(facts: Result, path: Path) -> None:
    """Right answers against the distance: a pretrained model, and small ones."""
    log, rows = load(LOG), by_method(facts)
    far, late = facts["distances"], log["config"]["distances"]
    source = f"{source_of(facts)}; {LOG}: {source_of(log)}"
    with drawing(path, columns=2, size=(14, 5.0), source=source, sharey=True) as drawn:
        left, right = drawn.grid[0]
        for i, name in enumerate(ASKED):
            shares = [x["accuracy"] for x in rows[name]["after"]]
            drawn.line(left, far, shares, rows[name]["label"], i)
            if name.startswith("window"):
                size = rows[name]["kept_bytes"][-1]["device"]
                end = size / _bytes_a_token(load(LENGTH))
                left.axvline(end, color="0.3", linestyle=":")
        for i, name in enumerate(LOGGED):
            drawn.line(right, late, by_distance(log, name, 16), name, i)
        log_ticks(right, late)
        left.set_xticks(far, [f"{x:,}" for x in far])
        left.set(title="facts: SmolLM2-135M; dotted: a window ends")
        left.set(xlabel="tokens since", ylabel="right answers")
        right.set(title="16 facts in a log: small models, text of as many bytes")
        right.set_xlabel("bytes since")
