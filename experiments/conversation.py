"""What does a conversation with a memory look like, and what does a turn cost?

    python -m experiments.mplus.retention --run-dir runs/retention --only M+
    python -m experiments.conversation --model runs/retention/mplus-42

The first of all that the first command runs trains this M+, in 40 minutes.

Runs `memjax tell`, `ask` and `chat` in a pseudo-terminal, each command a process of
its own, and draws what stood there (`results/conversation/session.svg`). A text about a
country that the model was not trained on is told, with facts of the factbook among its
sentences. The result beside the picture has the answers to questions about all of its
facts, from the memory and from an empty one. Of each turn of another conversation it
has the seconds, those of compiling, and the size of the memory's folder.
"""

import dataclasses
import json
import os
import pty
import re
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import tyro
from rich.console import Console
from rich.text import Text

from experiments.lab.backbones import smollm2
from experiments.lab.results import RESULTS, settings, write_report
from memjax.conversation import Conversation
from memjax.data import Question, load_facts
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.evaluation.provenance import provenance

QUESTION = "what does a conversation with a memory look like, and what does it cost?"
#: Columns of the terminal: few, so that the picture is readable at half its size.
COLUMNS = 72
TURNS = ("What is the capital of France?", "And of Italy?")
LATER = "And of Spain?"
TIMED = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two cities lies further north, and which of them has more people?",
    "Thank you.",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """What is shown.

    Attributes:
        model: folder of a run of M+, which is told a text; see above.
        chat_model: folder of another model to chat with; None is SmolLM2-135M-Instruct.
        country: that the text is about; one of those not trained on.
        shown: kinds of facts that the picture asks for.
        tokens: most tokens of an answer about the text.
        output: files of results, without their endings.
    """

    model: Path
    chat_model: Path | None = None
    country: str = "Ghana"
    shown: tuple[str, ...] = ("highest_point", "largest_city", "symbol")
    tokens: int = 24
    output: Path = RESULTS / "conversation" / "session"


def main(config: Config) -> None:
    """Shows, asks, times, and writes the results."""
    chat_model = config.chat_model or smollm2()
    text, facts = told_text(config.country)
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        (there / f"{config.country.lower()}.txt").write_text(text)
        # Short names, so that the picture shows commands as people type them.
        (there / "mplus").symlink_to(config.model.absolute())
        # A GGUF file is known by its ending.
        name = f"smollm2{chat_model.suffix}"
        (there / name).symlink_to(chat_model.absolute())
        lines = list(session(config, facts, there, name))
    report = dict(
        session=[line for _, line in lines],
        answers=answers(config, text, facts),
        turns=timed_turns(chat_model),
    )
    write_report(config.output, QUESTION, settings(config), report)
    draw(lines, Path(f"{config.output}.svg"))
    print(json.dumps(report, indent=1))


def told_text(country: str) -> tuple[str, list[Question]]:
    """A text about a country, and the facts that it states.

    Raises:
        ValueError: if there is none, or the model was trained on its facts.
    """
    held_out = split_facts(load_facts(), seed=FACTS_SEED)[1]
    facts = [fact for fact in held_out if fact.subject == country]
    if not facts:
        subjects = sorted({fact.subject for fact in held_out})
        raise ValueError(f"country must be one of {subjects}, got {country!r}")
    statement = lambda fact: f"{_beginning(fact)} {fact.answer}."
    prose = facts[0].context.replace(f" {statement(facts[0])}", "")
    sentences = re.split(r"(?<=[.!?])\s+", prose)
    # Evenly among the sentences.
    for i, fact in enumerate(facts):
        sentences.insert((i + 1) * len(sentences) // (len(facts) + 1), statement(fact))
    return " ".join(sentences), facts


def _beginning(fact: Question) -> str:
    return fact.question.rpartition("\nAnswer: ")[2]


def _question(fact: Question) -> str:
    return fact.question.partition("\n")[0].removeprefix("Question: ")


def session(
    config: Config, facts: list[Question], folder: Path, chat_model: str
) -> Iterator[tuple[str, str]]:
    """Lines of the terminal, each with its style."""
    about, told = f"{config.country.lower()}.txt", ["--memory", "memory"]
    yield from shown(["tell", "mplus", about, *told], folder)
    for fact in (fact for fact in facts if fact.kind in config.shown):
        asked = ["ask", "mplus", f'"{_question(fact)}"', *told, "--no-template"]
        yield from shown([*asked, "--begin", f'"{_beginning(fact)}"'], folder)
    chat = ["chat", chat_model, "--memory", "talk"]
    yield from shown(chat, folder, TURNS)
    yield "note", "# the next day"
    yield from shown(chat, folder, (LATER,))


def shown(
    words: list[str], folder: Path, typed: tuple[str, ...] = ()
) -> Iterator[tuple[str, str]]:
    """A command, and what it prints in a terminal while the lines are typed."""
    yield "command", f"$ memjax {' '.join(words)}"
    program = [sys.executable, "-m", "memjax.cli.entry"]
    argv = program + [word.strip('"') for word in words]
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "dumb"}
        os.execv(argv[0], argv)
    screen = ""
    for line in (*typed, "/exit") if typed else ():
        screen += _read(terminal, until="> ")
        os.write(terminal, f"{line}\n".encode())
    screen += _read(terminal, until=None)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for line in _plain_lines(screen):
        yield "typed" if line.startswith("> ") else "output", line
    if code:
        raise RuntimeError(f"{words} ended with exit code {code}: {screen}")


def _plain_lines(screen: str) -> list[str]:
    """The lines that stay on a terminal: what was written over is gone."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.replace("\r\n", "\n"))
    lines = text.rstrip().split("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines]


def _read(terminal: int, until: str | None, seconds: float = 600) -> str:
    """What a terminal shows, to its end or until it waits for a line."""
    found, deadline = b"", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 1)[0]:
            try:
                part = os.read(terminal, 4096)
            except OSError:
                part = b""
            if not part:
                break
            found += part
        text = found.decode(errors="replace")
        if until is not None and re.search(rf"(^|\n){until}$", text):
            break
    return found.decode(errors="replace")


def answers(config: Config, text: str, facts: list[Question]) -> dict[str, object]:
    """Answers to all questions, from a memory of the text and from an empty one.

    "begun" are those whose beginning is given, as in training, "plain" those without.
    """
    told = Conversation.open(config.model, template=False)
    empty = Conversation.open(config.model, template=False)
    tokens = told.inject(text, name=config.country)
    ways = {"begun": (told, True), "plain": (told, False), "empty": (empty, True)}
    rows = []
    for fact in facts:
        row = {"question": _question(fact), "answer": fact.answer}
        for name, (talk, begun) in ways.items():
            begin = _beginning(fact) if begun else ""
            said = talk.query(_question(fact), begin=begin, limit=config.tokens).text
            said = said.removeprefix(begin).strip()
            row |= {name: said, f"{name}_right": fact.answer.lower() in said.lower()}
        rows.append(row)
    right = {name: sum(bool(row[f"{name}_right"]) for row in rows) for name in ways}
    return {"tokens": tokens, "questions": len(rows), "right": right, "rows": rows}


def timed_turns(model: Path) -> list[dict[str, float]]:
    """What the turns of a conversation cost."""
    compiled: list[float] = []

    def note_compiling(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note_compiling)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Conversation.open(model, f"{folder}/memory") as talk,
    ):
        for message in TIMED:
            compiled.clear()
            start, parts = time.perf_counter(), []
            note = lambda _, s=start, p=parts: p.append(time.perf_counter() - s)
            answer = talk.chat(message, limit=32, write=note)
            assert talk.memory is not None
            saved = talk.memory.newest()
            assert saved is not None
            row = {"seconds": time.perf_counter() - start, "first_token": parts[0]}
            row |= {"compiling": sum(compiled), "tokens": answer.tokens}
            row |= {"tokens_held": talk.tokens}
            row |= {"bytes": sum(file.stat().st_size for file in saved.iterdir())}
            rows.append(row)
    jax.monitoring.unregister_event_duration_listener(note_compiling)
    return rows


def draw(lines: list[tuple[str, str]], file: Path) -> None:
    """Writes what stood in the terminal as a picture, and where it comes from."""
    styles = {"command": "bold cyan", "typed": "bold", "note": "dim", "output": ""}
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        for style, line in lines:
            console.print(Text(line, styles[style]))
        made = provenance(QUESTION, {})
        where = f"{made['device']}, {made['date']}, {made['commit']}"
        console.print(Text(where, "dim", justify="right"))
    console.save_svg(str(file), title="memjax")


if __name__ == "__main__":
    main(tyro.cli(Config))
