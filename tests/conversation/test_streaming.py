"""Text of an answer, part by part."""

import numpy as np
import pytest

from memjax.conversation.streaming import UNFINISHED, printer

WORDS = {
    0: "Hello",
    1: " wor",
    2: "ld",
    3: ".\n",
    4: "User:",
    5: UNFINISHED,
    9: "<end>",
}


def decode(row):
    return "".join(WORDS[int(token)] for token in row)


@pytest.mark.parametrize(
    "row,stop,parts",
    [
        # As it comes, and without the token that ends a text.
        ([0, 1, 2, 9], (), ["Hello", " wor", "ld"]),
        # The stop text is not printed, nor what may be its beginning before it is told
        # apart; the token that holds it ends the output.
        ([0, 1, 2, 3, 4], ("\nUser",), ["H", "ello", " w", "or", "ld."]),
        # At the limit nothing is kept back.
        ([0, 1, 1, 1, 1], ("wxyz",), ["He", "llo ", "wor ", "wor ", "wor wor"]),
        # Half a character waits for the other half.
        ([0, 5, 1], (), ["Hello", f"{UNFINISHED} wor"]),
    ],
)
def test_every_part_is_printed_once_and_no_stop_text(row, stop, parts):
    written = []
    stop_when = printer(decode, stop, 5, (9,), written.append)
    over = [stop_when(np.array([row[: i + 1]])) for i in range(len(row))]
    assert written == parts
    assert over == [False] * (len(row) - 1) + [bool(stop) and stop[0] in decode(row)]
