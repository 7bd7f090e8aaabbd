"""The loop of `memjax chat`: messages, and the commands that begin with a slash."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memjax.buckets.bucket import as_path
from memjax.checks import printable
from memjax.cli.texts.opening import described
from memjax.cli.texts.rows import read_text, require_said
from memjax.conversation import Conversation
from memjax.leaving import Interruption
from memjax.status import Status, say, say_all

HELP = """/tell FILE    reads a text file into the memory; /tell --again FILE once more
/system TEXT  sets the system message, before the first question
/again        answers the last message anew, with the next seed
/undo         takes back the last turn, text or /forget
/forget       empties the memory
/quit         ends the conversation; so does Ctrl-D
Ctrl-C ends an answer; before its first word, the conversation"""
PROMPT = "> "
#: Characters of a message; a pipe may be endless.
LONGEST_LINE = 2**20
#: Answers that full attention has room for when it is first said to be nearly full.
FEW = 4
#: Tokens of room from which it is no limit, as without RoPE.
ENDLESS = 2**29
with contextlib.suppress(ImportError):
    # Gives `input` line editing and history; not on every system.
    import readline as _readline  # noqa: F401


class ChatLoop:
    """A conversation in a terminal, or from a pipe.

    Args:
        talk: the conversation.
        options: of `Conversation.chat`.
    """

    def __init__(self, talk: Conversation, options: dict[str, Any]):
        self._talk, self._options = talk, options
        self._last: str | None = None
        self._begun = False

    def run(self) -> None:
        """Answers each message, up to the end or /quit."""
        open_block(self._talk)
        say("commands  /tell FILE  /system TEXT  /again  /undo  /forget  /help  /quit")
        show_last_turn(self._talk)
        while (line := read_line()) is not None:
            message = line.strip()
            if message == "/quit":
                return
            # A refusal is one line, and the conversation goes on.
            try:
                if message.startswith("/") and message.split()[0][1:].isalpha():
                    self._command(*message.partition(" ")[::2])
                elif message:
                    self._answer(message)
            except (ValueError, OSError) as error:
                say(f"memjax: {error}")

    def _command(self, name: str, rest: str) -> None:
        commands = {
            "/help": lambda: print(HELP),
            "/tell": lambda: self._tell(rest.strip()),
            "/system": lambda: self._system(rest.strip()),
            "/again": self._again,
            "/undo": self._undo,
            "/forget": self._forget,
        }
        if name not in commands:
            print(f"{name} is not known; /help lists the commands")
        else:
            commands[name]()

    def _answer(self, message: str, seed: int = 0) -> None:
        options = self._options | {"seed": self._options["seed"] + seed}
        # Programs are compiled for the first answer.
        what = "reading" if self._begun else "compiling, and reading"
        quiet = self._begun and not sys.stderr.isatty()
        before = self._talk.lost
        with interrupts() as stop, Status(what, "tokens", quiet=quiet) as status:
            answer = self._talk.chat(
                message,
                write=writer(status),
                interrupted=stop,
                progress=status,
                **options,
            )
        self._begun, self._last, self._seed = True, message, seed
        print("" if answer.ended else " ...", flush=True)
        require_said(answer.text)
        notice(self._talk, before, self._options["limit"])

    def _again(self) -> None:
        if self._last is None:
            raise ValueError("/again needs a message that was answered")
        message, seed = self._last, self._seed + 1
        self._talk.undo()
        self._answer(message, seed)

    def _undo(self) -> None:
        self._talk.undo()
        self._last = None
        print(f"undone; the memory has read {self._talk.tokens:,} tokens")

    def _forget(self) -> None:
        self._talk.forget()
        self._last = None
        print("the memory is empty; /undo brings it back")

    def _system(self, text: str) -> None:
        self._talk.set_system(text)
        print("the system message is set" if text else "no system message of yours")

    def _tell(self, rest: str) -> None:
        again = rest.startswith("--again ")
        file = Path(rest.removeprefix("--again ").strip()).expanduser()
        if not rest:
            raise ValueError("/tell needs a file")
        text = read_text(file)
        require_new(self._talk, file, text, again, "/tell --again FILE")
        tell_one(self._talk, file, text)
        self._last = None


def tell_one(talk: Conversation, file: Path, text: str) -> None:
    """Reads a text into the memory, with a bar."""
    before = talk.lost
    with Status(f"reading {file.name}", "tokens") as status:
        count = talk.inject(text, name=file.name, progress=status)
    # A Path has lost a slash of a URL.
    name = printable(str(as_path(file)))
    print(f"{name}: {count:,} tokens; the memory has read {talk.tokens:,}", flush=True)
    notice(talk, before)


def require_new(
    talk: Conversation, file: Path, text: str, again: bool, how: str
) -> None:
    """Raises ValueError if the memory has read this text, unless `again`."""
    if not again and (name := talk.record.name_of(text)) is not None:
        raise ValueError(
            f"the memory has read this text before, as {name}, got {file}; {how} "
            "reads it once more"
        )


def notice(talk: Conversation, before: int, limit: int = 0) -> None:
    """Says what has left the memory, or that it is nearly full.

    Args:
        talk: the conversation.
        before: tokens that had left it before.
        limit: tokens of an answer.
    """
    room, end, gone = talk.room, 0, []
    for entry in talk.entries:
        start, end = end, end + entry.tokens
        if before <= start < talk.lost:
            left = "all" if end <= talk.lost else f"{talk.lost - start:,} tokens"
            what = entry.text if entry.role == "text" else "an earlier turn"
            gone.append(f"{what} ({left} of {entry.tokens:,})")
    if gone:
        reach = f"the memory reaches back {talk.model.reach:,} tokens"
        say(f"notice: {reach}; these have left it: {', '.join(dict.fromkeys(gone))}", 8)
    if room is not None and room < FEW * limit:
        say(f"notice: the memory has room for {room:,} more tokens", 8)


def open_block(talk: Conversation) -> None:
    """Model, memory, and the room that is left, on stderr."""
    turns, path = talk.record.turns, talk.memory and talk.memory.path
    held = f"{talk.tokens:,} tokens read, {turns} answer{'s' * (turns != 1)}"
    if talk.room is not None and talk.room > ENDLESS:
        room = "texts of any length; the cache of attention grows with them"
    elif talk.room is not None:
        room = f"{talk.room:,} more tokens"
    elif talk.model.reach is not None:
        room = f"texts of any length; it reaches back {talk.model.reach:,} tokens"
    else:
        room = "texts of any length"
    say_all(
        [
            ("model", described(talk.record.model, talk.model)),
            ("memory", f"{path}: {held}" if path else held),
            ("room", room),
        ]
    )


def show_last_turn(talk: Conversation) -> None:
    """Prints the last turn of a conversation that continues."""
    for entry in talk.entries[-2:]:
        if entry.role != "text":
            text = printable(entry.text, keep="\n\t")
            print(f"{PROMPT if entry.role == 'user' else ''}{text}")


def read_line() -> str | None:
    """The next line of a terminal or a pipe; None at its end."""
    try:
        if sys.stdin.isatty():
            return input(PROMPT)
        line = sys.stdin.readline(LONGEST_LINE + 1)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\nCtrl-D or /quit ends the conversation")
        return ""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"a message must have at most {LONGEST_LINE:,} characters")
    return line or None


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """A flag for Ctrl-C; see `Interruption`."""
    handler = Interruption()
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield handler.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def writer(status: Status) -> Callable[[str], None]:
    """Prints parts of an answer; the first takes the place of the status."""

    def write(text: str) -> None:
        status.stop()
        sys.stdout.write(text)
        sys.stdout.flush()

    return write
