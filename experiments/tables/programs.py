"""Tables of `experiments.notes`, `experiments.books` and `experiments.conversation`."""

from experiments.tables.table import (
    Table,
    Tables,
    load,
    number,
    percent,
    spread,
    thousands,
)

_NOTES = "notes/notes"
_NAME = "conversation/session"
_WAYS = {
    "begun": "answer begun for it",
    "plain": "asked plainly",
    "empty": "begun, empty memory",
}
_KINDS = ("code", "manuals", "proofs", "prose")


def notes() -> Table:
    """Right answers about notes, by the bytes of text since."""
    result = load(_NOTES)
    counts, distances = (result["config"][key] for key in ("counts", "distances"))
    # Up to there all of the text fits; the plot has every distance.
    shown = [0, *(i for i, distance in enumerate(distances) if distance > 4096)]
    header = ["", "bytes kept"]
    header += [f"{n} notes, {distances[i]:,} later" for n in counts for i in shown]
    rows = [
        [name, thousands(row["state_bytes"])]
        + [percent(row["right"][str(n)][i]["mean"]) for n in counts for i in shown]
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
    """Both models of `experiments.books`."""
    models = load("books/window8")["models"]
    names = {"transformer": "Transformer++, window 8", "elastic": "Elastic Memory"}
    header = ["", "parameters", "state bytes", "tokens/s", "PPL", "PPL beyond window"]
    rows = [
        [
            names[name],
            number(row["parameters"], 0),
            number(row["state_bytes"], 0),
            number(row["tokens_per_second"], 0),
            number(row["perplexity"], 2),
            number(row["beyond_window"], 2),
            *(number(row["beyond_window_by_kind"][kind], 1) for kind in _KINDS),
        ]
        for name, row in models.items()
    ]
    return Table([*header, *_KINDS], rows, ["books/window8"])


def gain() -> Table:
    """What the memory saves beyond the window, by kind of document."""
    rows = []
    for window in (8, 64):
        found = load(f"books/window{window}")["gain"]
        kinds = ("all", *_KINDS)
        cells = [number(found[k]["nats"], 3) for k in kinds]
        rows.append([f"window {window}", *cells])
    header = ["nats a token saved beyond the window", "all", *_KINDS]
    return Table(header, rows, ["books/window8", "books/window64"])


def equal_state() -> Table:
    """The memory beside a window of as many bytes, on the whole test split."""
    found = load("books/equal_state")["rows"]
    kinds = ("all", *_KINDS)
    rows = [
        [
            name,
            number(row["state_bytes"], 0),
            *(number(row[k]["perplexity"], 2) for k in kinds),
        ]
        for name, row in found.items()
    ]
    return Table(["PPL", "state bytes", *kinds], rows, ["books/equal_state"])


def window64() -> Table:
    """Both models with windows of 64."""
    names = {"transformer": "Transformer++", "elastic": "Elastic Memory"}
    rows = [
        [names[name], number(row["perplexity"], 2), number(row["beyond_window"], 2)]
        for name, row in load("books/window64")["models"].items()
    ]
    return Table(["windows of 64", "PPL", "PPL beyond"], rows, ["books/window64"])


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
    "notes/right": notes,
    "notes/ahead": notes_ahead,
    "books/memory": memory,
    "books/gain": gain,
    "books/equal_state": equal_state,
    "books/window64": window64,
    "conversation/answers": answers,
    "conversation/turns": turns,
}
