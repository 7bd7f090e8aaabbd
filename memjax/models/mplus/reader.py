"""Answer from a memory of M+, which is not changed, token by token.

`MPlus.read` gives a KV cache of the memory and a prompt. `MemoryReader` is a model with
that cache for its state, so that `generate` samples an answer too.

Shapes: B batch, T time, D model, V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from memjax import mechanisms
from memjax.models import ragged
from memjax.models.adapters import Frozen
from memjax.models.language_model.model import LanguageModel
from memjax.models.mplus import attention_retrieval, kv_cache, read
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions
from memjax.models.mplus.state import KVCache, MPlusState
from memjax.nnx.compilation import compiled
from memjax.nnx.params import as_arrays


class MemoryReader(nnx.Module):
    """A language model that continues from `begin` and writes no memory.

    Args:
        model: M+ or MemoryLLM.
        state: the memory.

    Example:
        reader = MemoryReader(model, state)
        cache = reader.begin(state, question[:, :-1], room=101)
        answer = generate(reader, cache, question[:, -1:], 100, key=key).tokens
    """

    def __init__(self, model: MPlus, state: MPlusState):
        self.model = model
        # Attention searches the store for every token, the learned retriever once.
        searched = state.store if model.config.by_attention else None
        self.store = nnx.data(jax.tree.map(Frozen, searched))

    @property
    def backbone(self) -> LanguageModel:
        """The language model that the memory is around."""
        return self.model.backbone

    @property
    def vocab_size(self) -> int:
        """V; tokens are in [0, V)."""
        return self.model.vocab_size

    @property
    def width(self) -> int:
        """D, of the features."""
        return self.model.width

    @property
    def window(self) -> int:
        """1: an answer is read as it is drawn."""
        return 1

    @property
    def reach(self) -> None:
        """None: the cache refuses more than it holds."""

    @property
    def first_scored(self) -> int:
        """0: no logit has seen what it predicts."""
        return 0

    @property
    def can_pad(self) -> bool:
        """True."""
        return True

    def init_state(self, batch: int, capacity: int | None = None) -> KVCache:
        """A cache without memory, with room for `capacity` tokens (None: one)."""
        prefix = self.model.config.prefix
        slots = prefix + (capacity or 1)
        return kv_cache.empty(self.model.weights, batch, prefix, slots)

    def reset(self, state: KVCache, mask: Bool[Array, " B"]) -> KVCache:
        """Empties the caches of the batch elements in `mask`: of the memory too."""
        # As many slots as before.
        return mechanisms.replace_rows(state, jax.tree.map(jnp.zeros_like, state), mask)

    def remaining(self, state: KVCache) -> int:
        """Number of further tokens that the cache can hold."""
        filled = state.prefix_length + state.length
        return state.visible.shape[1] - int(filled.max())

    def reserve(self, state: KVCache, tokens: int) -> KVCache:
        """The same cache.

        Raises:
            ValueError: if it has no room for `tokens`.
        """
        if tokens > (room := self.remaining(state)):
            raise ValueError(
                f"{tokens} tokens are to be read; `begin` left room for {room} more"
            )
        return state

    def _check_begin(self, state, tokens, lengths=None, *, room):
        options = ReadOptions(max_new_tokens=room)
        read.check(self.model.weights, state, tokens, options, lengths)

    @compiled(check=_check_begin)
    def begin(
        self,
        state: MPlusState,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
        *,
        room: int,
    ) -> KVCache:
        """Reads the memory, its open chunk, and the beginning of a prompt.

        All tokens given here choose the rows of the long-term store.

        Args:
            state: the memory.
            tokens: in [0, V), T >= 1.
            lengths: of the texts, in [1, T]; what follows them is padding. None is T.
            room: tokens that are to be read afterwards, at least 0.

        Raises:
            ValueError: as `MPlus.read`.
        """
        weights = self.model.weights
        # Where attention chooses, no token chooses for another.
        chooses = None if weights.config.by_attention else tokens.shape[1]
        options = ReadOptions(prompt_length=chooses, max_new_tokens=room)
        return read.read(weights, state, tokens, options, lengths)[0]

    def _check(self, state, tokens, lengths=None):
        ragged.check_tokens(tokens, state.length.shape[0], self.vocab_size)
        ragged.check_lengths(lengths, tokens, 0)

    @compiled(check=_check)
    def features(
        self,
        state: KVCache,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[KVCache, Float[Array, "B T D"]]:
        """Reads tokens into the cache; those that do not fit give NaN."""
        weights = self.model.weights
        if lengths is None:
            lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
        h = weights.backbone.embed(tokens)
        searched = attention_retrieval.of_store(weights, as_arrays(self.store))
        cache, y, _ = kv_cache.read_tokens(
            weights, state, h, lengths, attention_retriever=searched
        )
        return cache, y

    def logits(self, features: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores of the next token, in float32."""
        return self.model.logits(features)

    @compiled(check=_check)
    def __call__(
        self, state: KVCache, tokens: Int[Array, "B T"]
    ) -> tuple[KVCache, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the cache after the last."""
        state, features = self.features(state, tokens)
        return state, self.logits(features)
