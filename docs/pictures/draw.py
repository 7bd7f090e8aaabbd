"""Draws the pictures of the documentation into this folder.

python docs/pictures/draw.py
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from shapes import CHANGE, INK, MEMORY, RESULT, TOKENS, WORK, Drawing

FOLDER = Path(__file__).parent


def state() -> Drawing:
    """A state that goes from call to call."""
    drawing = Drawing(640, 170)
    calls = (("apply", "1,000 tokens"), ("apply", "3,096 tokens"), ("step", "1 token"))
    for i, (name, tokens) in enumerate(calls):
        x = 136 + 190 * i
        drawing.box(x - 32, 70, 64, 34, name, WORK)
        drawing.box(x - 50, 8, 100, 28, tokens)
        drawing.arrow((x, 38), (x, 68))
        drawing.arrow((x, 106), (x, 132))
        drawing.text(x, 144, "outputs")
        drawing.arrow((x - 68, 87), (x - 34, 87))
        drawing.arrow((x + 34, 87), (x + 62, 87))
    for i, name in enumerate(("empty", "state", "state", "state")):
        drawing.box(10 + 190 * i, 73, 56, 28, name, MEMORY)
    return drawing


def elastic_memory() -> Drawing:
    """Past blocks as curves, sampled, before the open block."""
    drawing = Drawing(640, 250)
    drawing.text(20, 232, "past blocks", align="left")
    drawing.row(20, 192, [70] * 5, 24, TOKENS)
    drawing.text(470, 232, "this block", align="left")
    drawing.row(470, 192, [19] * 8, 24, TOKENS)
    drawing.arrow((195, 188), (195, 166))
    drawing.text(205, 177, "compress: C ← P C + K F", 10, align="left")
    drawing.box(20, 92, 348, 70, "", MEMORY)
    # A curve that is smoother the further back it is.
    place = np.linspace(0, 1, 300)
    curve = 126 + 22 * np.sin(2 * np.pi * (0.6 * place + 3.4 * place**3)) * np.cos(
        4 * place
    )
    drawing.axes.plot(28 + 332 * place, curve, color=INK, linewidth=1.4)
    for point in np.linspace(0.04, 0.96, 8):
        value = np.interp(point, place, curve)
        drawing.axes.plot(28 + 332 * point, value, "o", color=CHANGE, markersize=6)
    drawing.text(380, 146, "N coefficients of", 10, align="left")
    drawing.text(380, 130, "each channel", 10, align="left")
    drawing.arrow((195, 90), (195, 66))
    drawing.text(205, 78, "sample: R C", 10, align="left")
    drawing.row(110, 38, [22] * 8, 24, CHANGE)
    drawing.text(196, 18, "M memory tokens")
    drawing.box(470, 60, 150, 36, "attention", WORK)
    drawing.arrow((545, 188), (545, 98))
    drawing.arrow((290, 50), (468, 74))
    drawing.arrow((545, 58), (545, 34))
    drawing.text(545, 20, "outputs")
    return drawing


def trellis() -> Drawing:
    """A query reads the memory of keys, and with the scores that of values."""
    drawing = Drawing(640, 210)
    drawing.box(120, 96, 120, 70, "memory of keys\nm slots", MEMORY)
    drawing.box(290, 106, 70, 50, "f", WORK)
    drawing.box(410, 96, 120, 70, "memory of values\nm slots", MEMORY)
    drawing.text(40, 131, "query")
    for start, end in ((62, 118), (242, 288), (362, 408), (532, 578)):
        drawing.arrow((start, 131), (end, 131))
    drawing.text(605, 131, "output")
    drawing.text(265, 144, "scores", 9)
    for x, name in ((180, "key"), (470, "value")):
        drawing.box(x - 35, 12, 70, 26, name)
        drawing.arrow((x, 40), (x, 94), CHANGE)
    drawing.box(290, 12, 70, 26, "target")
    drawing.arrow((288, 30), (198, 94), CHANGE)
    drawing.arrow((362, 30), (452, 94), CHANGE)
    drawing.text(325, 66, "one gradient step\na token", 10)
    drawing.text(325, 190, "forget gates fade both memories", 10)
    return drawing


def lattice() -> Drawing:
    """A slot on the circle, and the part of an update that is orthogonal to it."""
    drawing = Drawing(640, 240)
    centre, radius = np.array([120.0, 30.0]), 170.0
    turn = np.linspace(-0.1, 2.2, 100)
    circle = centre[:, None] + radius * np.stack([np.cos(turn), np.sin(turn)])
    drawing.axes.plot(*circle, color="0.6", linewidth=1)
    slot = np.array([np.cos(1.2), np.sin(1.2)])
    across = np.array([slot[1], -slot[0]])
    tip = centre + radius * slot
    update = 50 * slot + 105 * across
    turned = radius * slot + 105 * across
    after = centre + radius * turned / np.linalg.norm(turned)
    drawing.arrow(tuple(centre), tuple(tip))
    drawing.arrow(tuple(tip), tuple(tip + update), "0.6")
    drawing.arrow(tuple(tip), tuple(tip + 105 * across), CHANGE)
    drawing.arrow(tuple(centre), tuple(after), RESULT)
    ends = np.stack([tip + update, tip + 105 * across])
    drawing.axes.plot(*ends.T, color="0.6", linewidth=1, linestyle=":")
    drawing.text(138, 125, "slot", 11)
    drawing.text(243, 84, "slot after", 11)
    x = 390
    for y, colour, text in (
        (190, "0.6", "the whole update"),
        (160, CHANGE, "its part that is orthogonal to the slot"),
        (130, RESULT, "the sum, scaled back to length one"),
    ):
        drawing.arrow((x, y), (x + 30, y), colour)
        drawing.text(x + 38, y, text, 10, align="left")
    return drawing


def hmt() -> Drawing:
    """Segments in turn; a search of the memories makes the prompt."""
    drawing = Drawing(680, 280)
    drawing.text(20, 262, "memories of segments", 11, align="left")
    drawing.row(20, 224, [34] * 6, 24, MEMORY)
    drawing.box(290, 219, 90, 34, "search", WORK)
    drawing.arrow((224, 236), (288, 236))
    drawing.box(437, 222, 70, 28, "prompt P", CHANGE)
    drawing.arrow((382, 236), (435, 236))
    parts = (
        (40, 60, "P", CHANGE),
        (104, 90, "last k tokens\nof segment n-1", TOKENS),
        (198, 240, "segment n", TOKENS),
        (442, 60, "P", CHANGE),
    )
    for x, width, text, colour in parts:
        drawing.box(x, 122, width, 40, text, colour, 9 if "\n" in text else 11)
    drawing.arrow((472, 220), (472, 164), CHANGE)
    drawing.path(((472, 192), (70, 192), (70, 164)), CHANGE)
    drawing.arrow((335, 164), (335, 217))
    drawing.text(343, 177, "summary of its start", 10, align="left")
    drawing.box(40, 60, 462, 32, "backbone", WORK)
    for x in (70, 149, 318, 472):
        drawing.arrow((x, 120), (x, 94))
    drawing.arrow((318, 58), (318, 34))
    drawing.text(318, 20, "logits")
    drawing.arrow((472, 58), (472, 34))
    drawing.box(430, 6, 84, 26, "memory n", MEMORY)
    drawing.path(((516, 19), (590, 19), (590, 270), (206, 270), (206, 250)))
    drawing.text(598, 120, "joins the\nmemories", 10, align="left")
    return drawing


def mplus() -> Drawing:
    """A chunk into the pool, what is dropped into the store, a question that reads."""
    drawing = Drawing(660, 260)
    drawing.text(20, 242, "in each layer", 10, align="left")
    drawing.box(20, 150, 120, 40, "chunk of text", TOKENS)
    drawing.box(190, 150, 110, 40, "compress to\nK memory tokens", WORK, 10)
    drawing.box(350, 130, 110, 80, "pool\nN rows", MEMORY)
    drawing.box(520, 130, 120, 80, "long-term store\n(may be on\nthe host)", MEMORY, 10)
    drawing.arrow((142, 170), (188, 170))
    drawing.arrow((302, 170), (348, 170))
    drawing.arrow((462, 170), (518, 170), CHANGE)
    drawing.text(490, 222, "K random rows drop out", 9)
    drawing.box(20, 30, 120, 40, "question", TOKENS)
    drawing.box(190, 30, 110, 40, "layer's attention", WORK, 10)
    drawing.box(520, 36, 120, 34, "retriever", WORK)
    drawing.arrow((142, 50), (188, 50))
    drawing.arrow((405, 128), (290, 72))
    drawing.arrow((580, 128), (580, 72))
    drawing.arrow((518, 50), (302, 50), RESULT)
    drawing.text(410, 38, "R rows that fit the question", 10)
    drawing.arrow((245, 28), (245, 10))
    drawing.text(255, 12, "answer", 10, align="left")
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "state": state,
    "elastic-memory": elastic_memory,
    "trellis": trellis,
    "lattice": lattice,
    "hmt": hmt,
    "mplus": mplus,
}


def main(folder: Path = FOLDER) -> None:
    """Writes all pictures."""
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw().svg(), "utf-8")


if __name__ == "__main__":
    main()
