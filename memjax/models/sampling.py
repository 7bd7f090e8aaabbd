"""Sampling the next token from logits.

The steps and their order are those of transformers: repetition penalty, temperature,
top-k, top-p, min-p. The presence penalty, which transformers has not, is OpenAI's, and
comes where vLLM has it, after the repetition penalty.

Shapes: B batch, T time, V vocabulary.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax.checks import check_numbers

#: Of a factor of logits, which would be infinite in float32.
LARGEST = 1e30


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of the sampler.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: keep the k likeliest tokens, and those as likely as the k-th; 0 keeps
            all.
        top_p: then keep the fewest likeliest tokens whose probabilities reach p, in
            (0, 1]; 1 keeps all. Of equally likely tokens the last are kept.
        min_p: then keep tokens at least p times as likely as the likeliest, in [0, 1].
        repetition_penalty: divides the positive logits of tokens of the prompt and the
            answer, and multiplies the negative; above 0, and 1 is none.
        presence_penalty: taken from the logits of the answer's tokens, in [-2, 2].
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0

    def __post_init__(self):
        check_numbers(**vars(self))
        if not hasattr(self.top_k, "__index__"):
            raise ValueError(f"top_k must be an integer, got {self.top_k}")
        # NaN is in no range.
        for name, allowed, is_allowed in (
            ("temperature", ">= 0", self.temperature >= 0),
            ("temperature", f"at most {LARGEST:g}", self.temperature <= LARGEST),
            ("top_k", ">= 0", self.top_k >= 0),
            ("top_k", "below 2**31", self.top_k < 2**31),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("min_p", "in [0, 1]", 0 <= self.min_p <= 1),
            ("repetition_penalty", "> 0", self.repetition_penalty > 0),
            (
                "repetition_penalty",
                f"at most {LARGEST:g}",
                self.repetition_penalty <= LARGEST,
            ),
            ("presence_penalty", "in [-2, 2]", -2 <= self.presence_penalty <= 2),
        ):
            if not is_allowed:
                value = getattr(self, name)
                raise ValueError(f"{name} must be {allowed}, got {value}")

    @property
    def penalises(self) -> bool:
        """Whether the tokens that were read or drawn matter to the next."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0


class Settings(NamedTuple):
    """`Sampling` as arrays, one program for all values, and the tokenizer's size."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]
    repetition_penalty: Float[Array, ""]
    presence_penalty: Float[Array, ""]
    vocab_size: Int[Array, ""]

    @classmethod
    def of(cls, sampling: Sampling, vocab_size: int | None = None) -> "Settings":
        """The settings of a sampler; tokens from `vocab_size` on are never drawn."""
        values = dataclasses.asdict(sampling)
        integers = {
            "top_k": values.pop("top_k"),
            "vocab_size": np.iinfo(np.int32).max if vocab_size is None else vocab_size,
        }
        return cls(
            **jax.tree.map(jnp.float32, values), **jax.tree.map(jnp.int32, integers)
        )


class Seen(NamedTuple):
    """Tokens that penalties count.

    Attributes:
        read: of the prompt or the answer.
        drawn: of the answer.
    """

    read: Bool[Array, "B V"]
    drawn: Bool[Array, "B V"]

    @classmethod
    def of(cls, sampling: Sampling, read: Bool[Array, "B V"]) -> "Seen | None":
        """With tokens of the prompt; None without penalties."""
        if not sampling.penalises:
            return None
        return cls(read, jnp.zeros_like(read))

    def after(self, tokens: Int[Array, " B"]) -> "Seen":
        """With tokens that were drawn."""
        ids = jnp.arange(self.read.shape[-1], dtype=jnp.int32)[None]
        new = ids == tokens[:, None]
        return Seen(self.read | new, self.drawn | new)


def draw(
    logits: Float[Array, "B V"],
    key: PRNGKeyArray,
    settings: Settings,
    seen: Seen | None = None,
) -> Int[Array, " B"]:
    """Draws one token for each batch element."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    logits = jnp.where(ids[None] < settings.vocab_size, logits, -jnp.inf)
    if seen is not None:
        logits = _penalised(logits, settings, seen)

    def greedy():
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sampled():
        limited = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
        scaled = logits / settings.temperature
        # Sorting the vocabulary is dear, so only where something is left out.
        kept = jax.lax.cond(
            limited, lambda x: _likeliest(x, settings), lambda x: x, scaled
        )
        return jax.random.categorical(key, kept, axis=-1).astype(jnp.int32)

    # The limit of a vanishing temperature; dividing by 0 would give NaN.
    return jax.lax.cond(settings.temperature == 0, greedy, sampled)


def _penalised(logits, settings, seen):
    penalty = settings.repetition_penalty
    less = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen.read, less, logits)
    return logits - jnp.where(seen.drawn, settings.presence_penalty, 0.0)


def _likeliest(logits, settings):
    """The logits of the top k, of these the top p, then by min_p; -inf elsewhere."""
    size = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1)
    first = jnp.where(settings.top_k > 0, size - settings.top_k, 0)
    first = jnp.maximum(first, 0)
    threshold = jax.lax.dynamic_slice_in_dim(ordered, first, 1, axis=-1)
    ordered = jnp.where(ordered < threshold, -jnp.inf, ordered)
    # From the least likely on: what is left out has at most 1 - p together.
    cumulative = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
    left_out = (cumulative <= 1 - settings.top_p) & (settings.top_p < 1)
    # At least one token remains.
    left_out = jnp.minimum(left_out.sum(axis=-1, keepdims=True), size - 1)
    least = jnp.take_along_axis(ordered, left_out, axis=-1)
    least = jnp.maximum(least, threshold)
    # Of equal logits, which the sum may divide, those of the highest ids are kept.
    equal = logits == least
    room = (ordered == least).sum(axis=-1, keepdims=True) - (
        left_out - (ordered < least).sum(axis=-1, keepdims=True)
    )
    later = jnp.cumsum(equal[:, ::-1], axis=-1)[:, ::-1]
    kept = (logits > least) | (equal & (later <= room))
    likeliest = ordered[:, -1:]
    kept &= logits >= likeliest + jnp.log(settings.min_p)
    return jnp.where(kept, logits, -jnp.inf)
