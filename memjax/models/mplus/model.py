"""M+: a pool of latent memory tokens in every layer, and a store of those it dropped.

    write   a chunk of up to C tokens becomes K vectors a layer, which take the place
            of K random ones of the pool's N; those go to the long-term store
    read    in layer l tokens attend to [bos_l ; R rows of the store ; the pool]; the
            rows are those whose keys the tokens' queries find likeliest

Wang et al. (2025), https://arxiv.org/abs/2502.00592; MemoryLLM, without a store: Wang
et al. (2024), https://arxiv.org/abs/2402.04624.

As a language model it reads its own text: tokens see the memory and the open chunk; a
full chunk is written into memory, and the next one's rows are retrieved by the queries
of the tokens read last, so that no score sees what it predicts. `inject`, `flush` and
`read` are the same under the caller's control. With an empty memory nothing stands
before the tokens: logits are the plain backbone's, with the adapter that reads.

Shapes: B batch, L layers, T time, K memory tokens of a chunk, N rows of the pool,
M capacity of the store, R retrieved rows, C longest chunk, D model, V vocabulary,
S slots of a cache, d retriever's keys.
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
from memjax.models import ragged as segments
from memjax.models.language_model.model import LanguageModel
from memjax.models.mplus import attention_retrieval, kv_cache, read, write
from memjax.models.mplus import store as long_term_store
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.read import ReadOptions, ReadTrace
from memjax.models.mplus.state import Initial, KVCache, MPlusState
from memjax.models.mplus.weights import MPlusWeights, init_weights
from memjax.models.offload import near, put, require_place
from memjax.models.sampling import Sampling
from memjax.nnx.params import as_arrays, as_params, params_key


class MPlus(nnx.Module):
    """A backbone with latent memory: itself a language model.

    Holds parameters, which `weights` gives to the functions of this room: the two
    adapters, `bos`, `position`, and with a learned retrieval `query`, `key` and
    `encoder_query` of the retriever. The backbone is frozen.

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
        """The parameters, as the functions of this room take them."""
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
        """C: calls of whole chunks are quick."""
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
        """The memory a text starts from: empty, or the checkpoint's.

        Args:
            batch: B.
            key: of what the pools drop, a stream of its own for each row; None is
                `jax.random.key(0)`.
        """
        c, d = self.config, self.width
        key = jax.random.key(0) if key is None else key
        rows = jnp.arange(batch, dtype=jnp.int32)
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        state = MPlusState(
            pool=put(c.pool_memory, jnp.zeros((batch, self.layers, c.pool, d))),
            ages=zeros((batch, self.layers, c.pool)),
            num_valid=zeros(batch),
            clock=zeros(batch),
            store=None,
            tokens=zeros((batch, c.chunk)),
            length=zeros(batch),
            queries=None,
            num_queries=zeros(batch),
            cache=kv_cache.empty(self.weights, batch, c.prefix, c.prefix + c.chunk),
            cache_ready=jnp.zeros(batch, bool),
            key=jax.random.key_data(keys),
        )
        if c.retrieved:
            width = attention_retrieval.width(self.backbone.config)
            width = width if c.by_attention else d
            store = long_term_store.empty(c, batch, self.layers, width)
            state = state._replace(store=store)
        if c.has_retriever:
            shape = (batch, self.layers, c.chunk, c.key_dim)
            state = state._replace(queries=jnp.zeros(shape, jnp.float32))
        return state if self.initial is None else self.initial.fill(state)

    def reset(self, state: MPlusState, mask: Bool[Array, " B"]) -> MPlusState:
        """Gives the rows in `mask` the memory a text starts from; their keys go on."""
        empty = self.init_state(mask.shape[0])._replace(key=state.key)
        clear = lambda old, new: near(mechanisms.reset, old, new, mask, stays=True)
        return jax.tree.map(clear, state, empty)

    def features(
        self, state: MPlusState, tokens: Int[Array, "B T"]
    ) -> tuple[MPlusState, Float[Array, "B T D"]]:
        """Reads tokens, and writes the chunks that they complete; what the head sees.

        Args:
            state: the memory so far.
            tokens: in [0, V), T >= 1; values are not checked inside jit, where one out
                of range makes its row NaN.

        Raises:
            ValueError: on tokens of another shape, or a known value out of range.
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
        """Writes tokens into memory, C at a time; the rest waits in the open chunk.

        Args:
            state: the memory so far.
            tokens: in [0, V), any T >= 1.

        Raises:
            ValueError: as `features`.
        """
        self._check(state, tokens)
        skip = lambda weights, state, piece, lengths: (state, None)
        state, _ = write.by_chunks(self.weights, state, tokens, skip)
        return state._replace(cache_ready=jnp.zeros_like(state.cache_ready))

    def flush(self, state: MPlusState) -> MPlusState:
        """Writes the open chunks that have at least `least_chunk` tokens.

        Shorter ones stay open: fewer tokens than K write old memory again, and a few
        tokens would be all but lost among it.
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
        """The memory tokens of a chunk of T tokens, which `update` would store.

        Args:
            state: whose newest K rows the chunk sees.
            tokens: in [0, V), T in [1, C].
            memory: other rows to see instead.

        Raises:
            ValueError: as `features`; on more than C tokens, or memory of another
                shape.
        """
        self._check(state, tokens)
        if tokens.shape[1] > self.config.chunk:
            raise ValueError(
                f"tokens must be at most chunk={self.config.chunk} a row, "
                f"got {tokens.shape[1]}"
            )
        if memory is not None:
            self.weights.check_rows(
                "memory", memory, tokens.shape[0], self.config.tokens
            )
        return write.compress(self.weights, state, tokens, None, memory)

    def update(
        self,
        state: MPlusState,
        new: Float[Array, "B L K D"],
        dropped: Int[Array, "B L K"] | None = None,
    ) -> MPlusState:
        """Stores new memory tokens; a full pool drops K rows, into the long-term store.

        Args:
            state: the memory so far.
            new: what `compress` gave.
            dropped: which rows a full pool drops, rising; None draws them.

        Raises:
            ValueError: on arrays of another shape.
        """
        self.weights.check_rows(
            "new", new, state.num_valid.shape[0], self.config.tokens
        )
        if dropped is not None and dropped.shape != new.shape[:3]:
            raise ValueError(
                f"dropped must be [B, L, K] = {list(new.shape[:3])}, "
                f"got {list(dropped.shape)}"
            )
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
        """Answers a prompt with the memory, which stays as it is.

        One retrieval, by the whole prompt; the tokens reuse its cache. (The function
        `memjax.models.generate` goes on with a text instead, and remembers it.)

        Args:
            state: the memory.
            prompt: tokens in [0, V), T >= 1.
            max_new_tokens: n >= 1.
            key: of the draws.
            sampling: greedy, temperature, top-k and top-p.

        Raises:
            ValueError: as `read`, or if max_new_tokens is below 1.
        """
        self._check(state, prompt)
        check_sizes(max_new_tokens=max_new_tokens)
        graph, params = nnx.split(self)
        return _generate(graph, max_new_tokens, sampling, params, state, prompt, key)

    def _check(self, state, tokens):
        segments.check_tokens(tokens, state.num_valid.shape[0], self.vocab_size)


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
    """Gives a backbone a pool of latent memory and a long-term store.

    Args:
        backbone: a model of Llama's kind; its parameters are shared, and frozen.
        config: sizes of the memory.
        key: of the adapters and the retriever; or
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
    config = dataclasses.replace(config, retrieved=0)
    return mplus(backbone, config, key=key, rngs=rngs)
