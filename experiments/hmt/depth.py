"""Through how many segments should gradients flow?

    python -m experiments.hmt.depth

HMT whose second stage unrolls several numbers of segments, and RMT beside it, all with
the same number of steps (HMT, Table 9 and Figure 16). As in the paper the depth is the
length of the samples, so deeper runs read more tokens; the table says how many. The
paper finds that HMT gains with every depth up to 15, and RMT loses beyond 5.
"""

import dataclasses
from pathlib import Path

import tyro

from experiments.hmt import ablation
from experiments.lab.results import RESULTS
from memjax.training.finetune.curricula import HMTStages


@dataclasses.dataclass(frozen=True)
class Config(ablation.Config):
    """See `ablation.Config`.

    Attributes:
        depths: segments of a sample in stage 2.
        rmt: whether RMT is trained at each depth too.
    """

    depths: tuple[int, ...] = (2, 4, 8)
    rmt: bool = True
    output: Path = RESULTS / "hmt" / "depth"

    def __post_init__(self):
        super().__post_init__()
        if not self.depths or min(self.depths) < 2:
            raise ValueError(f"depths must be at least 2, got {self.depths}")


def main(config: Config) -> None:
    """Trains what is not trained yet, scores, prints and writes."""
    tokens = lambda stages: stages.stage2.context_length * stages.stage2.loop.steps
    sizes = {depth: _stages(config, depth) for depth in config.depths}
    label = lambda depth: f"depth {depth} ({tokens(sizes[depth]):,} tokens a row)"
    cases = {f"HMT, {label(depth)}": stages for depth, stages in sizes.items()}
    baselines = {f"RMT, depth {depth}": stages for depth, stages in sizes.items()}
    ablation.measure(
        config,
        "through how many segments should gradients flow?",
        cases,
        baselines if config.rmt else None,
        paper={"HMT": "gains up to 15", "RMT": "loses beyond 5"},
    )


def _stages(config: Config, depth: int) -> HMTStages:
    stages = config.scale.stages
    return HMTStages(stages.stage1, dataclasses.replace(stages.stage2, depth=depth))


if __name__ == "__main__":
    main(tyro.cli(Config))
