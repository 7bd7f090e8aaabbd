"""Curricula: the two stages of HMT, the three of M+."""

import dataclasses

from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.segment_stage import SegmentStage


@dataclasses.dataclass(frozen=True)
class HMTStages:
    """HMT's training: first the recurrence over few segments, then the retrieval.

    Attributes:
        stage1: without retrieval.
        stage2: with retrieval; starts from stage 1's backbone and first memory.
    """

    stage1: SegmentStage
    stage2: SegmentStage

    def __post_init__(self):
        for name, stage, retrieval in (
            ("stage1", self.stage1, False),
            ("stage2", self.stage2, True),
        ):
            if stage.memory != "hmt" or stage.hmt.retrieval != retrieval:
                raise ValueError(
                    f"{name} must have memory='hmt' and hmt.retrieval={retrieval}, got "
                    f"memory={stage.memory!r} and {stage.hmt.retrieval}"
                )

    def summary(self) -> tuple[str, str]:
        """The memory and its sizes, for a list of presets."""
        return "HMT, both stages", self.stage2.summary()[1]

    def stages(self) -> tuple[tuple[str, SegmentStage], ...]:
        """The stages in order, by their folders."""
        return (("stage1", self.stage1), ("stage2", self.stage2))


@dataclasses.dataclass(frozen=True)
class MPlusStages:
    """The three stages of M+, each from the end of the previous one.

    Attributes:
        stage1: MemoryLLM on short documents.
        stage2: MemoryLLM on long ones.
        stage3: M+: with store and retriever.
        refit: fit the retriever anew to the model of stage 3, in the folder "refit".
    """

    stage1: MPlusStage
    stage2: MPlusStage
    stage3: MPlusStage
    refit: bool = False

    def __post_init__(self):
        for name, stage in self.stages():
            store = name not in ("stage1", "stage2")
            if bool(stage.memory.num_retrieved) != store:
                allowed = "> 0" if store else "= 0"
                raise ValueError(
                    f"{name} must have memory.num_retrieved {allowed}, "
                    f"got {stage.memory.num_retrieved}"
                )

    def summary(self) -> tuple[str, str]:
        """The memory and its sizes, for a list of presets."""
        return "M+, all three stages", self.stage3.summary()[1]

    def stages(self) -> tuple[tuple[str, MPlusStage], ...]:
        """The stages in order, by their folders."""
        names = ("stage1", "stage2", "stage3")
        found = tuple((name, getattr(self, name)) for name in names)
        return (*found, ("refit", self.stage3.refitted())) if self.refit else found
