"""Prompts from the line, a file or standard input, and answers as text or JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from memjax.buckets.bucket import as_path
from memjax.data.documents.json_lines import read_records
from memjax.data.documents.readers import MAX_DOCUMENT
from memjax.status import say

#: The name of standard input.
STDIN = "-"
#: Printed between answers without --json.
BETWEEN = "\n---\n"


class Row(NamedTuple):
    """An answer, as a line of JSON has it.

    Attributes:
        prompt: as given.
        text: of the answer.
        tokens: their ids.
        finish_reason: "stop" where the model, a stop text or Ctrl-C ended it, or
            "length" at the limit.
        log_probs: of each token, by the model's own distribution.
    """

    prompt: str
    text: str
    tokens: Sequence[int]
    finish_reason: str
    log_probs: Sequence[float]

    def show(self, logprobs: bool) -> None:
        """Prints the line of JSON."""
        record = self._asdict()
        scores = record.pop("log_probs")
        if logprobs:
            record["logprobs"] = [round(score, 6) for score in scores]
        print(json.dumps(record, ensure_ascii=False), flush=True)


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: lines of .txt, or field "prompt" of each row of .jsonl.

    Raises:
        ValueError: on another kind of file, one without prompts, or a row without one.
    """
    if file.suffix == ".jsonl":
        return [row.text("prompt") for row in read_records(file, "prompts")]
    if file.suffix != ".txt":
        raise ValueError(f"prompts must be a .txt or .jsonl file, got {file}")
    prompts = [line for line in read_text(file).splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{file} holds no prompts")
    return prompts


def read_text(file: Path) -> str:
    """The text of a file, of a pipe of bounded length, or of standard input, "-".

    Raises:
        ValueError: if it is not UTF-8, or too long. OSError: it cannot be read.
    """
    if str(file) == STDIN:
        # Tests replace the stream, which has then no bytes.
        text = sys.stdin.read(MAX_DOCUMENT + 1)
        content = text.encode("utf-8", "surrogateescape")
    else:
        with as_path(file).open("rb") as stream:
            content = stream.read(MAX_DOCUMENT + 1)
    if len(content) > MAX_DOCUMENT:
        raise ValueError(f"{file} has more than {MAX_DOCUMENT:,} bytes")
    try:
        # Without a byte order mark.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error})") from error


def check_output(
    *, n: int, json: bool, logprobs: bool, temperature: float | None
) -> None:
    """Raises ValueError on options that have no part in this output."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if n > 1 and temperature == 0:
        raise ValueError(
            f"n={n} needs a temperature above 0: the likeliest tokens are the same"
        )
    if logprobs and not json:
        raise ValueError("logprobs needs --json, where they are printed")


def require_said(text: str) -> None:
    """A line on stderr where an answer is empty."""
    if not text.strip():
        say("the model said nothing")
