"""Text from files reaches no terminal as it is."""

import dataclasses
import logging

import pytest

from memjax.checks import printable
from memjax.cli import main
from memjax.config_io import from_record, to_record
from memjax.conversation.record import Entry, Record
from memjax.status import Status, say, warnings_as_lines

NASTY = "\x1b]0;owned\x07\x9b2J\u2028x"


def test_control_characters_are_escaped() -> None:
    assert printable("日本語 e\u0301, \u200d") == "日本語 e\u0301, \u200d"
    assert printable("a\nb\t", keep="\n") == "a\nb\\t"
    assert printable(NASTY) == r"\x1b]0;owned\x07\x9b2J\u2028x"


def test_lines_errors_and_bars_are_printable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(NASTY)
    with Status(NASTY):
        pass
    with pytest.raises(SystemExit):
        main.main(["eval", NASTY])
    assert not {*"\x1b\x07\x9b\u2028"} & {*capsys.readouterr().err}


def test_a_warning_is_said_once_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with warnings_as_lines():
            for name in "aba":
                logging.getLogger("memjax.x").warning("%s is left out", name)
        lines = ["warning: a is left out", "warning: b is left out"]
        assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.parametrize("tokens", [-5, 2**70])
def test_a_count_of_a_record_is_in_range(tokens: int) -> None:
    entry = Entry("user", "a", 1)
    record = to_record(Record("m", "", (entry,)))
    record["entries"][0]["tokens"] = tokens
    with pytest.raises(ValueError, match=r"there.*tokens must be in \[0, 2\*\*53\)"):
        from_record(Record, record, "there")
    assert dataclasses.replace(entry, tokens=3).tokens == 3
