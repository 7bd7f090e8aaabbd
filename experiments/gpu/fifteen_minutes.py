"""Do memories gain on the window of their bytes with more training? On one GPU.

    python -m experiments.gpu.fifteen_minutes --plan
    python -m experiments.gpu.fifteen_minutes      # resumes, writes after each row

Rows of `memories.equal_bytes` beside SmolLM2-135M: the memories that its hypothesis
names, which query heads share; the window of their bytes, tuned and also with as many
updates as a memory and its alignment have; full attention; re-read windows. All are
tuned on 3 and then on 10 million tokens, in texts of 8,192, and read 40 held-out
documents of each kind, which `experiments.corpus.comparison` writes:

    python -m experiments.corpus.comparison --held-out 40 --destination comparison40

Falsified, as printed, if no memory saves 0.02 nats a token of proofs over its window
with most training, or if the window with as many updates saves as much.

It does not show seeds: there is one.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from experiments.lab import options, study
from experiments.lab.intervals import select_kind
from experiments.lab.measure import binned_losses
from experiments.lab.results import RESULTS
from experiments.memories import equal_bytes
from experiments.memories.equal_bytes_rows import LEAST_UPDATES, ROWS
from memjax.evaluation.statistics import loss_difference_by_document
from memjax.models.language_model.config import Dtype

WINDOW, LONGER = "wide-shared-tuned", "wide-shared-longer"
MEMORIES = ("gated-deltanet-shared", "lattice-shared")
#: Nats a token of proofs that a memory has to save.
LEAST = 0.02


@dataclasses.dataclass(frozen=True)
class Config(equal_bytes.Config):
    """As of `equal_bytes`, with other sizes.

    Attributes:
        updates: not chosen: they are those of a budget.
        budgets: tokens of training, ascending; each is rounded down to whole texts.
        speed: tokens a second of a window's training, for the plan alone.
    """

    rows: equal_bytes.Names = (WINDOW, *MEMORIES, LONGER, "full-tuned", "reread-tuned")
    context: options.Tokens = 8192
    corpus: str = "folder:comparison40"
    updates: int = dataclasses.field(default=0, init=False)
    passes: options.Count = 2
    dtype: Dtype = "bfloat16"
    least: equal_bytes.Least = 40
    tokens: options.Tokens = 8192
    run_dir: options.Folder = Path("runs/fifteen_minutes")
    output: options.Folder = RESULTS / "gpu" / "fifteen_minutes"
    budgets: options.Counts = (3_000_000, 10_000_000)
    speed: Annotated[float, options.within(1.0, 1e12)] = 100_000.0

    def __post_init__(self):
        super().__post_init__()
        if self.budgets[0] < LEAST_UPDATES * self.context:
            raise ValueError(
                f"budgets must be at least {LEAST_UPDATES} texts of "
                f"context={self.context}, got {self.budgets}"
            )

    def study(self, budget: int) -> equal_bytes.Config:
        """The study with one budget."""
        names = [field.name for field in dataclasses.fields(equal_bytes.Config)]
        given: Any = {name: getattr(self, name) for name in names} | {
            "updates": budget // self.context,
            "run_dir": self.run_dir / str(budget),
            "output": self.output / str(budget),
        }
        return equal_bytes.Config(**given)


def minutes(config: Config) -> dict[str, float]:
    """Of each missing row, by its cost over that of a window."""
    found = {}
    for budget in config.budgets:
        one = config.study(budget)
        for row, seed in one.runs():
            done = study.run_folder(one.output, row, seed) / study.SCORE
            # A memory's alignment reads its texts again for a few layers alone.
            cost = 1 + config.passes / 2 if row == LONGER else ROWS[row].cost
            if not done.is_file():
                found[f"{row}, {budget:,} tokens"] = cost * budget / config.speed / 60
    return found


def verdict(config: Config) -> Iterator[str]:
    """Nats saved on proofs by each memory, over both windows, by budget."""
    saved = {}
    for budget in config.budgets:
        rows = study.stored(config.output / str(budget), ROWS)
        losses = {
            row["name"]: select_kind(
                binned_losses(row["documents"], tuple(row["bins"])), "proofs"
            )
            for row in rows
        }
        for memory in MEMORIES:
            for window in (WINDOW, LONGER):
                if {memory, window} <= losses.keys():
                    given = losses[window], losses[memory]
                    found = loss_difference_by_document(*given)
                    saved[budget, memory, window] = found.nats
                    yield (
                        f"{budget:,} tokens: {memory} saves {found.nats:+.3f} nats "
                        f"({found.low:+.3f} to {found.high:+.3f}) over {window}"
                    )
    last = config.budgets[-1]
    try:
        held = [
            saved[last, memory, WINDOW] >= LEAST and saved[last, memory, LONGER] > 0
            for memory in MEMORIES
        ]
    except KeyError:
        yield "not decided: rows are missing"
    else:
        yield "holds" if any(held) else "falsified"


def main(config: options.Flags[Config]) -> None:
    """Does the missing rows, those with little training first."""
    if config.plan:
        for budget in config.budgets:
            equal_bytes.prepare(config.study(budget))
        return study.show_plan(minutes(config))
    for budget in config.budgets:
        equal_bytes.main(config.study(budget))
        print("\n".join(verdict(config)))


if __name__ == "__main__":
    options.run(main)
