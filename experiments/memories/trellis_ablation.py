"""What does each part of Trellis bring? (the rows of Trellis, Table 2)

    python -m experiments.memories.trellis_ablation

The paper's rows, from DeltaNet and TTT up, then the functions that φ could be: the
paper does not name its own. The paper's figure is the perplexity of language models of
125M parameters. Models that a CPU can train are beaten there by counted 4-grams, so
that here they answer multi-query recall (`mqar`). States are of equal bytes, but for
the two rows that have other numbers of slots.
"""

import dataclasses
import functools
from pathlib import Path

import tyro

from experiments.lab.results import RESULTS
from experiments.memories import ablation, mqar
from experiments.memories.cases import Case
from memjax.mechanisms import TrellisConfig
from memjax_kernels import TRELLIS_PHIS

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
BASE = "Trellis"


@dataclasses.dataclass(frozen=True)
class Config(mqar.Config):
    """See `mqar.Config`."""

    run_dir: Path = Path("runs/trellis_ablation")
    output: Path = RESULTS / "memories" / "trellis_ablation"


def cases(config: Config) -> list[Case]:
    """The models, with equal parameters."""
    model = functools.partial(mqar.model, config.task)
    trellis = functools.partial(model, "trellis")
    (default,) = trellis().mechanisms
    assert isinstance(default, TrellisConfig)
    slots = default.slots

    def with_slots(slots):
        mechanism = dataclasses.replace(default, slots=slots)
        return dataclasses.replace(trellis(), mechanisms=(mechanism,))

    models = {
        "DeltaNet": model("deltanet"),
        "TTT": model("ttt_linear"),
        BASE: trellis(),
        "without forget gate": trellis(forget=False),
        "f = l2_silu": trellis(activation="l2_silu"),
        "f = softmax": trellis(activation="softmax"),
        "linear, f = softmax": trellis(phi="identity", activation="softmax"),
        "linear, f = ln_silu": trellis(phi="identity"),
        "m / 2": with_slots(slots // 2),
        "2 m": with_slots(slots * 2),
        "C = 1": trellis(chunk_size=1),
    }
    models |= {
        f"phi = {phi}": trellis(phi=phi)
        for phi in TRELLIS_PHIS
        if phi not in ("identity", TrellisConfig.phi)
    }
    return ablation.cases(config, models)


def main(config: Config) -> None:
    """Trains what is not trained yet, prints and writes the results."""
    question = "what does each part of Trellis bring to recall?"
    ablation.run(config, cases(config), BASE, question, PAPER)


if __name__ == "__main__":
    main(tyro.cli(Config))
