"""Which memory to take: a table and three plots across all studies.

`docs/which-memory.md` shows them. The words are advice; every number is read from the
result files of the studies.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.hmt.rows import SINK_WINDOW as SINKS
from experiments.hmt.rows import WINDOW, Row
from experiments.lab.measure import KINDS
from experiments.lab.results import Rows, figure, load, number, percent, table
from experiments.mplus.answers import by_method
from experiments.speed.hybrids import LENGTHS
from experiments.tpu.cycles import SUMMARY, cycles_of
from memjax.evaluation.drawing import apart, drawing, log_ticks, source_of
from memjax.models import HMTConfig
from memjax.training.finetune.segment_stage import SegmentStage

EQUAL, FACTS = "memories/equal_bytes", "mplus/retention"
LENGTH, RECALL, NOTES = "hmt/smollm2/length", "memories/recall", "memories/notes"
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
COMPRESSED = "compressed text, read again"
#: Rows of the third plot, in two panels; windows that end there.
ASKED = (
    "BM25, tuned",
    "window, all, tuned",
    "window, device, tuned",
    FITTED,
    "M+",
    "MemoryLLM",
)
NOTED = ("TTT", "DeltaNet", "Lattice", COMPRESSED, "sliding window")
COLUMNS = "you have|text|you need|take|evidence|do not take|not known".split("|")
#: Cells of the table, row by row, with the names of `_evidence`.
SITUATIONS = """
a pretrained model | fits its positions and your memory | anything | full attention |
{full} | |

the same | is longer, and may be kept | facts, asked in their own words | BM25 over the
text, one chunk | {bm25} | M+, MemoryLLM; SnapKV while a text is read | questions in
other words

the same | is longer, and may be read twice | low perplexity | `ReReadWindow` |
{reread} | HMT, RMT, M+ | at equal compute, against a larger model; HMT trained on as
many targets as the window; how much of the tuned lead is adapters in more layers

the same | is longer, and is read once | low perplexity | a window with 4 sinks; a
shared Gated DeltaNet beside it adds a little | {window} | a window without sinks;
Elastic Memory, Infini-attention; a memory for each query head | whether a window that
is aligned as long gains as much; longer training

the same | is longer, and must not be kept | facts | M+ with a retriever fitted
afterwards | {mplus} | MemoryLLM | all stages of the training: this is the last alone,
with one seed

a pretrained model with recurrent layers | is longer than a cache | to read and write
on | it as it is | {published} | | what it recalls, against attention of its size

a model to train | has many pairs, near by | recall in kilobytes | DeltaNet, Linear
Attention, GLA, Lattice | {recall} | ABC, a window | Trellis in as many bytes: as wide
as DeltaNet it recalls about as much; KDA, GDN-2

the same | has few notes, far back | recall in kilobytes | TTT; a list, where notes can
be recognised | {notes} | a forget gate that has to learn to keep: Trellis fades |
Trellis without one; more than two seeds

the same | is language | low perplexity | a window of the memory's bytes | {books} |
Elastic Memory in blocks of 8 | above a million parameters

a TPU to fill | is of any length | speed of training | SSD, linear attention; Lattice in
chunks of 64 | {cycles} | Trellis or Lattice by single tokens | times: counted, not run
"""
Result = dict[str, Any]


@table("practice", EQUAL, FACTS, LENGTH, RECALL, NOTES, BOOKS, CYCLES, HYBRIDS)
def practice(*results: Result) -> Rows:
    """A row a situation: what to take, the evidence, and what is not known."""
    evidence = _evidence(*results)
    for text in SITUATIONS.strip().split("\n\n"):
        cells = " ".join(text.split()).format(**evidence).split("|")
        yield dict(zip(COLUMNS, map(str.strip, cells), strict=True))
    yield "nats saved a token are on proofs / code / prose"


def _evidence(
    equal: Result,
    facts: Result,
    length: Result,
    recall: Result,
    notes: Result,
    books: Result,
    cycles: Result,
    hybrids: Result,
) -> dict[str, str]:
    """The figures of each row of the table, with a link to their own table."""
    methods = by_method(facts)
    right = {k: number(v["after"][-1]["accuracy"], 2) for k, v in methods.items()}
    full = number(methods["full attention, tuned"]["after"][2]["accuracy"], 2)
    middle, last = (f"{x:,} tokens later" for x in facts["distances"][2:])
    right_facts = _link("right", "mplus", "knowledge-retention")
    nats = _link("nats", "memories", "equal-bytes-memories-of-a-pretrained-model")
    longest = {k: number(v[-1], 1) for k, v in length["perplexity"]["all"].items()}
    published = hybrids["rows"][1]
    megabytes = [f"{number(size / 1e6, 1)} MB" for size in published["bytes"]]

    def saved(name: str, base: str, seed: int = 0) -> str:
        found = _saving(equal, name, base, seed)
        return " / ".join(f"{x:+.3f}" for x in found)

    def recalled(name: str) -> str:
        # Medians over seeds, states of equal bytes.
        length, found = recall["task"]["lengths"][1], {16: [], 32: []}
        for row in recall["rows"]:
            if row["name"] == name and row.get("column", "bytes") == "bytes":
                for score in row.get("scores", ()):
                    if score["length"] == length and score["pairs"] in found:
                        found[score["pairs"]].append(score["tokens"])
        few, many = (number(float(np.median(x)), 2) for x in found.values())
        return f"{name} {few} ({many})"

    def noted(name: str) -> str:
        by_count = notes["models"][name]["right"]
        few, many = (percent(by_count[n][-1]["mean"]) for n in ("4", "16"))
        return f"{name} {few} ({many})"

    def counted(name: str) -> str:
        case = cycles["cases"][f"{SUMMARY[name]}/both"]
        return f"{name} {cycles_of(case, 1)}"

    def listed(describe, *names: str) -> str:
        return "; ".join(map(describe, names))

    memory, base = "gated-deltanet-shared", "wide-shared-tuned"
    return {
        "full": f"{nats} saved over a window {saved('full', 'wide')}, tuned "
        f"{saved('full-tuned', 'wide-tuned')}; {right_facts}, {middle}: {full}",
        "bm25": f"{right_facts}, {last}: {right['BM25']} in {_size(methods['BM25'])}, "
        f"tuned {right['BM25, tuned']}; M+ {right['M+']} in {_size(methods['M+'])}",
        "reread": f"{nats} saved over a window {saved('reread', 'wide-shared')}, tuned "
        f"{saved('reread-tuned', base)}",
        "window": f"{_link('PPL', 'hmt', 'length')} {longest[SINKS]} with sinks, "
        f"{longest[WINDOW]} without; {nats} saved by the memory over a window of its "
        f"bytes {saved(memory, base)}, second seed {saved(memory, base, 1)}",
        "mplus": f"{right_facts}, {last}: {right[FITTED]}; MemoryLLM "
        f"{right['MemoryLLM']}, closed book {right['closed book, tuned']}",
        "published": f"{published['name']}, "
        f"{_link('state', 'speed', 'published-hybrids-against-transformers')}: "
        + " and ".join(
            f"{size} after {tokens:,} tokens"
            for size, tokens in zip(megabytes, LENGTHS, strict=True)
        ),
        "recall": f"{_link('right', 'memories', 'recall')} of 16 pairs (of 32): "
        + listed(recalled, "DeltaNet", "Linear Attention", "GLA", "Lattice", "ABC")
        + f"; {recalled('sliding window')}",
        "notes": _link("right", "memories", "notes-what-as-many-bytes-of-text-lose")
        + f" of 4 notes (of 16), {notes['config']['distances'][-1]:,} bytes later: "
        + listed(noted, "TTT", "DeltaNet", _trellis(notes), COMPRESSED),
        "books": f"{_link('PPL', 'memories', 'books-perplexity-beyond-the-window')}: "
        + listed(
            lambda name: f"{name} {number(books['models'][name]['perplexity'], 1)}",
            *(k for k, row in books["models"].items() if "state_bytes" in row),
        ),
        "cycles": f"{_link('cycles', 'tpu', 'summary')} a token, with backward: "
        + listed(
            counted,
            "SSD (Mamba-2)",
            "Lattice, chunks of 64",
            "Gated DeltaNet",
            "Trellis, chunks of 64",
            "causal attention at 2,048 tokens",
        ),
    }


def _link(text: str, room: str, anchor: str) -> str:
    """To the table of a study, from a page of `docs/`."""
    return f"[{text}](../experiments/{room}/README.md#{anchor})"


def _trellis(notes: Result) -> str:
    """Its first row, whose name has the size of its chunks in newer results."""
    return next(name for name in notes["models"] if name.startswith("Trellis"))


def _size(method: Result) -> str:
    """The largest state of a method."""
    most = max(size["device"] + size["host"] for size in method["kept_bytes"]) / 1e6
    return f"{number(most, 2 if most < 1 else 0)} MB"


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
    notes, rows = load(NOTES), by_method(facts)
    far, late = facts["distances"], notes["config"]["distances"]
    source = f"{source_of(facts)}; {NOTES}: {source_of(notes)}"
    with drawing(path, columns=2, size=(14, 5.0), source=source, sharey=True) as drawn:
        left, right = drawn.grid[0]
        for i, name in enumerate(ASKED):
            shares = [x["accuracy"] for x in rows[name]["after"]]
            drawn.line(left, far, shares, rows[name]["label"], i)
            if name.startswith("window"):
                size = rows[name]["kept_bytes"][-1]["device"]
                end = size / _bytes_a_token(load(LENGTH))
                left.axvline(end, color="0.3", linestyle=":")
        for i, name in enumerate((*NOTED, _trellis(notes))):
            shares = [x["mean"] for x in notes["models"][name]["right"]["16"]]
            drawn.line(right, late, shares, name, i)
        right.axvline(notes["models"][COMPRESSED]["state_bytes"], color="0.3", ls=":")
        log_ticks(right, late)
        left.set_xticks(far, [f"{x:,}" for x in far])
        left.set(title="facts: SmolLM2-135M; dotted: a window ends")
        left.set(xlabel="tokens since", ylabel="right answers")
        right.set(title="16 notes: small models; dotted: text of as many bytes ends")
        right.set_xlabel("bytes since")
