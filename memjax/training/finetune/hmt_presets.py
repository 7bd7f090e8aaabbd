"""Presets for fine-tuning with HMT, RMT or a baseline.

Sizes, steps and learning rates are those of He et al. (2025),
https://arxiv.org/abs/2405.06067, Table 7 and section 4.
"""

import dataclasses
from typing import NamedTuple

from memjax.models.hmt.config import HMTConfig
from memjax.models.language_model.config import Dtype
from memjax.training.config import LoopConfig
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.segment_stage import SegmentStage, Trained
from memjax.training.finetune.stage import SampleConfig
from memjax.training.step import StepConfig


class PaperSize(NamedTuple):
    """A row of Table 7 for a model that loads here.

    d_h follows from the paper's counts of extra parameters.
    """

    segment: int
    depth: int
    memories: int
    retrieval_dim: int | None
    learning_rate: float
    train: Trained


PAPER_SIZES = {
    "opt-350m": PaperSize(1024, 15, 300, 1536, 1e-5, "full"),
    "smollm-135m": PaperSize(1024, 15, 300, 1536, 1e-5, "full"),
    "opt-2.7b": PaperSize(512, 8, 300, 2560, 1e-5, "full"),
    "openllama-3b": PaperSize(512, 8, 300, 2048, 1e-5, "full"),
    "mamba-370m": PaperSize(256, 6, 400, 2048, 1e-4, "lora"),
    "llama2-7b": PaperSize(256, 8, 400, 4096, 1e-4, "lora"),
    "yi-6b": PaperSize(512, 3, 300, 4096, 2e-4, "lora"),
    "mistral-7b": PaperSize(512, 3, 300, 4096, 2e-4, "lora"),
}


def presets() -> dict[str, SegmentStage | HMTStages]:
    """Fine-tuning by name; names of models are the paper's settings for them."""
    two = _paper(PaperSize(1024, 15, 300, None, 1e-5, "full"), None)
    longer = dataclasses.replace(two.stage1.loop, steps=700)
    # RMT has one stage, which takes the steps of both stages of HMT.
    rmt = dataclasses.replace(
        two.stage1,
        hmt=dataclasses.replace(two.stage1.hmt, num_sensory_tokens=0),
        loop=longer,
    )
    named: dict[str, SegmentStage | HMTStages] = {
        "hmt-tiny": _tiny(),
        "hmt": two,
        "hmt-stage1": two.stage1,
        "hmt-stage2": two.stage2,
        "rmt": rmt,
        "window": dataclasses.replace(rmt, memory="window"),
        "sinks": dataclasses.replace(rmt, memory="window", sinks=4),
        # HMT's program decays all; decay rates and norms of a backbone had none.
        "plain": dataclasses.replace(
            rmt,
            memory="none",
            optimizer=dataclasses.replace(rmt.optimizer, decay_vectors=False),
        ),
        "reread": dataclasses.replace(rmt, memory="reread", reread=1024),
    }
    return named | {
        f"hmt-{name}": _paper(size, "bfloat16") for name, size in PAPER_SIZES.items()
    }


def _paper(size: PaperSize, dtype: Dtype | None) -> HMTStages:
    """Stage 1: two segments, 200 steps. Stage 2: all segments, 500 steps."""
    memory = HMTConfig(
        segment_length=size.segment,
        num_memories=size.memories,
        retrieval_dim=size.retrieval_dim,
        retrieval=False,
    )
    default = SegmentStage()
    stage1 = SegmentStage(
        hmt=memory,
        train=size.train,
        dtype=dtype,
        optimizer=dataclasses.replace(
            default.optimizer, learning_rate=size.learning_rate
        ),
        loop=dataclasses.replace(default.loop, steps=200),
        # Layers written out take an hour to compile at 7B.
        scan_layers=dtype is not None,
    )
    stage2 = dataclasses.replace(
        stage1,
        hmt=dataclasses.replace(memory, retrieval=True),
        depth=size.depth,
        loop=default.loop,
    )
    return HMTStages(stage1, stage2)


def _tiny() -> HMTStages:
    """Both stages in minutes on a CPU, for a backbone of `memjax train`."""
    # Every scored target counts, and the rate falls to 0: so few short steps would
    # only blur a backbone otherwise.
    two = _paper(PaperSize(64, 4, 16, None, 1e-3, "full"), None)
    rate = dataclasses.replace(two.stage1.optimizer, warmup_ratio=0.05, final_ratio=0.0)
    shrunk = []
    for stage, steps in ((two.stage1, 100), (two.stage2, 300)):
        loop = LoopConfig(steps=steps, save_every=50, evaluate_every=100)
        shrunk.append(
            dataclasses.replace(
                stage,
                hmt=dataclasses.replace(stage.hmt, num_sensory_tokens=8),
                window=64,
                data=SampleConfig(batch_size=8, validation_texts=8),
                optimizer=rate,
                step=StepConfig(loss_on="scored"),
                loop=loop,
            )
        )
    return HMTStages(*shrunk)
