"""What does each part of Lattice bring? (Lattice, Table 4)

    python -m experiments.recurrent.lattice_ablation

The paper's rows, from DeltaNet up; then the other ways to forget, the other two
objectives, and the chunk form, whose gradients are stale, against the recurrence of
one token at a time that the paper defines. The paper trains its rows with the exact
recurrence, and so do the rows here unless they say a chunk C. All models have equal
parameters and see the same tokens in the same order; perplexity is of held-out
documents, per token.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tyro

from experiments.common.results import RESULTS
from experiments.recurrent import comparison, seed_report
from experiments.recurrent.comparison import Case
from memjax.data import load_tokenizer

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


@dataclasses.dataclass(frozen=True)
class Config(comparison.Config):
    """See `comparison.Config`.

    Attributes:
        chunks: sizes C of the chunk form.
    """

    chunks: tuple[int, ...] = (4, 16, 64)
    run_dir: Path = Path("runs/lattice_ablation")
    output: Path = RESULTS / "recurrent" / "lattice_ablation"


def cases(config: Config) -> list[Case]:
    """The models, with equal parameters."""
    scale = config.scale
    vocab_size = load_tokenizer(config.tokenizer).vocab_size

    def model(mixer, **options):
        length = scale.context_length
        return comparison.base_model(scale, vocab_size, mixer, length, **options)

    lattice = functools.partial(model, "lattice")
    models = {
        "DeltaNet": model("deltanet"),
        "TTT": model("ttt_linear"),
        "orthogonal recurrence": lattice(chunk_size=1, normalize=False),
        "normalised projection": lattice(chunk_size=1),
        "forget gate (l2)": lattice(chunk_size=1, forget="l2"),
        "forget gate (l1)": lattice(chunk_size=1, forget="l1"),
        "ENC": lattice(chunk_size=1, variant="enc"),
        "SIM": lattice(chunk_size=1, variant="sim"),
    }
    models |= {f"C = {c}": lattice(chunk_size=c) for c in config.chunks}
    named = [Case(name, model) for name, model in models.items()]
    return comparison.equal_parameters(named, scale)


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    rows = comparison.study(
        config,
        cases(config),
        lambda case, seed: comparison.run_config(
            config, config.scale, case.model, seed
        ),
        lambda _, settings, folder: comparison.train_and_score(
            settings, config.test_tokens, folder
        ),
        lambda rows: report(config, rows),
    )
    base = "normalised projection"
    summary = seed_report.summarise(rows, "perplexity", base)
    seed_report.show("Lattice, Table 4", summary, base, paper=PAPER)


def report(config: Config, rows: list[dict]) -> None:
    """Writes what there is."""
    summary = seed_report.summarise(rows, "perplexity", "normalised projection")
    result = seed_report.write(
        config,
        "what does each part of Lattice bring? (Table 4)",
        rows,
        paper=PAPER,
        perplexity=summary,
    )
    plot(result, Path(f"{config.output}.png"))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws the perplexities of a result."""
    seed_report.plot_means(result, path, "Lattice, Table 4", "perplexity")


if __name__ == "__main__":
    main(tyro.cli(Config))
