"""The command `memjax generate`."""

import functools
import sys
from pathlib import Path
from typing import Annotated

import jax
import tyro

import memjax
from memjax.checks import check_seed, check_sizes
from memjax.cli.compilation_cache import enable_compilation_cache
from memjax.conversation.streaming import printer
from memjax.data.documents.readers import MAX_DOCUMENT
from memjax.data.documents.tokenizer import encode_prompt
from memjax.models import Sampling, generate
from memjax.models.language_model.config import Dtype


def generate_text(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
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
    """Reads a prompt of any length into the memory, and continues it.

    Args:
        model: folder of a run (its newest checkpoint) or of safetensors, a GGUF file,
            or a model of the hub ("owner/name").
        prompt: text to continue; this or `prompt_file`.
        prompt_file: a text file, of any length.
        tokens: maximum number to sample.
        sampling: temperature, top-k and top-p.
        seed: of the sampling.
        stop: texts that end the output, and are not printed.
        ignore_eos: continue after the model's end of text.
        dtype: of the activations of a model without a run; None is float32.
    """
    if (prompt_file is None) == (not prompt):
        raise ValueError("give either --prompt or --prompt-file, and not empty")
    if not all(stop):
        raise ValueError(f"stop must hold texts that are not empty, got {stop}")
    check_sizes(tokens=tokens)
    check_seed(seed)
    text = prompt if prompt_file is None else read_text(prompt_file)
    enable_compilation_cache()
    opened = memjax.load(model, dtype=dtype)
    tokenizer, ends = opened.tokenizer, opened.text.generation.eos_ids
    # The prompt is printed with the first token: refused input prints nothing.
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


def read_text(file: Path) -> str:
    """The text of a file, or of a pipe of bounded length.

    Raises:
        ValueError: if it is not UTF-8, or too long. OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        content = stream.read(MAX_DOCUMENT + 1)
    if len(content) > MAX_DOCUMENT:
        raise ValueError(f"{file} has more than {MAX_DOCUMENT:,} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error})") from error


def _write(before: list[str], text: str) -> None:
    """Prints the prompt before the first text, and the text."""
    while before:
        sys.stdout.write(before.pop())
    sys.stdout.write(text)
    sys.stdout.flush()
