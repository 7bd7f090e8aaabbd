"""What does each part of Trellis bring? (Trellis, Table 2)

    python -m experiments.recurrent.trellis_ablation

The paper's rows, from DeltaNet and TTT up, then the functions that φ could be: the
paper does not name its own. All models have equal parameters and see the same tokens
in the same order; perplexity is of held-out documents, per token. `m` is scaled with
the preset, which has the paper's 64 slots from "125m" on.
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
from memjax.mechanisms import TrellisConfig

#: The paper's perplexities: 125M parameters, The Pile.
PAPER = {
    "DeltaNet": 11.58,
    "TTT": 11.44,
    "Trellis": 10.87,
    "without forget gate": 11.28,
    "f = l2_silu": 10.98,
    "f = softmax": 11.29,
    "linear, f = softmax": 12.71,
    "linear, f = ln_silu": 11.65,
    "m / 2": 11.14,
    "2 m": 10.87,
    "C = 1": 10.75,
}


@dataclasses.dataclass(frozen=True)
class Config(comparison.Config):
    """See `comparison.Config`."""

    run_dir: Path = Path("runs/trellis_ablation")
    output: Path = RESULTS / "recurrent" / "trellis_ablation"


def cases(config: Config) -> list[Case]:
    """The models, with equal parameters."""
    scale = config.scale
    vocab_size = load_tokenizer(config.tokenizer).vocab_size

    def model(mixer, **options):
        length = scale.context_length
        return comparison.base_model(scale, vocab_size, mixer, length, **options)

    models = {
        "DeltaNet": model("deltanet"),
        "TTT": model("ttt_linear"),
        "Trellis": model("trellis"),
        "without forget gate": model("trellis", forget=False),
        "f = l2_silu": model("trellis", activation="l2_silu"),
        "f = softmax": model("trellis", activation="softmax"),
        "linear, f = softmax": model("trellis", phi="identity", activation="softmax"),
        "linear, f = ln_silu": model("trellis", phi="identity"),
        "m / 2": model("trellis", slots=scale.slots // 2),
        "2 m": model("trellis", slots=scale.slots * 2),
        "C = 1": model("trellis", chunk_size=1),
        "steps up to 1": model("trellis", step_size=1.0),
    }
    default = TrellisConfig.phi
    others = {
        f"phi = {phi}": model("trellis", phi=phi)
        for phi in ("silu", "l2_silu", "ln_silu", "softmax")
        if phi != default
    }
    named = [Case(name, model) for name, model in (models | others).items()]
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
    summary = seed_report.summarise(rows, "perplexity", "Trellis")
    seed_report.show("Trellis, Table 2", summary, "Trellis", paper=PAPER)


def report(config: Config, rows: list[dict]) -> None:
    """Writes what there is."""
    summary = seed_report.summarise(rows, "perplexity", "Trellis")
    result = seed_report.write(
        config,
        "what does each part of Trellis bring? (Table 2)",
        rows,
        phi=TrellisConfig.phi,
        paper=PAPER,
        perplexity=summary,
    )
    plot(result, Path(f"{config.output}.png"))


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws the perplexities of a result."""
    seed_report.plot_means(result, path, "Trellis, Table 2", "perplexity")


if __name__ == "__main__":
    main(tyro.cli(Config))
