"""Boxes, arrows and text of the drawings, in one style."""

import io
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# Colours that colour-blind readers tell apart (Okabe and Ito), by what they stand for.
MEMORY, TOKENS, WORK, RESULT = "#56B4E9", "#E8E8E8", "#F0E442", "#009E73"
CHANGE, INK = "#D55E00", "#222222"
_INCH = 72  # SVG's points


class Drawing:
    """A drawing in points, the origin at the lower left.

    Args:
        width: of the drawing.
        height: of the drawing.
    """

    def __init__(self, width: float, height: float):
        self._figure = Figure(figsize=(width / _INCH, height / _INCH))
        self.axes = self._figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        colour: str = TOKENS,
        size: float = 11,
    ) -> None:
        """A box with its lower left corner at (x, y), and text in its middle."""
        style = "round,pad=0,rounding_size=3"
        patch = FancyBboxPatch(
            (x, y), width, height, style, facecolor=colour, edgecolor=INK, linewidth=0.8
        )
        self.axes.add_patch(patch)
        self.text(x + width / 2, y + height / 2, text, size)

    def row(
        self, x: float, y: float, widths: Sequence[float], height: float, colour: str
    ) -> None:
        """Boxes side by side."""
        for width in widths:
            self.box(x, y, width - 2, height, "", colour)
            x += width

    def text(
        self, x: float, y: float, text: str, size: float = 11, align: str = "center"
    ) -> None:
        """Text whose middle, or left end, is at (x, y)."""
        self.axes.text(
            x, y, text, size=size, color=INK, ha=align, va="center", linespacing=1.3
        )

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        colour: str = INK,
    ) -> None:
        """A straight arrow."""
        patch = FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            color=colour,
            linewidth=1.2,
            shrinkA=0,
            shrinkB=0,
        )
        self.axes.add_patch(patch)

    def path(self, points: Sequence[tuple[float, float]], colour: str = INK) -> None:
        """A line through the points that ends as an arrow."""
        x, y = zip(*points[:-1], strict=True)
        self.axes.plot(x, y, color=colour, linewidth=1.2, solid_joinstyle="miter")
        self.arrow(points[-2], points[-1], colour)

    def svg(self) -> str:
        """The drawing as SVG, the same at each call."""
        # Names of parts are hashes, which are random without a salt. Letters are drawn
        # as shapes, because fonts differ in width.
        out = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": "memjax", "svg.fonttype": "path"}):
            self._figure.savefig(out, format="svg", metadata={"Date": None})
        # matplotlib leaves spaces at the ends of lines.
        return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))
