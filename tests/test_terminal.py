"""Text from files reaches no terminal as it is."""

import dataclasses

import pytest

from memjax.checks import printable
from memjax.cli import main
from memjax.config_io import from_record, to_record
from memjax.conversation.record import Entry, Record
from memjax.status import Status, say

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


@pytest.mark.parametrize("tokens", [-5, 2**70])
def test_a_count_of_a_record_is_in_range(tokens: int) -> None:
    entry = Entry("user", "a", 1)
    record = to_record(Record("m", "", (entry,)))
    record["entries"][0]["tokens"] = tokens
    with pytest.raises(ValueError, match=r"there.*tokens must be in \[0, 2\*\*53\)"):
        from_record(Record, record, "there")
    assert dataclasses.replace(entry, tokens=3).tokens == 3
