"""Draws all committed plots anew, each from its result file.

    python -m experiments.plots                    # all
    python -m experiments.plots --only mplus/retention  # some

Nothing is measured: device and commit in a plot's corner are those of its result file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from experiments.books import report as books_report
from experiments.compare import alignment_report, layers, report
from experiments.elastic import hippo_reconstruction
from experiments.hmt import length
from experiments.lab.results import RESULTS
from experiments.mplus import perplexity, retrieval_quality
from experiments.mplus.retention import knowledge_retention
from experiments.mplus.speed import cost_report
from experiments.notes import report as notes_report
from experiments.ops import benchmark
from experiments.ops.cycles import plot as cycles_plot
from experiments.recurrent import ablation, recall
from experiments.recurrent.chunks import lattice_chunks
from experiments.tables.table import load
from memjax.checks import require_known

#: What draws each plot, by its name without ending.
PLOTS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "books/window8": books_report.plot,
    "books/window64": books_report.plot,
    "compare/alignment": alignment_report.plot,
    "compare/layers": layers.plot,
    "compare/needles": report.plot_needles,
    "compare/positions": report.plot_positions,
    "elastic/hippo_reconstruction": hippo_reconstruction.plot,
    "hmt/smollm2/length": length.plot,
    "mplus/cost": cost_report.plot,
    "mplus/perplexity": perplexity.plot,
    "mplus/retention": knowledge_retention.plot,
    "mplus/retrieval_quality": retrieval_quality.plot,
    "mplus/retrieval_quality_fitted": retrieval_quality.plot,
    "notes/notes": notes_report.plot,
    "ops/kernels": benchmark.plot,
    "ops/tpu_cycles": cycles_plot.plot,
    "recurrent/lattice_ablation": ablation.plot,
    "recurrent/trellis_ablation": ablation.plot,
    "recurrent/lattice_chunks": lattice_chunks.plot,
    "recurrent/recall": recall.plot,
}
#: Result files of plots that are named otherwise.
SOURCES = {f"compare/{name}": "compare/summary" for name in ("needles", "positions")}


def draw(only: tuple[str, ...] = (), folder: Path = RESULTS) -> None:
    """Draws committed plots anew from their result files.

    Args:
        only: names of plots, such as "mplus/retention"; all unless given.
        folder: where the pictures go.
    """
    for name in only:
        require_known("only", name, tuple(PLOTS))
    for name in only or PLOTS:
        PLOTS[name](load(SOURCES.get(name, name)), folder / f"{name}.png")
        print(f"drew {folder / name}.png")


if __name__ == "__main__":
    tyro.cli(draw)
