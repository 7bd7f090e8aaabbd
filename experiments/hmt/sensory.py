"""How many tokens should a segment read again from the one before?

    python -m experiments.hmt.sensory

HMT with sensory memories of several sizes, each trained by both stages for the same
number of steps and scored on the same held-out tokens (HMT, Table 8). The paper finds
32 best for Llama 2 7B on segments of 256.
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
        sensory: sizes k; none is an eighth of the segment, nothing, and others about.
    """

    sensory: tuple[int, ...] = ()
    output: Path = RESULTS / "hmt" / "sensory"

    def __post_init__(self):
        super().__post_init__()
        segment = self.scale.stages.stage2.hmt.segment
        if any(not 0 <= size <= segment for size in self.sensory):
            raise ValueError(f"sensory must be in [0, {segment}], got {self.sensory}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes, the usual first; an eighth of a segment of 256 is the paper's 32."""
        usual = self.scale.stages.stage2.hmt.segment // 8
        return self.sensory or (usual, 0, usual // 4, usual // 2, 2 * usual, 4 * usual)


def main(config: Config) -> None:
    """Trains what is not trained yet, scores, prints and writes."""
    cases = {f"k = {size}": _stages(config, size) for size in config.sizes}
    question = "how many tokens should a segment read again from the one before?"
    ablation.measure(config, question, cases, paper={"best k": 32, "segment": 256})


def _stages(config: Config, size: int) -> HMTStages:
    change = lambda stage: dataclasses.replace(
        stage, hmt=dataclasses.replace(stage.hmt, sensory=size)
    )
    stages = config.scale.stages
    return HMTStages(change(stages.stage1), change(stages.stage2))


if __name__ == "__main__":
    main(tyro.cli(Config))
