"""Progress lines without a terminal."""

from memjax.cli.progress import Progress


def test_progress_line_has_amount_and_rate(capsys):
    with Progress("scoring", "tokens", pause=0.0) as progress:
        progress(1000, 4000)
        progress(4000, 4000)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 2
    assert lines[0].startswith("scoring: 1,000 of 4,000 tokens, ")
    assert lines[1].endswith(" a second")


def test_short_work_prints_nothing(capsys):
    with Progress("scoring", "tokens") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
