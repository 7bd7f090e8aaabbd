"""Tables of notes, books and conversation."""

from experiments.lab.intervals import format_interval, format_seeds
from experiments.memories.books_models import MEMORY
from experiments.tables.table import (
    Table,
    Tables,
    load,
    number,
    percent,
    spread,
    thousands,
)

_NOTES = "memories/notes"
_NAME = "conversation/session"
_WAYS = {
    "begun": "answer begun for it",
    "plain": "asked plainly",
    "empty": "begun, empty memory",
}
_BOOKS = ("memories/books_window8", "memories/books_window64")


def notes() -> Table:
    """Right answers about notes, by the bytes of text since."""
    result = load(_NOTES)
    counts, distances = (result["config"][key] for key in ("counts", "distances"))
    # Up to there all of the text fits; the plot has every distance.
    chosen = [0, *(i for i, distance in enumerate(distances) if distance > 4096)]
    header = ["", "bytes kept"]
    header += [f"{n} notes, {distances[i]:,} later" for n in counts for i in chosen]
    rows = [
        [name, thousands(row["state_bytes"])]
        + [percent(row["right"][str(n)][i]["mean"]) for n in counts for i in chosen]
        for name, row in result["models"].items()
    ]
    return Table(header, rows, [_NOTES])


def notes_ahead() -> Table:
    """What the memories answer more than the best of as many bytes."""
    result = load(_NOTES)
    counts, distances = (result["config"][key] for key in ("counts", "distances"))
    header = [f"against the best of as many bytes, {distances[-1]:,} bytes later"]
    header += [f"{n} notes" for n in counts]
    header += [f"right of {n}, each seed" for n in counts]
    rows = [[name] for name in result["ahead"]]
    for row in rows:
        name = row[0]
        for n in counts:
            last = result["ahead"][name][str(n)][-1]
            row.append(spread(last["mean"], last["error"], 2))
        for n in counts:
            seeds = result["models"][name]["seeds"][str(n)]
            row.append(", ".join(percent(by_distance[-1]) for by_distance in seeds))
    best = {
        row[str(n)][-1]["baseline"] for row in result["ahead"].values() for n in counts
    }
    notes = [f"right answers more than {', '.join(sorted(best))} ± standard error"]
    return Table(header, rows, [_NOTES], notes)


def memory() -> Table:
    """All models of the study of books, with short windows and longer ones."""
    rows = []
    for name in _BOOKS:
        result = load(name)
        window = result["config"]["window"]
        # The n-gram is the same in both.
        rows += [
            [
                f"{model}, blocks of {window}" if model == MEMORY else model,
                number(row.get("state_bytes"), 0),
                number(result["steps"] if "state_bytes" in row else None, 0),
                number(row["perplexity"], 1),
                number(row["beyond_window"], 1),
                *(number(x, 1) for x in row["beyond_window_by_kind"].values()),
            ]
            for model, row in result["models"].items()
            if name == _BOOKS[0] or "state_bytes" in row
        ]
    kinds = load(_BOOKS[0])["models"][MEMORY]["beyond_window_by_kind"]
    header = ["", "bytes kept", "updates", "PPL", "PPL beyond the short window"]
    return Table([*header, *kinds], rows, [*_BOOKS])


def gain() -> Table:
    """What the memory saves beyond the short window, over each window."""
    rows = []
    for name in _BOOKS:
        result = load(name)
        for base, found in result["gains"].items():
            cells = [format_interval(x) for x in found.values()]
            rows.append([f"over {base}", *cells, format_seeds(found["all"]["by_seed"])])
    kinds = load(_BOOKS[0])["gains"]
    header = ["nats a token that Elastic Memory saves", *next(iter(kinds.values()))]
    return Table([*header, "all, with each seed"], rows, [*_BOOKS])


def answers() -> Table:
    """How many questions about a text are answered, and what was answered."""
    found = load(_NAME)["answers"]
    rows = [
        [row["question"], row["answer"], *(row[name] for name in _WAYS)]
        for row in found["rows"]
    ]
    counts = [str(found["right"][name]) for name in _WAYS]
    rows.append([f"right of {found['questions']}", "", *counts])
    header = ["question", "in the text", *_WAYS.values()]
    return Table(header, rows, [_NAME])


def turns() -> Table:
    """What each turn of a conversation with SmolLM2-135M costs."""
    rows = [
        [
            number(i + 1, 0),
            number(row["seconds"], 1),
            number(row["compiling"], 1),
            number(row["first_token"], 2),
            number(row["tokens"], 0),
            number(row["tokens_held"], 0),
            number(row["bytes"] / 1e6, 1),
        ]
        for i, row in enumerate(load(_NAME)["turns"])
    ]
    header = ["turn", "seconds", "of them compiling", "first token, s"]
    header += ["tokens of the answer", "tokens held", "memory, MB"]
    return Table(header, rows, [_NAME])


TABLES: Tables = {
    "memories/notes": notes,
    "memories/notes_ahead": notes_ahead,
    "memories/books": memory,
    "memories/books_gain": gain,
    "conversation/answers": answers,
    "conversation/turns": turns,
}
