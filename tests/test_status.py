"""The status line without a terminal, and on one."""

import time

import pytest

from memjax import status
from memjax.status import Status, say


@pytest.fixture(name="terminal")
def _terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")


def test_phase_is_one_line_and_progress_has_amount_and_time_left(capsys, monkeypatch):
    with Status("scoring", "tokens") as progress:
        progress(1000, 4000)
    assert capsys.readouterr() == ("", "scoring ...\n")
    monkeypatch.setattr(status, "PAUSE", 0.0)
    with Status("scoring", "tokens") as progress:
        progress(1000, 4000, "loss 1.5", left=75.0)
        progress(4000, 4000)
    assert capsys.readouterr().err.splitlines() == [
        "scoring ...",
        "scoring 1,000/4,000 tokens  loss 1.5  ETA 0:01:15",
        "scoring 4,000/4,000 tokens",
    ]


def test_line_of_a_terminal_is_removed_before_text(terminal, capsys):
    with Status("loading") as progress:
        time.sleep(0.3)
        progress.stop()
        print("text")
    out, err = capsys.readouterr()
    # A bar that left stdout to itself, and the cursor that is shown again.
    assert out == "text\n" and "loading" in err and err.rstrip().endswith("\x1b[2K")


def test_one_bar_is_shown_at_a_time(terminal, capsys):
    with Status("outer"), Status("inner"):
        pass
    assert not status._shown
    err = capsys.readouterr().err
    assert "outer" in err and "inner" in err


def test_lines_break_between_words(terminal, capsys):
    say("validation  4 documents of-many-words, 310,453 tokens", 12)
    assert capsys.readouterr().err.splitlines() == [
        "validation  4 documents of-many-words,",
        "            310,453 tokens",
    ]
