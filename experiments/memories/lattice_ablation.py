"""What does each part of Lattice bring? (the rows of Lattice, Table 4)

    python -m experiments.memories.lattice_ablation

The paper's rows, from DeltaNet up; then the other ways to forget, the other two
objectives, and the chunk form, whose gradients are stale, against the recurrence of
one token at a time that the paper defines. The paper trains its rows with the exact
recurrence, and so do the rows here unless they say a chunk C. The paper's figure is the
perplexity of language models of 125M parameters. Models that a CPU can train are beaten
there by counted 4-grams, so that here they answer multi-query recall (`mqar`).
"""

import dataclasses
import functools
from pathlib import Path

import tyro

from experiments.lab.results import RESULTS
from experiments.memories import ablation, mqar
from experiments.memories.cases import Case

#: The paper's perplexities: 125M parameters, The Pile; variants from Table 2.
PAPER = {
    "DeltaNet": 11.62,
    "TTT": 11.59,
    "orthogonal recurrence": 11.26,
    "normalised projection": 10.94,
    "forget gate (l2)": 10.94,
    "ENC": 10.90,
    "SIM": 10.89,
}
BASE = "normalised projection"


@dataclasses.dataclass(frozen=True)
class Config(mqar.Config):
    """See `mqar.Config`.

    Attributes:
        chunks: sizes C of the chunk form.
    """

    chunks: tuple[int, ...] = (4, 16, 64)
    run_dir: Path = Path("runs/lattice_ablation")
    output: Path = RESULTS / "memories" / "lattice_ablation"


def cases(config: Config) -> list[Case]:
    """The models, with equal parameters and states."""
    model = functools.partial(mqar.model, config.task)
    lattice = functools.partial(model, "lattice")
    models = {
        "DeltaNet": model("deltanet"),
        "TTT": model("ttt_linear"),
        "orthogonal recurrence": lattice(chunk_size=1, normalize=False),
        BASE: lattice(chunk_size=1),
        "forget gate (l2)": lattice(chunk_size=1, forget="l2"),
        "forget gate (l1)": lattice(chunk_size=1, forget="l1"),
        "ENC": lattice(chunk_size=1, variant="enc"),
        "SIM": lattice(chunk_size=1, variant="sim"),
    }
    models |= {f"C = {c}": lattice(chunk_size=c) for c in config.chunks}
    return ablation.cases(config, models)


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    question = "what does each part of Lattice bring to recall?"
    ablation.run(config, cases(config), BASE, question, PAPER)


if __name__ == "__main__":
    main(tyro.cli(Config))
