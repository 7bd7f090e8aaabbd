"""Plot style: sizes, colours, markers, and labels at the ends of lines.

Colours are those of Okabe and Ito (2008), distinct for colour-blind readers; markers
and dashes distinguish lines without colour. Fonts are legible at half size. Labels at
the ends of lines replace a legend over the data.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from memjax.buckets.writing import replaced
from memjax.config_io import AnyPath
from memjax.evaluation.provenance import commit_of

Number = int | float
#: Blue, vermilion, green, purple, orange, sky blue, black.
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000".split()
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":")
GREY = "0.45"
#: Pixels an inch; a letter of 11 points is 11 pixels high at half size.
DPI = 144
#: Letters of a line of a name.
WRAP = 24
RC: Any = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "figure.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2.5,
}


class Name(NamedTuple):
    """A line's name, and the point in the data where the line ends."""

    axes: Any
    x: Number
    y: Number
    text: str
    colour: Any


class Drawing:
    """A figure in the style, with labels at the ends of its lines.

    Attributes:
        figure: matplotlib's.
        grid: its panels [rows, columns].
    """

    def __init__(self, figure: Any, grid: np.ndarray):
        self.figure, self.grid = figure, grid
        self._names: list[Name] = []

    def line(
        self,
        axes: Any,
        x: ArrayLike,
        y: ArrayLike,
        name: str,
        number: int,
        *,
        errors: Any = None,
        named: bool = True,
        **style: Any,
    ) -> None:
        """A line with markers, named at its last point that is a number.

        Args:
            axes: the panel.
            x: positions.
            y: values, NaN where there is none.
            name: of the line.
            number: of its colour, marker and dashes.
            errors: below and above each value, as `errorbar` takes them.
            named: False where another panel names the line.
            style: overrides of the line's style.
        """
        places, heights = np.asarray(x, float), np.asarray(y, float)
        real = np.isfinite(heights)
        shown = places[real], heights[real]
        look = line_style(number) | style
        if errors is None:
            axes.plot(*shown, **look)
        else:
            errors = np.broadcast_to(np.asarray(errors, float), (2, len(real)))[:, real]
            axes.errorbar(*shown, errors, elinewidth=1, **look)
        if named and real.any():
            self.name(axes, shown[0][-1], shown[1][-1], name, look["color"])

    def steps(
        self,
        axes: Any,
        values: ArrayLike,
        edges: Sequence[Number],
        name: str,
        number: int,
        *,
        named: bool = True,
    ) -> None:
        """A value a bin as a line of steps; NaN is a gap."""
        heights = np.asarray(values, float)
        look = {k: v for k, v in line_style(number).items() if k != "marker"}
        axes.stairs(heights, edges, baseline=None, **look, linewidth=1.8)
        if named and np.isfinite(heights).any():
            last = np.flatnonzero(np.isfinite(heights))[-1]
            self.name(axes, edges[last + 1], float(heights[last]), name, look["color"])

    def name(self, axes: Any, x: Number, y: Number, text: str, colour: Any) -> None:
        """Adds a label to the right of the panel, near this point."""
        self._names.append(Name(axes, x, y, textwrap.fill(text, WRAP), colour))

    def place_names(self) -> None:
        """Separates overlapping labels, once everything is drawn."""
        notes = [(name, _annotate(name)) for name in self._names]
        # Labels take room from the panels, on whose size the overlap depends.
        self.figure.canvas.draw()
        by_axes: dict[Any, list[tuple[Name, Any]]] = {}
        for name, note in notes:
            by_axes.setdefault(name.axes, []).append((name, note))
        for axes, found in by_axes.items():
            box = axes.get_window_extent()
            line = RC["font.size"] * 1.25 * self.figure.dpi / 72 / box.height
            sizes = [line * (1 + name.text.count("\n")) for name, _ in found]
            wanted = [_height(name, box) for name, _ in found]
            heights = apart(wanted, sizes)
            for (_, note), height in zip(found, heights, strict=True):
                note.set_position((note.get_position()[0], height))


def _annotate(name: Name) -> Any:
    """A name right of its panel, and a thin line to it from the line's end."""
    from matplotlib.colors import to_rgb

    # Light colours are read as lines, and not as letters.
    dark = tuple(0.75 * part for part in to_rgb(name.colour))
    return name.axes.annotate(
        name.text,
        (name.x, name.y),
        (1.035, 0.5),
        textcoords="axes fraction",
        color=dark,
        verticalalignment="center",
        annotation_clip=False,
        arrowprops={
            "arrowstyle": "-",
            "color": "0.6",
            "linestyle": ":",
            "linewidth": 0.8,
            "shrinkA": 1,
            "shrinkB": 3,
            "relpos": (0, 0.5),
        },
    )


def _height(name: Name, box: Any) -> float:
    """Where a line ends, as a share of its panel's height."""
    _, y = name.axes.transData.transform((name.x, name.y))
    return float(np.clip((y - box.y0) / box.height, 0, 1))


def apart(wanted: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Middles of texts that do not overlap, near those wanted, in their order.

    Texts that would touch are stacked around the mean of their wanted middles.

    Args:
        wanted: where the middle of each text should be.
        sizes: the height of each.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[int]] = []

    def half(group):
        return sum(sizes[i] for i in group) / 2

    def middle(group):
        return sum(wanted[i] for i in group) / len(group)

    def touch(low, high):
        return middle(high) - half(high) < middle(low) + half(low)

    for i in order:
        groups.append([i])
        while len(groups) > 1 and touch(*groups[-2:]):
            last = groups.pop()
            groups[-1] += last
    found = [0.0] * len(wanted)
    for group in groups:
        bottom = middle(group) - half(group)
        for i in group:
            found[i] = bottom + sizes[i] / 2
            bottom += sizes[i]
    return found


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line of this number, from 0 on."""
    turn, place = divmod(number, len(COLOURS))
    return {
        "color": COLOURS[place],
        "marker": MARKERS[(place + 3 * turn) % len(MARKERS)],
        "linestyle": DASHES[turn % len(DASHES)],
    }


@contextmanager
def drawing(
    path: AnyPath,
    *,
    rows: int = 1,
    columns: int = 1,
    size: tuple[Number, Number] = (7.5, 4.5),
    title: str = "",
    source: str = "",
    **panels: Any,
) -> Iterator[Drawing]:
    """A figure in the style, written when the block ends.

    `size` is in inches, `source` (device and commit) small in a corner, and `panels`
    are further arguments of `Figure.subplots`.
    """
    # Imported late: commands that draw nothing start without it.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(RC):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        found = Drawing(figure, figure.subplots(rows, columns, squeeze=False, **panels))
        yield found
        if title:
            figure.suptitle(title, x=0.01, horizontalalignment="left")
        if source:
            corner = {"x": 0.995, "horizontalalignment": "right", "color": GREY}
            figure.supxlabel(source, fontsize=7.5, **corner)
        found.place_names()
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as stream:
            canvas.print_png(stream)


def source_of(result: Mapping[str, Any]) -> str:
    """Device and commit of a result, for the corner of its plot."""
    return " · ".join(filter(None, (result.get("device"), commit_of(result))))


def log_ticks(axes: Any, values: Sequence[Number], most: int = 8) -> None:
    """A logarithmic axis of x in powers of 2, with ticks at some of these values.

    `values` are candidates; with more than `most`, every second, third, ... is
    labelled.
    """
    values = [value for value in sorted(set(values)) if value > 0]
    every = -(-len(values) // most)
    # From the last one back, which is the one that is read.
    shown = values[::-1][::every][::-1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [short_count(value) for value in shown])
    axes.minorticks_off()


def short_count(value: Number) -> str:
    """A number of tokens as an axis shows it: 512, 4k, 100k, 1M."""
    if value >= 2**20 and value % 2**20 == 0:
        return f"{value / 2**20:.0f}M"
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:.0f}k"
    return f"{value / 1000:.0f}k" if value >= 10_000 else f"{value:.0f}"
