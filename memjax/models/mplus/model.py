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
`inject`, `flush` and `read` give the caller control of when to write and to read. With
an empty memory the logits are those of the backbone with the adapter that reads.

Shapes: B batch, L layers, T time, K memory tokens of a chunk, C longest chunk, D model,
V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from memjax import mechanisms
from memjax.checks import check_sizes
from memjax.models import ragged
from memjax.models.language_model.model import LanguageModel
from memjax.models.mplus import kv_cache, read, write
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions, ReadTrace
from memjax.models.mplus.state import Initial, KVCache, MPlusState
from memjax.models.mplus.weights import MPlusWeights, init_weights
from memjax.models.offload import near, require_place
from memjax.models.sampling import Sampling
from memjax.nnx.params import as_arrays, as_params, params_key


class MPlus(nnx.Module):
    """A backbone with latent memory: itself a language model.

    Holds parameters; the memory is an argument and a result. `MPlusWeights` says what
    they are. The backbone is frozen.

    Example:
        model = mplus(backbone, MPlusConfig(), rngs=nnx.Rngs(0))
        state = model.inject(model.init_state(1), book)
        cache, logits = model.read(state, question)
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
    def vocab_size(self) -> int:
        """V; tokens are in [0, V)."""
        return self.backbone.vocab_size

    @property
    def window(self) -> int:
        """C: calls with multiples of C tokens are fastest."""
        return self.config.chunk

    @property
    def first_scored(self) -> int:
        """0: no logit has seen what it predicts."""
        return 0

    def remaining(self, state: MPlusState) -> int | None:
        """None: every chunk starts the backbone afresh."""
        return None

    @property
    def width(self) -> int:
        """D, the width of memories and features."""
        return self.backbone.width

    @property
    def layers(self) -> int:
        """L."""
        return len(self.backbone.blocks)

    def init_state(self, batch: int, *, key: PRNGKeyArray | None = None) -> MPlusState:
        """The memory a sequence starts from: empty, or the checkpoint's.

        Args:
            batch: B.
            key: draws which rows the pools drop, differently for each batch element;
                None is `jax.random.key(0)`.
        """
        # What a pool drops is part of the state, so that a run can be repeated.
        key = jax.random.key(0) if key is None else key
        state = write.empty_state(self.weights, batch, key)
        return state if self.initial is None else self.initial.fill(state)

    def reset(self, state: MPlusState, mask: Bool[Array, " B"]) -> MPlusState:
        """Restarts the batch elements in `mask`; their random keys stay."""
        # A fresh key would repeat the draws of the document before.
        empty = self.init_state(mask.shape[0])._replace(key=state.key)
        # Pool and store may lie on the host, where they are cleared in place.
        clear = lambda old, new: near(mechanisms.reset, old, new, mask, stays=True)
        return jax.tree.map(clear, state, empty)

    def features(
        self, state: MPlusState, tokens: Int[Array, "B T"]
    ) -> tuple[MPlusState, Float[Array, "B T D"]]:
        """Reads tokens and writes the chunks that they complete; returns features.

        Args:
            state: the memory so far.
            tokens: in [0, V), T >= 1. Inside jit values are not checked; one out of
                range makes the features of its batch element NaN.

        Raises:
            ValueError: on tokens of another shape, or out of range outside of jit.
        """
        self._check(state, tokens)
        return write.by_chunks(self.weights, state, tokens, kv_cache.read_piece)

    def logits(self, features: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Scores of the next token, in float32."""
        return self.backbone.logits(features)

    def __call__(
        self, state: MPlusState, tokens: Int[Array, "B T"]
    ) -> tuple[MPlusState, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the memory after the last."""
        state, features = self.features(state, tokens)
        return state, self.logits(features)

    def inject(self, state: MPlusState, tokens: Int[Array, "B T"]) -> MPlusState:
        """Writes tokens into memory, C at a time; the rest stays in the open chunk.

        Args:
            state: the memory so far.
            tokens: in [0, V), any T >= 1.

        Raises:
            ValueError: as `features`.
        """
        self._check(state, tokens)
        # Nothing is read here: only compression changes the memory.
        skip = lambda weights, state, piece, lengths: (state, None)
        state, _ = write.by_chunks(self.weights, state, tokens, skip)
        # The open chunk has tokens that were not read, which the cache lacks.
        return state._replace(cache_ready=jnp.zeros_like(state.cache_ready))

    def flush(self, state: MPlusState) -> MPlusState:
        """Writes the open chunks that have at least `least_chunk` tokens.

        Shorter ones stay open: with fewer than K tokens a chunk writes old memory
        again, and a few tokens have little weight in it.
        """
        return write.write_open(
            self.weights, state, state.length >= self.config.least_chunk
        )

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
        self._check(state, tokens)
        if tokens.shape[1] > self.config.chunk:
            raise ValueError(
                f"tokens must be at most chunk={self.config.chunk} a batch element, "
                f"got {tokens.shape[1]}"
            )
        if memory is not None:
            batch, count = tokens.shape[0], self.config.tokens
            self.weights.check_rows("memory", memory, batch, count)
        return write.compress(self.weights, state, tokens, None, memory)

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
            ValueError: on arrays of another shape.
        """
        return write.update(
            self.weights, state, new, dropped, jnp.ones(new.shape[0], bool)
        )

    def read(
        self,
        state: MPlusState,
        tokens: Int[Array, "B T"],
        options: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
    ) -> tuple[KVCache, Float[Array, "B T V"]]:
        """Reads tokens with the memory, which stays as it is.

        Args:
            state: the memory; its open chunk is read before the tokens.
            tokens: in [0, V), T >= 1.
            options: which memory is read, and by which tokens it is chosen.

        Returns:
            The KV cache, for `decode`, and next-token logits.

        Raises:
            ValueError: as `features`; on options of another shape, out of range, or
                without what they need.
        """
        cache, features, _ = read.read(self.weights, state, tokens, options)
        return cache, self.logits(features)

    def trace_read(
        self,
        state: MPlusState,
        tokens: Int[Array, "B T"],
        options: ReadOptions = ReadOptions(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T V"], ReadTrace]:
        """The logits of `read`, and what happened in its layers."""
        _, features, trace = read.read(self.weights, state, tokens, options)
        return self.logits(features), trace

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
    ) -> Int[Array, "B n"]:
        """Samples an answer to a prompt; the memory stays as it is.

        The whole prompt retrieves rows once, which all new tokens read. (The function
        `memjax.models.generate` continues a text instead, and remembers it.)

        Args:
            state: the memory.
            prompt: tokens in [0, V), T >= 1.
            max_new_tokens: n >= 1.
            key: for sampling.
            sampling: temperature, top-k and top-p.

        Raises:
            ValueError: as `read`, or if max_new_tokens is below 1.
        """
        self._check(state, prompt)
        check_sizes(max_new_tokens=max_new_tokens)
        # Split, so that the parameters are arguments of the program and no constants in
        # it.
        graph, params = nnx.split(self)
        return _generate(graph, max_new_tokens, sampling, params, state, prompt, key)

    def _check(self, state, tokens):
        ragged.check_tokens(tokens, state.num_valid.shape[0], self.vocab_size)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(graph, count, sampling, params, state, prompt, key):
    weights = nnx.merge(graph, params).weights
    return read.generate(weights, count, sampling, state, prompt, key)


def mplus(
    backbone: LanguageModel,
    config: MPlusConfig,
    *,
    key: PRNGKeyArray | None = None,
    rngs: nnx.Rngs | None = None,
) -> MPlus:
    """Wraps a backbone with a pool of memory tokens and a long-term store.

    Args:
        backbone: a model of Llama's kind; its arrays are shared, and frozen.
        config: sizes and options of the memory.
        key: draws the adapters and the retriever; or
        rngs: the streams of flax, of which "params" is drawn from.

    Raises:
        ValueError: on both of key and rngs, or neither; on a backbone with other
            mixers than "attention", without RoPE, or with adapters.
    """
    require_place("store_memory", config.store_memory)
    require_place("pool_memory", config.pool_memory)
    return MPlus(init_weights(backbone, config, params_key(key, rngs)))


def memoryllm(
    backbone: LanguageModel,
    config: MPlusConfig,
    *,
    key: PRNGKeyArray | None = None,
    rngs: nnx.Rngs | None = None,
) -> MPlus:
    """MemoryLLM: the pool alone, without a long-term store; see `mplus`."""
    # Without retrieved rows there is no store, and nothing else differs.
    config = dataclasses.replace(config, retrieved=0)
    return mplus(backbone, config, key=key, rngs=rngs)
