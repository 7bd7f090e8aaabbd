"""Tables of `experiments.books`."""

from experiments.tables.table import Table, Tables, load, number

_KINDS = ("code", "manuals", "proofs", "prose")


def memory() -> Table:
    """Both models of the main job."""
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


TABLES: Tables = {
    "books/memory": memory,
    "books/gain": gain,
    "books/equal_state": equal_state,
    "books/window64": window64,
}
