"""`memjax tell`, `ask` and `chat`: a model with a memory that lasts."""

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

HELP = """/help  these lines
/exit  ends the conversation; so does Ctrl-D
Ctrl-C ends an answer, and keeps the conversation"""
PROMPT = "> "
#: Characters of a message; a pipe may have no line breaks, and no end.
LONGEST_LINE = 2**20
with contextlib.suppress(ImportError):
    # With it `input` edits lines and knows those before; it is not on every system.
    import readline as _readline  # noqa: F401
Model = Annotated[str, tyro.conf.Positional]


def tell(
    model: Model,
    files: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    memory: Path,
    dtype: Dtype | None = None,
) -> int:
    """Reads text files into a memory.

    Args:
        model: a run's folder (its newest checkpoint), a folder of safetensors, a GGUF
            file, or a model of the hub ("owner/name").
        files: texts, in this order; each is saved when it is read.
        memory: folder of the memory, which goes on if there is one.
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
    question: Annotated[str, tyro.conf.Positional],
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
    """Answers a question from a memory, which stays as it is.

    Args:
        model: as in `memjax tell`: the one whose memory it is.
        question: to be answered.
        memory: folder of the memory.
        begin: words that the answer begins with; a model that has learned to complete
            sentences answers better.
        tokens: most tokens of the answer.
        temperature: 0 is the likeliest token; None draws as the model's makers do,
            and where they do not say takes the likeliest.
        top_k: with a temperature, keep the k likeliest tokens; 0 keeps all.
        top_p: with a temperature, keep the likeliest tokens that reach p.
        seed: of the draws.
        template: ask by the model's chat template, where it has one.
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
    """Talks with a model; each turn is saved, and the next call goes on from there.

    Reads a message a line, from a pipe too. /help lists what else it understands.

    Args:
        model: a run's folder (its newest checkpoint), a folder of safetensors, a GGUF
            file, or a model of the hub ("owner/name").
        memory: folder of the memory, which goes on if there is one.
        tokens: most tokens of an answer.
        temperature: 0 is the likeliest token; None draws as the model's makers do,
            and where they do not say takes the likeliest.
        top_k: with a temperature, keep the k likeliest tokens; 0 keeps all.
        top_p: with a temperature, keep the likeliest tokens that reach p.
        seed: of the draws.
        template: talk by the model's chat template, where it has one.
        dtype: of the activations of a model without a run; None is float32.
    """
    sampling = _sampling(temperature, top_k, top_p)
    enable_compilation_cache()
    with Conversation.open(model, memory, dtype=dtype, template=template) as talk:
        _recall(talk)
        for message in _messages():
            with _interrupts() as interrupted:
                options = dict(limit=tokens, sampling=sampling, seed=seed)
                _answer(talk, message, write=_write, interrupted=interrupted, **options)
    return 0


def _show_progress(done: int, total: int) -> None:
    """One line of a terminal, which the next one writes over."""
    if sys.stderr.isatty():
        end = "\r" if done < total else "\r\033[K"
        print(f"{done:,} of {total:,} tokens", end=end, file=sys.stderr, flush=True)


def _answer(talk, message, **options):
    """A turn; what is refused is said in one line, and the conversation goes on."""
    try:
        answer = talk.chat(message, **options)
    except ValueError as error:
        print(f"memjax: {error}", file=sys.stderr)
    else:
        print("" if answer.ended else " ...", flush=True)


def _recall(talk: Conversation) -> None:
    """Prints where a conversation goes on."""
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
            print(f"{message.split()[0]} is not known; /help lists what is")
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
