"""The answer of a model, and how it is drawn unless a caller says it."""

from typing import NamedTuple

from memjax.models import Sampling
from memjax.models.checkpoints.hf.generation_config import GenerationConfig

#: Where the makers do not say how to draw. Without the penalty SmolLM2-135M-Instruct
#: repeats itself: of four answers of 80 tokens one is 94% repeated runs of four, and
#: with it none has any.
CHAT = Sampling(temperature=0.0, repetition_penalty=1.1)


class Answer(NamedTuple):
    """Answer of a model.

    Attributes:
        text: without white space around it.
        tokens: how many were sampled.
        ended: whether the model ended it, before its limit or an interruption.
        ids: the tokens.
        log_probs: of each, by the model's own distribution.
    """

    text: str
    tokens: int
    ended: bool
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()


def makers_sampling(generation: GenerationConfig) -> Sampling:
    """Sampling settings of the model's makers, else `CHAT`.

    Raises:
        ValueError: on a setting that cannot be followed.
    """
    return generation.sampling or CHAT
