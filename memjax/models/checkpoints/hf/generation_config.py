"""The makers' sampling: `generation_config.json`, as transformers reads it."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from memjax.checks import short
from memjax.models.checkpoints.hf import text_keys
from memjax.models.sampling import Sampling

#: What transformers takes for a key that is missing, where it samples.
DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Ids of tokens, and the makers' sampling.

    Attributes:
        eos_ids: tokens that end a text or a turn; all are below the vocabulary's size.
        bos_id: the token that begins a text.
        pad_id: the token that fills up short rows.
        record: other entries of `generation_config.json`, not checked before they are
            used.
        source: file of the record, for errors.
        names: the file's own names of entries, where they are others.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "generation_config.json"
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def token_ids(self) -> dict[str, Any]:
        """The ids as entries of a `config.json`; null where there is none."""
        ids = list(self.eos_ids)
        return {
            "bos_token_id": self.bos_id,
            "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
            "pad_token_id": self.pad_id,
        }

    @property
    def sampling(self) -> Sampling | None:
        """How the makers draw; None where they do not say.

        Without `do_sample` the likeliest token is taken, as transformers does.

        Raises:
            ValueError: on a setting that is not built here, or a value out of its
                range, by name.
        """
        record = {key: value for key, value in self.record.items() if value is not None}
        if not record.keys() & {"do_sample", "repetition_penalty", *DEFAULTS}:
            return None
        for name, value in text_keys.effective(
            record, text_keys.GENERATION_REFUSED
        ).items():
            raise self._refusal(name, value, "is not built here")
        if not isinstance(record.get("do_sample", False), bool):
            raise self._refusal(
                "do_sample", record["do_sample"], "must be true or false"
            )
        names = ["repetition_penalty"]
        names += DEFAULTS if record.get("do_sample") else []
        given: dict[str, Any] = {"temperature": 0.0}
        for name in names:
            value = record.get(name, DEFAULTS.get(name, 1.0))
            kinds = (int,) if name == "top_k" else (int, float)
            if type(value) not in kinds:
                raise self._refusal(name, value, "must be a number")
            given[name] = value
        try:
            numbers: dict[str, Any] = {
                name: value if name == "top_k" else float(value)
                for name, value in given.items()
            }
            return Sampling(**numbers)
        except (ValueError, OverflowError) as error:
            text = str(error)
            for name, own in self.names.items():
                text = re.sub(rf"\b{name}\b", own, text)
            raise ValueError(f"{self.source}: {text}{_ADVICE}") from error

    def _refusal(self, name: str, value: Any, reason: str) -> ValueError:
        own = self.names.get(name, name)
        return ValueError(f"{self.source}: {own}={short(value)} {reason}{_ADVICE}")


_ADVICE = "; say how to draw, for example temperature=0.7"
