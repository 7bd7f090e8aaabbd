"""The commands tell, ask and chat, with a model of a thousand parameters."""

import io
import os
import signal

import pytest

from memjax.cli import conversation as cli
from memjax.cli.main import main
from memjax.conversation import MemoryFolder
from memjax.models.checkpoints.memory_state import read_note
from memjax.models.checkpoints.text_interface import TextInterface
from tests import tiny


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def saved(folder) -> str:
    """Where the newest memory lies, and what it says."""
    memory = MemoryFolder(folder)
    return f"{memory.newest()} {memory.load(read_note)}"


@pytest.mark.slow
def test_tell_ask_and_chat(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.llama().save(tmp_path / "model", TextInterface(tiny.tokenizer()))
    (tmp_path / "book.txt").write_text("a short book")
    options = ["--memory", "memory", "--dtype", "float32"]
    assert run("tell", "model", "book.txt", *options) == 0
    assert capsys.readouterr().out == "book.txt: 10 tokens; the memory has read 10\n"
    before = saved(tmp_path / "memory")
    assert run("ask", "model", "who", *options, "--tokens", "2") == 0
    assert capsys.readouterr().out.strip() and saved(tmp_path / "memory") == before

    typed = "/help\n\nwho\n/what\n" + "x" * 60 + "\n/exit\nnot read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert run("chat", "model", *options, "--tokens", "2") == 0
    out, err = capsys.readouterr()
    assert "Ctrl-C ends an answer" in out and "/what is not known" in out
    # What does not fit is one line, and the conversation goes on.
    assert "full attention has room for" in err and len(err.splitlines()) == 1
    assert saved(tmp_path / "memory") != before

    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run("chat", "model", *options) == 0
    assert "1 answers so far\n> who\n" in capsys.readouterr().out

    other = tiny.drawn(tiny.llama)
    other.save(tmp_path / "other", TextInterface(tiny.tokenizer()))
    assert run("ask", "other", "who", *options) == 2
    err = capsys.readouterr().err
    assert "is the memory of 'model', and not of 'other'" in err
    assert len(err.splitlines()) == 1


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
def test_bad_input_is_one_line(argv, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*argv) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1
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
