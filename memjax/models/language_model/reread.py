"""Re-read window: the last tokens are read again before each segment.

    Y = LM([last n tokens ‖ H]),   an empty cache for each segment H of s tokens

Any backbone, unchanged, sees n to n + s tokens of the text. Its state is the
tokens themselves, 4 bytes each; that of a window is keys and values in every layer.
The price is compute: n + s tokens are read for s new ones. It is the strongest baseline
without a memory at a given number of tokens, because the first tokens that it sees are
the first of a cache, as when the backbone was trained. n = 0 reads each segment alone,
the baseline of HMT's official program (He et al. 2024,
https://arxiv.org/abs/2405.06067).

Segments are counted from the text's start, so every split of a text into calls gives
the same. Calls of whole segments read (n + s) / s tokens a token; a call that ends
inside a segment reads the segment's beginning, and the n tokens before it, again. So a
single token costs up to n + s.

Shapes: B batch, T time, E width of the features, V vocabulary, n tokens that are read
again, s segment, m segments.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from memjax import mechanisms
from memjax.checks import check_sizes, require_instance
from memjax.models import ragged
from memjax.models.base import FixedSizeMemory
from memjax.models.language_model.model import LanguageModel
from memjax.models.remat import cond_with_remat
from memjax.nnx.compilation import compiled
from memjax.nnx.params import copy

NOT_SAVED = (
    "model must be a LanguageModel, HMT or MPlus, got a ReReadWindow, which is a way "
    "of reading: export its backbone alone (--backbone-only)"
)
#: Tokens that are read side by side; more segments take turns, to bound the memory.
TOGETHER = 2**13


class ReReadState(NamedTuple):
    """Tokens to re-read, and the open segment.

    Attributes:
        tokens: the last n tokens before the open segment, then its own; 0 behind them.
        before: number of tokens before the open segment, in [0, n].
        length: number of tokens in the open segment, in [0, s).
    """

    tokens: Int[Array, "B _"]
    before: Int[Array, " B"]
    length: Int[Array, " B"]


class ReReadWindow(FixedSizeMemory, nnx.Module):
    """A backbone that reads the last `reread` tokens again before each segment.

    Holds the backbone's parameters only.

    Example:
        model = ReReadWindow(backbone, reread=512, segment=512)
        state, logits = model(model.init_state(batch), tokens)
    """

    def __init__(self, backbone: LanguageModel, *, reread: int, segment: int):
        """Shares the backbone's parameters.

        Args:
            backbone: any language model.
            reread: n, at least 0.
            segment: s, at least 1.

        Raises:
            ValueError: if a size is out of range, or the backbone's positions or
                capacity allow fewer than n + s tokens.
        """
        require_instance("backbone", backbone, LanguageModel)
        check_sizes(segment=segment)
        check_sizes(least=0, reread=reread)
        capacity = backbone.config.capacity
        if capacity is not None and reread + segment > capacity:
            raise ValueError(
                f"reread + segment must be at most {capacity}, which the backbone "
                f"holds, got {reread} + {segment}"
            )
        # Variables of its own, which share the arrays: training one leaves the other.
        self.backbone = copy(backbone)
        self.reread = reread
        self.segment = segment

    @property
    def model_type(self) -> str:
        """None of its own.

        Raises:
            ValueError: always; see `save`.
        """
        raise ValueError(NOT_SAVED)

    def plain(self) -> LanguageModel:
        """The backbone with its adapters merged."""
        return self.backbone.plain()

    def save(self, *_: object, **__: object) -> str:
        """Refuses: this is a way to read with the backbone, without files of its own.

        Raises:
            ValueError: always.
        """
        raise ValueError(NOT_SAVED)

    @property
    def window(self) -> int:
        """s: calls of whole segments are fast."""
        return self.segment

    @property
    def reach(self) -> int:
        """n + s: the state has the tokens themselves."""
        return self.reread + self.segment

    def init_state(self, batch: int, capacity: int | None = None) -> ReReadState:
        """No tokens.

        Args:
            batch: B.
            capacity: without a meaning, as the memory has one size.
        """
        check_sizes(batch=batch)

        def zeros(*shape):
            return jnp.zeros((batch, *shape), jnp.int32)

        return ReReadState(zeros(self._most), zeros(), zeros())

    @compiled
    def reset(self, state: ReReadState, mask: Bool[Array, " B"]) -> ReReadState:
        """Forgets the tokens of batch elements in `mask`, at their document's start."""
        return mechanisms.replace_rows(state, self.init_state(mask.shape[0]), mask)

    def _check(self, state, tokens, lengths=None):
        ragged.check_kind(state, ReReadState)
        ragged.check_tokens(tokens, state.length.shape[0], self.vocab_size)
        ragged.check_lengths(lengths, tokens, 0)

    @compiled(check=_check)
    def features(
        self,
        state: ReReadState,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[ReReadState, Float[Array, "B T E"]]:
        """Reads tokens; returns the backbone's states at them.

        Args:
            state: the tokens so far.
            tokens: in [0, V), T >= 1; values are not checked inside jit.
            lengths: batch element b reads its first `lengths[b]` tokens, 0 to T;
                features behind them have no meaning. None is T for all.

        Raises:
            ValueError: on a state of another model, tokens of another shape, or a known
                value out of range.
        """
        new = tokens.shape[1]
        count = new if lengths is None else lengths.astype(jnp.int32)
        # The new tokens right behind those that are carried.
        held = state.before + state.length
        text = ragged.join(state.tokens, held, tokens, self._most + new)
        end = state.length + count
        # What T tokens touch at most: an open segment has at most s - 1.
        segments = -(-(self.segment - 1 + new) // self.segment)
        y = self._read_segments(text, state.before, end, segments)
        at = jnp.arange(new, dtype=jnp.int32)[None] + state.length[:, None]
        segment, inside = at // self.segment, at % self.segment
        first = self._before(state.before[:, None], segment)
        rows = segment * self._most + first + inside
        features = ragged.take(y.reshape(y.shape[0], -1, y.shape[-1]), rows)
        return self._carry(text, state.before, end), features

    @compiled(check=_check)
    def __call__(
        self, state: ReReadState, tokens: Int[Array, "B T"]
    ) -> tuple[ReReadState, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the tokens that are carried on."""
        state, features = self.features(state, tokens)
        return state, self.logits(features)

    @property
    def _most(self) -> int:
        """n + s, the longest input of the backbone."""
        return self.reread + self.segment

    def _shown(self):
        sizes = {"reread": self.reread, "segment": self.segment}
        return sizes | {"backbone": self.backbone}

    def _before(self, before, segment):
        """Number of tokens re-read before a segment; the open one is 0."""
        return jnp.minimum(before + segment * self.segment, self.reread)

    def _slices(self, text, before, segment):
        """Tokens [B, m, n + s]: those before each segment, and its own."""
        start = before[:, None] + segment * self.segment
        first = start - self._before(before[:, None], segment)
        at = first[..., None] + jnp.arange(self._most, dtype=jnp.int32)[None, None]
        # Behind the text's end anything will do: no earlier token sees it.
        at = jnp.minimum(at, text.shape[1] - 1)
        return jax.vmap(lambda text, at: text[at])(text, at)

    def _read_segments(self, text, before, end, count):
        """The backbone's states [B, m, n + s, E] at all that `_slices` gives."""
        segment = jnp.arange(count, dtype=jnp.int32)[None]
        pieces = self._slices(
            text, before, jnp.broadcast_to(segment, (len(end), count))
        )

        def encode(model, tokens):
            return model.encode(model.embed(tokens))

        shape = (len(end), self._most, self.width)
        # The last one has no tokens if all begin at a segment's start.
        last = cond_with_remat(
            "recompute",
            jnp.any(end > (count - 1) * self.segment),
            encode,
            lambda model, tokens: jnp.zeros(shape, model.config.dtype),
            self.backbone,
            pieces[:, -1],
        )
        if count == 1:
            return last[:, None]
        together = max(1, TOGETHER // (len(end) * self._most))
        others = jax.lax.map(
            lambda tokens: encode(self.backbone, tokens),
            jnp.moveaxis(pieces[:, :-1], 1, 0),
            batch_size=min(together, count - 1),
        )
        return jnp.concatenate([jnp.moveaxis(others, 0, 1), last[:, None]], axis=1)

    def _carry(self, text, before, end):
        """The state at `end` tokens behind the old open segment's start."""
        last, length = end // self.segment, end % self.segment
        before_last = self._before(before, last)
        (tokens,) = jnp.moveaxis(self._slices(text, before, last[:, None]), 1, 0)
        at = jnp.arange(self._most, dtype=jnp.int32)[None]
        known = at < (before_last + length)[:, None]
        return ReReadState(jnp.where(known, tokens, 0), before_last, length)
