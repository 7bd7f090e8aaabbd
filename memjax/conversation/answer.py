"""The answer of a model, and how it is drawn unless a caller says it."""

from typing import NamedTuple

from memjax.models import Sampling

#: Where the makers do not say how to draw.
CHAT = Sampling(temperature=0.0)


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
