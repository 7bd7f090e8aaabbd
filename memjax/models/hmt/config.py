"""Sizes and options of HMT; the model and its equations are in `model.py`."""

import dataclasses
from typing import Literal

from memjax.checks import check_flags, check_numbers, check_sizes, require_known


@dataclasses.dataclass(frozen=True)
class HMTConfig:
    """Sizes of the memory; the defaults are the paper's for small backbones.

    Attributes:
        segment_length: L, tokens of a segment.
        num_sensory_tokens: k in [0, L], tokens of the previous segment, read again.
        num_memories: N, how many of the last segments' memories a search sees.
        retrieval_dim: d_h, width of queries and keys; None is the backbone's width.
        summary_fraction: S_n summarizes the first j = round(L * fraction) tokens; in
            (0, 1].
        retrieval: False is the recurrence alone, P_n = Mem_{n-1}: stage 1 of training.
        summary_source: S_n searches for P_n ("current", as in the paper), or S_{n-1}
            does ("previous", strictly causal).
        retrieval_dtype: of the search; its softmax is float32 with any. "bfloat16" is
            what the published program computes in, whose logits it moves by up to 0.05.
        activations: what the backward pass has of a segment: all activations, or those
            that the backbone's `remat` saves ("keep"); none, they are computed again
            ("recompute"), and once more layer by layer where layers are one loop and
            the backbone has `remat`; or the layers' inputs, in the host's memory
            ("offload").
            `jax.jvp`, `jacfwd` and `linearize` need "keep": the others have a backward
            pass of their own, which spares a copy of the parameters.
    """

    segment_length: int = 1024
    num_sensory_tokens: int = 32
    num_memories: int = 300
    retrieval_dim: int | None = None
    summary_fraction: float = 0.5
    retrieval: bool = True
    summary_source: Literal["current", "previous"] = "current"
    retrieval_dtype: Literal["float32", "bfloat16"] = "float32"
    activations: Literal["keep", "recompute", "offload"] = "recompute"

    def __post_init__(self):
        check_flags(self)
        check_sizes(segment_length=self.segment_length, num_memories=self.num_memories)
        check_sizes(least=0, num_sensory_tokens=self.num_sensory_tokens)
        if self.retrieval_dim is not None:
            check_sizes(retrieval_dim=self.retrieval_dim)
        if self.num_sensory_tokens > self.segment_length:
            raise ValueError(
                "num_sensory_tokens must be in [0, "
                f"segment_length={self.segment_length}], got {self.num_sensory_tokens}"
            )
        check_numbers(summary_fraction=self.summary_fraction)
        if not 1 <= self.summary <= self.segment_length:
            raise ValueError(
                f"summary_fraction={self.summary_fraction} of "
                f"segment_length={self.segment_length} makes "
                f"j={self.summary}, which must be in [1, {self.segment_length}]"
            )
        require_known("summary_source", self.summary_source, ("current", "previous"))
        dtypes = ("float32", "bfloat16")
        require_known("retrieval_dtype", self.retrieval_dtype, dtypes)
        allowed = ("keep", "recompute", "offload")
        require_known("activations", self.activations, allowed)

    @property
    def summary(self) -> int:
        """j, the number of tokens that S_n summarizes."""
        # Rounded: a fraction such as 0.1 has no exact float.
        return int(round(self.segment_length * self.summary_fraction))

    @property
    def reads_ahead(self) -> bool:
        """Whether logits of a segment's first j tokens depend on all of these."""
        # S_{n-1} is made of the segment before, which the logits may depend on.
        return self.retrieval and self.summary_source == "current"

    @property
    def min_memories_to_choose(self) -> int:
        """Number of memories from which P_n depends on the summary.

        With S_n that is two, as one memory has all the weight. S_{n-1} is taken one
        segment earlier, when there is one memory less.
        """
        return 2 if self.reads_ahead else 1
