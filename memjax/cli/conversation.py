"""The commands `memjax tell`, `ask` and `chat`: a model with a lasting memory."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro

from memjax.cli.compilation_cache import enable_compilation_cache
from memjax.cli.generate import read_text
from memjax.conversation import Conversation
from memjax.models import Sampling
from memjax.models.language_model.config import Dtype

HELP = """/help  shows this help
/exit  ends the conversation; so does Ctrl-D
Ctrl-C ends an answer, and not the conversation"""
PROMPT = "> "
#: Characters of a message; a pipe may be endless.
LONGEST_LINE = 2**20
with contextlib.suppress(ImportError):
    # Gives `input` line editing and history; not on every system.
    import readline as _readline  # noqa: F401
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]


def tell(
    model: Model,
    files: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    memory: Path,
    dtype: Dtype | None = None,
) -> int:
    """Reads text files into a memory.

    Args:
        model: folder of a run (its newest checkpoint) or of safetensors, a GGUF file,
            or a model of the hub ("owner/name").
        files: texts, in this order; the memory is saved after each.
        memory: folder of the memory; created, or continued.
        dtype: of the activations of a model without a run; None is float32.
    """
    if not files:
        raise ValueError("files must be at least one text, got none")
    texts = [(file, read_text(file)) for file in files]
    enable_compilation_cache()
    with Conversation.open(model, memory, dtype=dtype) as talk:
        for file, text in texts:
            count = talk.inject(text, name=file.name, progress=_show_progress)
            print(f"{file}: {count:,} tokens; the memory has read {talk.tokens:,}")
    return 0


def ask(
    model: Model,
    question: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="QUESTION")],
    /,
    memory: Path,
    begin: str = "",
    tokens: int = 256,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    template: bool = True,
    dtype: Dtype | None = None,
) -> int:
    """Answers a question from a memory, without changing it.

    Args:
        model: the model of the memory, as in `memjax tell`.
        question: the question, in plain words.
        memory: folder of the memory.
        begin: first words of the answer: a base model, trained to complete text,
            answers better with them.
        tokens: maximum tokens of the answer.
        temperature: 0 takes the likeliest token; None is the makers' sampling, or else
            the likeliest.
        top_k: with a temperature, keep the k likeliest tokens; 0 keeps all.
        top_p: with a temperature, keep the likeliest tokens that reach p.
        seed: of the sampling.
        template: use the model's chat template, if it has one.
        dtype: of the activations of a model without a run; None is float32.
    """
    sampling = _sampling(temperature, top_k, top_p)
    enable_compilation_cache()
    with (
        Conversation.look(model, memory, dtype=dtype, template=template) as talk,
        _interrupts() as interrupted,
    ):
        talk.query(
            question,
            begin=begin,
            limit=tokens,
            sampling=sampling,
            seed=seed,
            write=_write,
            interrupted=interrupted,
        )
    print()
    return 0


def chat(
    model: Model,
    /,
    memory: Path,
    tokens: int = 256,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    template: bool = True,
    dtype: Dtype | None = None,
) -> int:
    """Chats with a model; the memory is saved after each turn, and continued later.

    Reads one message per line, from a pipe too. /help lists its commands.

    Args:
        model: folder of a run (its newest checkpoint) or of safetensors, a GGUF file,
            or a model of the hub ("owner/name").
        memory: folder of the memory; created, or continued.
        tokens: maximum tokens of an answer.
        temperature: 0 takes the likeliest token; None is the makers' sampling, or else
            the likeliest.
        top_k: with a temperature, keep the k likeliest tokens; 0 keeps all.
        top_p: with a temperature, keep the likeliest tokens that reach p.
        seed: of the sampling.
        template: use the model's chat template, if it has one.
        dtype: of the activations of a model without a run; None is float32.
    """
    sampling = _sampling(temperature, top_k, top_p)
    enable_compilation_cache()
    with Conversation.open(model, memory, dtype=dtype, template=template) as talk:
        _recall(talk)
        for message in _messages():
            with _interrupts() as interrupted:
                _answer(
                    talk,
                    message,
                    limit=tokens,
                    sampling=sampling,
                    seed=seed,
                    write=_write,
                    interrupted=interrupted,
                )
    return 0


def _show_progress(done: int, total: int) -> None:
    """Overwrites one line of a terminal."""
    if sys.stderr.isatty():
        end = "\r" if done < total else "\r\033[K"
        print(f"{done:,} of {total:,} tokens", end=end, file=sys.stderr, flush=True)


def _answer(talk, message, **options):
    """One turn; a refusal is one line, and the conversation continues."""
    try:
        answer = talk.chat(message, **options)
    except ValueError as error:
        print(f"memjax: {error}", file=sys.stderr)
    else:
        print("" if answer.ended else " ...", flush=True)


def _recall(talk: Conversation) -> None:
    """Prints the last turn of a conversation that continues."""
    if not talk.tokens:
        return
    count = f"{talk.tokens:,} tokens read, {talk.record.turns} answers so far"
    print(f"{talk.record.owner.name}: {count}")
    for entry in talk.entries[-2:]:
        if entry.role != "text":
            print(f"{PROMPT if entry.role == 'user' else ''}{entry.text}")


def _messages() -> Iterator[str]:
    """The lines of a terminal or a pipe, up to its end or /exit."""
    while (line := _line()) is not None:
        message = line.strip()
        if message == "/exit":
            return
        if message == "/help":
            print(HELP)
        elif message.startswith("/") and message.split()[0][1:].isalpha():
            print(f"{message.split()[0]} is not known; /help lists the commands")
        elif message:
            yield message


def _line() -> str | None:
    """The next line; None at the end."""
    try:
        if sys.stdin.isatty():
            return input(PROMPT)
        line = sys.stdin.readline(LONGEST_LINE + 1)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\nCtrl-D or /exit ends the conversation")
        return ""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"a message must have at most {LONGEST_LINE:,} characters")
    return line or None


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed; a second time it ends the program."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _sampling(temperature: float | None, top_k: int, top_p: float) -> Sampling | None:
    if temperature is not None:
        return Sampling(temperature, top_k, top_p)
    if (top_k, top_p) != (0, 1.0):
        raise ValueError(
            f"top_k and top_p need a temperature, got top_k={top_k}, top_p={top_p}"
        )
    return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
