"""The drawn session: lines that stay on a terminal, and the picture."""

from experiments import conversation


def test_lines_that_were_written_over_are_gone():
    screen = "\x1b[1mloading 1\rloading 2\rdone\x1b[0m\r\nan answer\r\n"
    assert conversation.plain_lines(screen) == ["done", "an answer"]


def test_picture_names_model_cost_and_commit(tmp_path):
    row = {"command": ["ask", "smollm2"], "lines": ["Vessby."], "seconds": 7.4}
    found = {"commands": [row], "memory_bytes": 7_300_000}
    found |= {"answers": [{"told_right": True}, {"told_right": False}]}
    conversation.draw(found, "SmolLM2", tmp_path / "session.svg")
    text = (tmp_path / "session.svg").read_text().replace("&#160;", " ")
    for words in (
        "$ memjax ask smollm2",
        "Vessby.",
        "7 s",
        "the memory 7 MB",
        "1 of 2",
    ):
        assert words in text
