"""RMT: a memory token carried from segment to segment, over any backbone.

    Y = BBM([m_n ‖ H_n ‖ m_n]);   logits = head(Y over H_n);   m_{n+1} = Y_last

m_0 is learned. Bulatov et al. (2022), https://arxiv.org/abs/2207.06881, with one token
read and written, as HMT compares with it: HMT without summary, search and sensory
memory. Nothing reads ahead, and every split is exact.
"""

from typing import Literal

from flax import nnx
from jaxtyping import PRNGKeyArray

from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import HMT
from memjax.models.language_model.model import LanguageModel


def add_rmt(
    backbone: LanguageModel,
    segment: int,
    *,
    key: PRNGKeyArray | None = None,
    rngs: nnx.Rngs | None = None,
    activations: Literal["keep", "recompute", "offload"] = "recompute",
) -> HMT:
    """Gives a backbone a recurrent memory token.

    Args:
        backbone: any language model.
        segment: L, new tokens a segment.
        key: of the first memory; or
        rngs: the streams of flax, of which "params" is drawn from.
        activations: see `HMTConfig`.

    Raises:
        ValueError: as `add_hmt`.
    """
    config = HMTConfig(
        segment_length=segment,
        num_sensory_tokens=0,
        retrieval=False,
        activations=activations,
    )
    return HMT(backbone, config, key=key, rngs=rngs)
