"""The commands tell, ask and chat, with a model of a thousand parameters."""

import dataclasses
import io
import json
import os
import signal

import jax
import pytest

from memjax.cli.texts import chat_loop
from memjax.cli.texts.drawing import Drawing
from memjax.conversation import Answer, Conversation, MemoryFolder
from memjax.conversation.answer import CHAT
from memjax.mechanisms import SlidingWindowConfig
from memjax.models import LanguageModel, Sampling
from memjax.models.checkpoints.hf.generation_config import GenerationConfig
from memjax.models.checkpoints.memory_state import read_note
from memjax.models.checkpoints.text_interface import TextInterface
from tests import tiny
from tests.cli.commands import command, refused, run
from tests.models.published import config


def saved(folder) -> str:
    """The newest save and its record."""
    memory = MemoryFolder(folder)
    return f"{memory.newest()} {memory.load(read_note)}"


@pytest.mark.slow
def test_a_published_hybrid_is_told_more_than_it_was_trained_on(tmp_path, monkeypatch):
    """Granite 4 H has no RoPE: 64 positions of its file are no limit."""
    monkeypatch.chdir(tmp_path)
    sizes = config("granitemoehybrid")
    granite = tiny.drawn(lambda: LanguageModel(sizes, key=jax.random.key(0)))
    granite.save(tmp_path / "model", TextInterface(tiny.tokenizer()))
    (tmp_path / "book.txt").write_text("nobodysawtheriver" * 5)
    code, out, err = run("tell", "model", "book.txt", "--memory", "memory")
    assert (code, "85 tokens" in out) == (0, True), err
    assert any("of any length; the cache of attention grows" in line for line in err)
    out = command("memory", "show", "memory")[1]
    assert " memory, " in out and " attention cache, " in out and "convolution" in out


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

    # The byte order mark is no character, and a control token plain text.
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfa <end>")
    for name, flag, count in (("own", [], 2), ("escaped", ["--escape"], 4)):
        there = ["--memory", name, *flag]
        out = command("tell", "model", "book.txt", *there)[1]
        assert out.startswith(f"book.txt: {count} tokens")
    (tmp_path / "book.txt").write_text("a short book")
    assert "has read this text before" in refused("tell", "model", "book.txt", *options)
    rows = command("ask", "model", "who", *options, "--tokens", "2", "--json")[1]
    assert {*json.loads(rows)} == {"prompt", "text", "tokens", "finish_reason"}

    typed = "/help\n\nwho\n/what\n" + "x" * 60 + "\n/again\n/quit\nnot read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    _, out, err = run("chat", "model", *options, "--tokens", "2")
    assert any(line.startswith("room    ") for line in err)
    err = [line for line in err if line.startswith("memjax: ")]
    assert "Ctrl-C ends an answer" in out and "/what is not known" in out
    # What does not fit is one line, and the conversation goes on.
    assert "full attention has room for" in err[0] and len(err) == 1
    assert saved(tmp_path / "memory") != before

    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    _, out, err = run("chat", "model", *options)
    assert out.startswith("> who\n") and any("1 answer" in line for line in err)

    other = tiny.drawn(tiny.make_llama, seed=1)
    other.save(tmp_path / "other", TextInterface(tiny.tokenizer()))
    err = refused("ask", "other", "who", *options)
    assert "is the memory of 'model', and not of 'other'" in err


@pytest.mark.parametrize(
    "argv,message",
    [
        (["ask", "m", "Who?", "--memory", "none"], "memory='none' holds no memory"),
        (["ask", "m", "Who?", "--memory", "x", "--top-k", "-2"], "top_k must"),
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
    with chat_loop.interrupts() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_endless_line_is_refused(monkeypatch):
    monkeypatch.setattr(chat_loop, "LONGEST_LINE", 9)
    monkeypatch.setattr("sys.stdin", io.StringIO("123456789\n1234567890"))
    with pytest.raises(ValueError, match="at most 9 characters"):
        list(iter(chat_loop.read_line, None))


@pytest.fixture(name="talk")
def _talk():
    return Conversation(tiny.llama(), TextInterface(tiny.tokenizer()))


def chat(talk, monkeypatch, capsys, *lines, **options) -> tuple[str, list[str]]:
    """What a chat prints, and the lines of its stderr."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{x}\n" for x in lines)))
    given = {"limit": 2, "sampling": Sampling(1.0), "seed": 0} | options
    chat_loop.ChatLoop(talk, given).run()
    out, err = capsys.readouterr()
    return out, err.splitlines()


def test_chat_tells_undoes_and_forgets(talk, monkeypatch, capsys, tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("a short book")
    tell = f"/tell {file}"
    out, err = chat(talk, monkeypatch, capsys, tell, tell, "/undo", "/undo", "/again")
    assert out.splitlines() == [
        f"{file}: 10 tokens; the memory has read 10",
        "undone; the memory has read 0 tokens",
    ]
    faults = [line for line in err if line.startswith("memjax: ")]
    assert "before, as book.txt" in faults[0] and "takes back only" in faults[1]
    assert "/again needs a message" in faults[2] and len(faults) == 3
    chat(talk, monkeypatch, capsys, tell, f"/tell --again {file}", "/forget", "/undo")
    assert talk.tokens == 20


def test_again_replaces_the_last_turn(talk, monkeypatch, capsys):
    out, err = chat(talk, monkeypatch, capsys, "who", "/again")
    assert talk.record.turns == 1 and len(out.splitlines()) == 2
    # The model of 64 tokens has room for less than four answers of 20.
    out, err = chat(talk, monkeypatch, capsys, "who", limit=20)
    assert any(line.startswith("notice: the memory has room for") for line in err)


def test_notice_names_what_has_left_the_window(monkeypatch, capsys, tmp_path):
    window = SlidingWindowConfig(16, 4, 2, 4, window=8)
    model = tiny.llama(mechanisms=(window,))
    talk = Conversation(model, TextInterface(tiny.tokenizer()))
    (tmp_path / "book.txt").write_text("a short book")
    tell = f"/tell {tmp_path / 'book.txt'}"
    _, err = chat(talk, monkeypatch, capsys, tell)
    assert err[-1] == (
        "notice: the memory reaches back 8 tokens; these have left it: "
        "book.txt (2 tokens of 10)"
    )


def test_silence_is_said(talk, monkeypatch, capsys):
    monkeypatch.setattr(
        Conversation, "chat", lambda *_, **__: Answer("", 1, True, (0,), (0.0,))
    )
    _, err = chat(talk, monkeypatch, capsys, "who")
    assert err[-1] == "the model said nothing"


def test_options_of_drawing_go_before_the_makers():
    names = [field.name for field in dataclasses.fields(Sampling)]
    assert [field.name for field in dataclasses.fields(Drawing)] == names
    makers = GenerationConfig(record={"do_sample": True, "min_p": 0.1, "top_k": 9})
    assert Drawing().sampling(makers) == Sampling(1.0, 9, min_p=0.1)
    less = Drawing(repetition_penalty=1.2).sampling(makers)
    assert less == Sampling(1.0, 9, min_p=0.1, repetition_penalty=1.2)
    assert Drawing(temperature=0.5).sampling(makers) == Sampling(0.5)
    assert Drawing().sampling(GenerationConfig()) == CHAT
    wrong = GenerationConfig(record={"do_sample": True, "top_k": -1})
    with pytest.raises(ValueError, match="top_k must be >= 0, got -1; say how"):
        Drawing().sampling(wrong)
    assert Drawing(temperature=0.5).sampling(wrong) == Sampling(0.5)
