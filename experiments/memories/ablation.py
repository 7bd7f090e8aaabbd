"""What the two ablations share: variants of one memory on multi-query recall."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.lab.results import figure
from experiments.memories import cases as study
from experiments.memories import mqar, seed_report
from experiments.memories import small_models as comparison
from experiments.memories.cases import Case
from memjax.models import ModelConfig


def cases(config: mqar.Config, models: Mapping[str, ModelConfig]) -> list[Case]:
    """The variants, with equal parameters."""
    equal = comparison.equal_parameters(models, config.task.scale)
    return [Case(name, model) for name, model in equal.items()]


def run(
    config: mqar.Config,
    cases: list[Case],
    base: str,
    question: str,
    paper: Mapping[str, float],
) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    write = functools.partial(_report, config, base, question, paper)
    rows = study.run_all(
        *(config, cases),
        functools.partial(mqar.settings, config),
        functools.partial(mqar.measure, config),
        write,
    )
    summary = _summary(config, rows, base)
    columns = ("pairs", "name")
    seed_report.show(question, summary, base, columns=columns, paper=paper)


@figure("memories/lattice_ablation", "memories/trellis_ablation")
def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws right answers against the pairs of a sequence."""
    panels = {result["question"]: result["accuracy"]}
    labels = ("key-value pairs", "right answers")
    seed_report.plot_lines(result, path, panels, "pairs", labels)


def _summary(config, rows, base):
    return mqar.summarise(rows, base, config.task.scale.context_length)


def _report(config, base, question, paper, rows) -> None:
    """Writes what there is."""
    result = seed_report.write(
        config,
        question,
        rows,
        task=config.task._asdict() | {"scale": config.task.scale._asdict()},
        base=base,
        paper=dict(paper),
        accuracy=_summary(config, rows, base),
    )
    plot(result, Path(f"{config.output}.png"))
