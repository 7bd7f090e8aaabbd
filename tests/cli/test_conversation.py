"""The commands tell, ask and chat, with a model of a thousand parameters."""

import io
import os
import signal

import pytest

from memjax.cli import conversation as cli
from memjax.conversation import MemoryFolder
from memjax.models.checkpoints.memory_state import read_note
from memjax.models.checkpoints.text_interface import TextInterface
from tests import tiny
from tests.cli.commands import command, refused


def saved(folder) -> str:
    """The newest save and its record."""
    memory = MemoryFolder(folder)
    return f"{memory.newest()} {memory.load(read_note)}"


@pytest.mark.slow
def test_tell_ask_and_chat(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.llama().save(tmp_path / "model", TextInterface(tiny.tokenizer()))
    (tmp_path / "book.txt").write_text("a short book")
    options = ["--memory", "memory", "--dtype", "float32"]
    assert command("tell", "model", "book.txt", *options) == (
        0,
        "book.txt: 10 tokens; the memory has read 10\n",
        [],
    )
    before = saved(tmp_path / "memory")
    assert command("ask", "model", "who", *options, "--tokens", "2")[1].strip()
    assert saved(tmp_path / "memory") == before

    typed = "/help\n\nwho\n/what\n" + "x" * 60 + "\n/exit\nnot read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    _, out, err = command("chat", "model", *options, "--tokens", "2")
    assert "Ctrl-C ends an answer" in out and "/what is not known" in out
    # What does not fit is one line, and the conversation goes on.
    assert "full attention has room for" in err[0] and len(err) == 1
    assert saved(tmp_path / "memory") != before

    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    out = command("chat", "model", *options)[1]
    assert "1 answers so far\n> who\n" in out

    other = tiny.drawn(tiny.llama)
    other.save(tmp_path / "other", TextInterface(tiny.tokenizer()))
    err = refused("ask", "other", "who", *options)
    assert "is the memory of 'model', and not of 'other'" in err


@pytest.mark.parametrize(
    "argv,message",
    [
        (["ask", "m", "Who?", "--memory", "none"], "memory='none' holds no memory"),
        (["ask", "m", "Who?", "--memory", "x", "--top-k", "2"], "need a temperature"),
        (["ask", "m", "Who?", "--memory", "/dev/zero"], "got the file /dev/zero"),
        (["chat", "m", "--memory", "/dev/zero"], "got the file /dev/zero"),
        # A model that is not there leaves no folder behind.
        (["chat", "m", "--memory", "x"], "m is neither a folder nor"),
        (["tell", "m", "/dev/zero", "--memory", "x"], "more than 134,217,728 bytes"),
        (["tell", "m", "--memory", "x"], "files"),
    ],
)
def test_bad_input_is_one_line(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused(*argv)
    assert not list(tmp_path.iterdir())


def test_first_interrupt_ends_the_answer_and_second_the_program():
    with cli._interrupts() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_endless_line_is_refused(monkeypatch):
    monkeypatch.setattr(cli, "LONGEST_LINE", 9)
    monkeypatch.setattr("sys.stdin", io.StringIO("123456789\n1234567890"))
    with pytest.raises(ValueError, match="at most 9 characters"):
        list(cli._messages())
