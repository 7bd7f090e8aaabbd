"""M+: a language model with a pool of memory tokens per layer and a long-term store.

    write   a chunk of up to C tokens is compressed to K memory tokens per layer. They
            replace K random rows of the layer's pool of N, which go to the store.
    read    in layer l tokens attend to [bos_l ; R rows of the store ; the pool]. The
            retriever selects the R rows whose keys fit the tokens' queries best.

Wang et al. (2025), https://arxiv.org/abs/2502.00592. MemoryLLM, without a store: Wang
et al. (2024), https://arxiv.org/abs/2402.04624.

Called as a language model it remembers what it reads: tokens attend to the memory and
to the open chunk, and a full chunk is written. The rows for the next chunk are then
retrieved by queries of earlier tokens, so that no score depends on what it predicts.
`inject`, `flush` and `read` give the caller control of when to write and to read; after
`inject`, which reads nothing, the rows for the next call are retrieved by queries from
the compression of the last chunk. With an empty memory the logits are those of the
backbone with the adapter that reads. An eager call of any of them is one program, which
is compiled once a shape.

Shapes: B batch, L layers, T time, K memory tokens of a chunk, C longest chunk, D model,
V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax import mechanisms
from memjax.checks import check_sizes
from memjax.models import ragged
from memjax.models.base import FixedSizeMemory
from memjax.models.checkpoints.saving import Contents, Savable
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.model import LanguageModel
from memjax.models.mplus import kv_cache, read, write
from memjax.models.mplus.checkpoints import saving
from memjax.models.mplus.read import ReadOptions, ReadTrace
from memjax.models.mplus.state import Initial, KVCache, MPlusState
from memjax.models.mplus.weights import MPlusWeights
from memjax.models.offload import near
from memjax.models.sampling import Sampling
from memjax.nnx.compilation import compiled
from memjax.nnx.params import as_arrays, as_params


class MPlus(FixedSizeMemory, Savable, nnx.Module):
    """A backbone with latent memory: itself a language model.

    Holds parameters; the memory is an argument and a result. `MPlusWeights` says what
    they are. The backbone is frozen.

    Example:
        model = add_mplus(backbone, MPlusConfig(), rngs=nnx.Rngs(0))
        state = model.inject(model.init_state(1), book)
        # The whole question chooses which rows of the store are read.
        options = ReadOptions(prompt_length=question.shape[1], max_new_tokens=10)
        cache, logits = model.read(state, question, options)
    """

    def __init__(self, weights: MPlusWeights, initial: Initial | None = None):
        self.config = weights.config
        self.backbone = weights.backbone
        self.write_adapter = nnx.data(as_params(weights.write_adapter))
        self.read_adapter = nnx.data(as_params(weights.read_adapter))
        self.bos = nnx.Param(weights.bos)
        self.position = nnx.Param(weights.position)
        #: Memory that every text starts from, as a checkpoint brings it, or None.
        self.initial: Initial | None = nnx.data(initial)
        if weights.config.has_retriever:
            self.query = nnx.data(as_params(weights.query))
            self.key = nnx.data(as_params(weights.key))
            self.encoder_query = nnx.data(as_params(weights.encoder_query))

    @property
    def weights(self) -> MPlusWeights:
        """The parameters as arrays, and the config."""
        names = ["write_adapter", "read_adapter", "bos", "position"]
        if self.config.has_retriever:
            names += ["query", "key", "encoder_query"]
        values = {name: as_arrays(getattr(self, name)) for name in names}
        return MPlusWeights(self.config, self.backbone, **values)

    def replace(self, **changes: Any) -> "MPlus":
        """The same model with these `changes` to its weights or its config."""
        return MPlus(self.weights._replace(**changes), self.initial)

    @property
    def model_type(self) -> str:
        """The model_type under which it is saved: the official program's."""
        return saving.MODEL_TYPE

    def plain(self) -> LanguageModel:
        """The backbone without the memory, adapters merged."""
        return self.backbone.plain()

    def contents(self, dtype: Dtype) -> Contents:
        """Content of the folder of `save`, for the official program too.

        What was injected is in the state, see `memjax.save_memory`. The program's R is
        a multiple of K, and rounded up for it where ours is none.

        Raises:
            ValueError: if dtype cannot hold the initial store's ages, or attention
                finds the rows of the store, which no model of the program's does.
        """
        saving.require_official(self.config, "save")
        return saving.contents(self.weights, self.initial, self.plain(), dtype)

    @property
    def window(self) -> int:
        """C: calls with multiples of C tokens are fastest."""
        return self.config.chunk_size

    @property
    def reach(self) -> int:
        """Tokens in chunks whose memory tokens fill pool and store."""
        rows = self.config.pool_size + self.config.store_size * bool(
            self.config.num_retrieved
        )
        return rows // self.config.num_memory_tokens * self.config.chunk_size

    @property
    def layers(self) -> int:
        """L."""
        return len(self.backbone.blocks)

    def init_state(
        self,
        batch: int,
        capacity: int | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> MPlusState:
        """The memory a sequence starts from: empty, or the checkpoint's.

        Args:
            batch: B.
            capacity: without a meaning, as the memory has one size.
            key: draws which rows the pools drop, differently for each batch element;
                None is `jax.random.key(0)`.

        Raises:
            ValueError: if `batch` is below 1.
        """
        check_sizes(batch=batch)
        # What a pool drops is part of the state, so that a run can be repeated.
        key = jax.random.key(0) if key is None else key
        state = write.empty_state(self.weights, batch, key)
        return state if self.initial is None else self.initial.fill(state)

    @compiled
    def reset(self, state: MPlusState, mask: Bool[Array, " B"]) -> MPlusState:
        """Restarts the batch elements in `mask`; their random keys stay.

        Raises:
            ValueError: on a mask that is not bool [B].
        """
        # A fresh key would repeat the draws of the document before.
        empty = self.init_state(state.num_valid.shape[0])._replace(key=state.key)

        # Pool and store may be on the host, where they are cleared in place.
        def clear(old, new):
            return near(mechanisms.replace_rows, old, new, mask, stays=True)

        return jax.tree.map(clear, state, empty)

    def _check(self, state, tokens, lengths=None):
        ragged.check_kind(state, MPlusState)
        ragged.check_tokens(tokens, state.num_valid.shape[0], self.vocab_size)
        ragged.check_lengths(lengths, tokens, 0)

    def _check_compress(self, state, tokens, memory=None):
        self._check(state, tokens)
        write.check_compress(self.weights, tokens, memory)

    def _check_update(self, state, new, dropped=None):
        write.check_update(self.weights, state, new, dropped)

    def _check_read(self, state, tokens, options=ReadOptions(), lengths=None):  # noqa: B008
        read.check(self.weights, state, tokens, options, lengths)

    def _check_decode(self, cache, tokens, *, only_new=False, state=None):
        read.check_decode(self.weights, cache, tokens, only_new, state)

    @compiled(check=_check)
    def features(
        self,
        state: MPlusState,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[MPlusState, Float[Array, "B T D"]]:
        """Reads tokens and writes the chunks that they complete; returns features.

        Args:
            state: the memory so far.
            tokens: in [0, V), T >= 1. Inside jit values are not checked; one out of
                range makes the features of its batch element NaN.
            lengths: batch element b reads its first `lengths[b]` tokens, 0 to T;
                features behind them have no meaning. None is T for all.

        Raises:
            ValueError: on tokens of another shape, or out of range outside of jit;
                lengths likewise.
        """
        read = kv_cache.read_piece
        return write.by_chunks(self.weights, state, tokens, lengths, read)

    @compiled(check=_check)
    def __call__(
        self, state: MPlusState, tokens: Int[Array, "B T"]
    ) -> tuple[MPlusState, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the memory after the last."""
        state, features = self.features(state, tokens)
        return state, self.logits(features)

    @compiled(check=_check)
    def inject(
        self,
        state: MPlusState,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
    ) -> MPlusState:
        """Writes tokens into memory, C at a time; the rest stays in the open chunk.

        Args:
            state: the memory so far.
            tokens: in [0, V), any T >= 1.
            lengths: of the texts, in [0, T]; what follows them is padding, which must
                be in [0, V) too. None is T for all.

        Raises:
            ValueError: as `features`; on lengths of another shape, or known ones out of
                range.
        """
        return write.inject(self.weights, state, tokens, lengths)

    @compiled
    def flush(self, state: MPlusState) -> MPlusState:
        """Writes the open chunks that have at least `min_chunk_size` tokens.

        Shorter ones stay open: with fewer than K tokens a chunk writes old memory
        again, and a few tokens have little weight in it.
        """
        rows = state.length >= self.config.min_chunk_size
        return write.write_open(self.weights, state, rows)

    @compiled(check=_check_compress)
    def compress(
        self,
        state: MPlusState,
        tokens: Int[Array, "B T"],
        memory: Float[Array, "B L K D"] | None = None,
    ) -> Float[Array, "B L K D"]:
        """Compresses T tokens to memory tokens, which `update` can store.

        Args:
            state: the chunk attends to the newest K rows of its pool.
            tokens: in [0, V), T in [1, C].
            memory: rows to attend to instead.

        Raises:
            ValueError: as `features`; on more than C tokens, or memory of another
                shape.
        """
        return write.compress(self.weights, state, tokens, None, memory)

    @compiled(check=_check_update)
    def update(
        self,
        state: MPlusState,
        new: Float[Array, "B L K D"],
        dropped: Int[Array, "B L K"] | None = None,
    ) -> MPlusState:
        """Stores new memory tokens; a full pool drops K rows into the long-term store.

        Args:
            state: the memory so far.
            new: from `compress`.
            dropped: rows that a full pool drops, in rising order; None draws them.

        Raises:
            ValueError: on arrays of another shape, or known rows to drop that are out
                of range or do not rise.
        """
        rows = jnp.ones(new.shape[0], bool)
        return write.update(self.weights, state, new, dropped, rows)

    @compiled(check=_check_read)
    def read(
        self,
        state: MPlusState,
        tokens: Int[Array, "B T"],
        options: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[KVCache, Float[Array, "B T V"]]:
        """Reads tokens with the memory, which stays as it is.

        Args:
            state: the memory; its open chunk is read before the tokens.
            tokens: in [0, V), T >= 1.
            options: which memory is read, and by which tokens it is chosen.
            lengths: of the texts, in [1, T]; what follows them is padding, which must
                be in [0, V) too. None is T for all.

        Returns:
            The KV cache, for `decode`, and next-token logits; those of padding have no
            meaning.

        Raises:
            ValueError: as `features`; on options or lengths of another shape, out of
                range, or without what they need.
        """
        cache, features, _ = read.read(self.weights, state, tokens, options, lengths)
        return cache, self.logits(features)

    @compiled(check=_check_read)
    def trace_read(
        self,
        state: MPlusState,
        tokens: Int[Array, "B T"],
        options: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T V"], ReadTrace]:
        """The logits of `read`, and a trace of its layers."""
        _, features, trace = read.read(self.weights, state, tokens, options, lengths)
        return self.logits(features), trace

    @compiled(check=_check_decode)
    def decode(
        self,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        *,
        only_new: bool = False,
        state: MPlusState | None = None,
    ) -> tuple[KVCache, Float[Array, "B T V"]]:
        """Reads further tokens with a KV cache; see `read.decode`."""
        return read.decode(self.weights, cache, tokens, only_new, state)

    def generate(
        self,
        state: MPlusState,
        prompt: Int[Array, "B T"],
        max_new_tokens: int,
        *,
        key: PRNGKeyArray,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        lengths: Int[Array, " B"] | None = None,
    ) -> Int[Array, "B n"]:
        """Samples an answer to a prompt; the memory stays as it is.

        The whole prompt retrieves rows once, which all new tokens read. (The function
        `memjax.models.generate` continues a text instead, and remembers it.)

        Args:
            state: the memory.
            prompt: tokens in [0, V), T >= 1.
            max_new_tokens: n >= 1.
            key: for sampling.
            sampling: see `Sampling`.
            lengths: of the prompts, as in `read`.

        Raises:
            ValueError: as `read`, or if max_new_tokens is below 1.
        """
        self._check(state, prompt)
        ragged.check_lengths(lengths, prompt, 1)
        check_sizes(max_new_tokens=max_new_tokens)
        return self._generate(state, prompt, max_new_tokens, key, sampling, lengths)

    @compiled
    def _generate(self, state, prompt, count, key, sampling, lengths):
        return read.generate(self.weights, count, sampling, state, prompt, lengths, key)
