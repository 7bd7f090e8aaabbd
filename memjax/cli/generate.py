"""`memjax generate`: a text that goes on, printed as it is drawn."""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from memjax.checks import check_sizes
from memjax.data.documents.folder import MAX_DOCUMENT
from memjax.data.documents.tokenizer import encode_prompt
from memjax.models import Sampling, generate
from memjax.models.language_model.config import Dtype
from memjax.training.finetune.any_model import open_model

# What a tokenizer decodes bytes to that are no whole character yet.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def generate_text(
    model: Annotated[str, tyro.conf.Positional],
    prompt: str = "",
    prompt_file: Path | None = None,
    tokens: int = 200,
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = Sampling(  # noqa: B008
        0.8, 0, 0.95
    ),
    seed: int = 0,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    dtype: Dtype | None = None,
) -> int:
    """Reads a prompt of any length into the memory and writes on.

    Args:
        model: a run's folder (its newest checkpoint), a folder of safetensors, a GGUF
            file, or a model of the hub ("owner/name").
        prompt: text to continue; this or `prompt_file`.
        prompt_file: a text file, of any length.
        tokens: how many to draw at most.
        sampling: how.
        seed: of the draws.
        stop: texts that end the output, and are not printed.
        ignore_eos: write on where the model ends its text.
        dtype: of the activations of a model without a run; None is float32.
    """
    if (prompt_file is None) == (not prompt):
        raise ValueError("give either --prompt or --prompt-file, and not empty")
    if not all(stop):
        raise ValueError(f"stop must hold texts that are not empty, got {stop}")
    check_sizes(tokens=tokens)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
    text = prompt if prompt_file is None else _read_text(prompt_file)
    opened = open_model(model, dtype=dtype)
    tokenizer, ends = opened.tokenizer, opened.text.generation.eos_ids
    # With the first token, so that what is refused prints nothing.
    write = functools.partial(_write, [prompt])
    generate(
        opened.model,
        None,
        encode_prompt(tokenizer, text)[None],
        tokens,
        key=jax.random.key(seed),
        sampling=sampling,
        stop_tokens=() if ignore_eos else ends,
        stop_when=printer(tokenizer.decode, stop, tokens, ends, write),
    )
    print()
    return 0


def _read_text(file: Path) -> str:
    """A prompt; from a pipe too, but not from one without an end."""
    with file.open("rb") as stream:
        content = stream.read(MAX_DOCUMENT + 1)
    if len(content) > MAX_DOCUMENT:
        raise ValueError(f"{file} has more than {MAX_DOCUMENT:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error})") from error


def _write(before: list[str], text: str) -> None:
    """Prints what stands before the text, once, and the text."""
    while before:
        sys.stdout.write(before.pop())
    sys.stdout.write(text)
    sys.stdout.flush()


def printer(
    decode: Callable[[np.ndarray], str],
    stop: Sequence[str],
    limit: int,
    ends: Sequence[int],
    write: Callable[[str], object],
) -> Callable[[np.ndarray], bool]:
    """`stop_when` of `generate` that writes what is new, up to a stop text.

    Args:
        decode: of the tokenizer.
        stop: texts that end the output.
        limit: tokens of the whole output: behind the last, nothing is kept back.
        ends: tokens that end a text, which have no text of their own.
        write: called with each new part.
    """
    shown = 0
    # What may be the beginning of a stop text waits for what follows.
    behind = max(map(len, stop), default=1) - 1

    def stop_when(tokens: np.ndarray) -> bool:
        nonlocal shown
        row = tokens[0]
        text = decode(row[:-1] if row[-1] in ends else row)
        found = [text.index(part) for part in stop if part in text]
        over = bool(found) or len(row) == limit or row[-1] in ends
        last = min(found) if found else len(text) if over else len(text) - behind
        if not over and text.endswith(UNFINISHED):
            last = min(last, len(text.rstrip(UNFINISHED)))
        if last > shown:
            write(text[shown:last])
            shown = last
        return bool(found)

    return stop_when
