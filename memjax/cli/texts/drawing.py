"""Options of the sampler for an answer, each of which may be left to the makers."""

import dataclasses

from memjax.conversation.answer import makers_sampling
from memjax.models import Sampling
from memjax.models.checkpoints.hf.generation_config import GenerationConfig


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Settings of `Sampling`; None is the makers' setting, or else memjax's own.

    With a temperature, the others are off unless they are given.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the fewest likeliest tokens that reach p; 1 keeps all.
        min_p: keep tokens at least p times as likely as the likeliest; 0 keeps all.
        repetition_penalty: makes tokens of prompt and answer less likely; 1 is none.
        presence_penalty: is taken from the logits of the answer's tokens; 0 is none.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None

    def __post_init__(self):
        # Out of range is refused before a model is read.
        Sampling(**self._given())

    def _given(self):
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value is not None}

    def sampling(self, generation: GenerationConfig) -> Sampling:
        """The settings for a model.

        Raises:
            ValueError: on a setting of the makers that cannot be followed.
        """
        if self.temperature is not None:
            return Sampling(**self._given())
        return dataclasses.replace(makers_sampling(generation), **self._given())
