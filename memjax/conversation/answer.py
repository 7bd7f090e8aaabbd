"""The answer of a model, and how it is drawn unless a caller says it."""

from typing import NamedTuple

from memjax.models import Sampling
from memjax.models.checkpoints.text_interface import GenerationConfig


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
    """How a model's makers draw from it; greedy where they do not say."""
    if generation.temperature is None:
        return Sampling(temperature=0.0)
    return Sampling(
        generation.temperature, generation.top_k or 0, generation.top_p or 1.0
    )
