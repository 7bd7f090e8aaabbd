"""Tables of notes, books and conversation."""

from experiments.tables.table import (
    Table,
    Tables,
    load,
    number,
)

_NAME = "conversation/session"
_WAYS = {
    "begun": "answer begun for it",
    "plain": "asked plainly",
    "empty": "begun, empty memory",
}


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
    "conversation/answers": answers,
    "conversation/turns": turns,
}
