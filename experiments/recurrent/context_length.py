"""Which mixers turn a longer training context into lower perplexity?

    python -m experiments.recurrent.context_length

Trains every mixer at several context lengths, with the same number of tokens in every
update (Trellis, Table 4 and Figure 2; Lattice, Table 2). All models have equal
parameters, and each length is scored on the same held-out tokens, cut into texts of
that length. Transformer++ sees its whole context.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tyro

from experiments.common.results import RESULTS
from experiments.recurrent import comparison, seed_report
from experiments.recurrent.comparison import Case
from memjax.data import load_tokenizer

MODELS: dict[str, str] = {
    "Transformer++": "sliding_window",
    "Linear Attention": "linear_attention",
    "Mamba2": "mamba2",
    "GLA": "gla",
    "DeltaNet": "deltanet",
    "Gated DeltaNet": "gated_deltanet",
    "ABC": "abc",
    "GSA": "gsa",
    "TTT": "ttt_linear",
    "Trellis": "trellis",
    "Lattice": "lattice",
}
BASE = "DeltaNet"


@dataclasses.dataclass(frozen=True)
class Config(comparison.Config):
    """See `comparison.Config`.

    Attributes:
        contexts: lengths to train and score at; each must divide an update's tokens.
            none given is the preset's: the papers' on Books, or 64, 256 and 1,024.
    """

    contexts: tuple[int, ...] = ()
    run_dir: Path = Path("runs/context_length")
    output: Path = RESULTS / "recurrent" / "context_length"

    @property
    def scale(self) -> comparison.Scale:
        """The preset; at the smallest, 99 runs are short ones."""
        scale = super().scale
        short = self.preset == "cpu" and not self.steps
        return scale._replace(steps=min(scale.steps, 100)) if short else scale

    @property
    def lengths(self) -> tuple[int, ...]:
        """The context lengths, the preset's if none were given."""
        small = self.preset == "cpu"
        return self.contexts or tuple(
            2**power for power in ((6, 8, 10) if small else range(9, 16))
        )


def cases(config: Config) -> list[Case]:
    """Every mixer at every context length, with equal parameters."""
    vocab_size = load_tokenizer(config.tokenizer).vocab_size
    models = [
        Case(
            name,
            comparison.base_model(config.scale, vocab_size, mixer, length),
            {"context_length": length},
        )
        for length in config.lengths
        for name, mixer in MODELS.items()
    ]
    return comparison.equal_parameters(models, config.scale)


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    rows = comparison.study(
        config,
        cases(config),
        lambda case, seed: comparison.run_config(
            config, config.scale._replace(**case.fields), case.model, seed
        ),
        lambda _, settings, folder: comparison.train_and_score(
            settings, config.test_tokens, folder
        ),
        lambda rows: report(config, rows),
    )
    columns = ("context_length", "name")
    seed_report.show(
        "Perplexity by training context", summarise(rows), BASE, columns=columns
    )


def summarise(rows: list[dict]) -> list[dict]:
    """Perplexity of each mixer at each length."""
    by = "context_length"
    return seed_report.summarise(rows, "perplexity", BASE, by)


def report(config: Config, rows: list[dict]) -> None:
    """Writes what there is."""
    summary = summarise(rows)
    result = seed_report.write(
        config,
        "which mixers turn a longer training context into lower perplexity?",
        rows,
        perplexity=summary,
    )
    plot(result, Path(f"{config.output}.png"))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws the perplexities of a result against the training context."""
    panels = {"Held-out documents": result["perplexity"]}
    labels = ("training context (tokens)", "perplexity")
    seed_report.plot_lines(result, path, panels, "context_length", labels)


if __name__ == "__main__":
    main(tyro.cli(Config))
