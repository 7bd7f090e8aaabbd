"""What M+ is given and what it carries: see `mplus.py`.

Shapes: B batch, L layers, K memory tokens of a chunk, N rows of the pool, M capacity of
the store, R retrieved rows, C open chunk, D model, d retriever's keys, S slots of a
reading, G key heads, H width of a head. With retrieval "attention" the store's D and d
are both G * H.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from memjax.checks import check_sizes, require_known
from memjax.models.lora import Frozen
from memjax.models.offload import Place, near


@dataclasses.dataclass(frozen=True)
class MPlusConfig:
    """Sizes of the memory; the defaults are the paper's for an 8B backbone.

    Attributes:
        tokens: K, memory tokens that a chunk becomes in each layer.
        pool: N, rows of the short-term pool; a multiple of K.
        chunk: C >= K, the longest text that is compressed at once.
        least_chunk: in [1, C]; `flush` leaves shorter open chunks as they are.
        retrieved: R, rows a read takes from the long-term store; 0 is MemoryLLM, which
            has no store.
        store: M >= R, rows of the store.
        retrieval: how they are found: by the "learned" retriever, one set of rows a
            layer for all tokens of a read; or by "attention", each token and head its
            own, the paper's ablation M+-Attn (`attention_retrieval.py`). That has no
            parameters, needs the store on the device, and has no `legacy`; no token
            chooses for another, so that `retrieval_source` stays "prefix".
        stored: of a chunk's last K tokens in layer l. Their "output" goes into the
            memory of layer l, as in the program, and comes back as its input: a
            backbone must learn that. Their "input" is what it knows: before any
            training a chunk's memory is that of its last K tokens in a Transformer-XL.
        key_dim: d, of the retriever.
        rank: of the two adapters, on q, k, v, gate, up and down.
        alpha: their changes are scaled by alpha / rank.
        legacy: ages since the drop, the eviction and the short store of the published
            program, whose rows are read again and again if there are fewer than R.
            False counts ages since the row was made.
        eviction: what leaves a full store: its "oldest" rows, or by recall "frequency",
            batch by batch, as in the program. None is the program's with `legacy`.
        merge_every: updates that fill the drop cache, for "frequency".
        recalls: recall frequency of a row that is merged, for "frequency".
        decay: of all frequencies a merge, for "frequency".
        store_memory: where the store's rows are; their keys, by which they are found,
            are on the device. "host": only the R chosen ones travel to it.
        pool_memory: where the pool is; "host": a read takes it layer by layer. What is
            on the host gets no gradient, and passes none on.
        retrieval_source: "prefix": a read's rows are chosen by the tokens before those
            that are scored; "all": by all of its tokens, as in the program, where a
            score has seen what it predicts.
    """

    tokens: int = 256
    pool: int = 10_240
    chunk: int = 512
    least_chunk: int = 16
    retrieved: int = 2_560
    store: int = 153_600
    retrieval: Literal["learned", "attention"] = "learned"
    stored: Literal["output", "input"] = "output"
    key_dim: int = 256
    rank: int = 16
    alpha: float = 32.0
    legacy: bool = False
    eviction: Literal["oldest", "frequency"] | None = None
    merge_every: int = 60
    recalls: float = 10.0
    decay: float = 1.0
    retrieval_source: Literal["prefix", "all"] = "prefix"
    store_memory: Place = "device"
    pool_memory: Place = "device"

    def __post_init__(self):
        check_sizes(
            tokens=self.tokens,
            pool=self.pool,
            chunk=self.chunk,
            least_chunk=self.least_chunk,
            key_dim=self.key_dim,
            rank=self.rank,
            merge_every=self.merge_every,
        )
        if self.pool % self.tokens:
            raise ValueError(
                f"pool must be a multiple of tokens={self.tokens}, got {self.pool}"
            )
        if self.chunk < self.tokens:
            raise ValueError(
                f"chunk must be at least tokens={self.tokens}, got {self.chunk}"
            )
        if self.least_chunk > self.chunk:
            raise ValueError(
                f"least_chunk must be in [1, chunk={self.chunk}], "
                f"got {self.least_chunk}"
            )
        if self.retrieved < 0:
            raise ValueError(f"retrieved must be at least 0, got {self.retrieved}")
        for name in ("alpha", "recalls", "decay"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.eviction is not None:
            require_known("eviction", self.eviction, ("oldest", "frequency"))
        require_known("retrieval", self.retrieval, ("learned", "attention"))
        require_known("stored", self.stored, ("output", "input"))
        require_known("retrieval_source", self.retrieval_source, ("prefix", "all"))
        require_known("store_memory", self.store_memory, get_args(Place))
        require_known("pool_memory", self.pool_memory, get_args(Place))
        if self.by_attention:
            self._check_by_attention()
        if self.retrieved and self.store < self.least_store:
            raise ValueError(
                f"store must hold at least {self.least_store} rows, with "
                f"retrieved={self.retrieved} and by_frequency={self.by_frequency}, "
                f"got {self.store}"
            )

    def _check_by_attention(self):
        for name, allowed in (
            ("legacy", False),
            ("retrieval_source", "prefix"),
            ("store_memory", "device"),
        ):
            if (value := getattr(self, name)) != allowed:
                raise ValueError(
                    f"{name} must be {allowed!r} with retrieval='attention', "
                    f"got {value!r}"
                )

    @property
    def by_attention(self) -> bool:
        """Whether there is a store whose rows attention finds."""
        return self.retrieved > 0 and self.retrieval == "attention"

    @property
    def has_retriever(self) -> bool:
        """Whether there is a store whose rows the learned retriever finds."""
        return self.retrieved > 0 and self.retrieval == "learned"

    @property
    def by_frequency(self) -> bool:
        """Whether rows leave the store by their recall frequency."""
        return (self.eviction or ("frequency" if self.legacy else "oldest")) == (
            "frequency"
        )

    @property
    def least_store(self) -> int:
        """Rows that the store must have room for."""
        if not self.by_frequency:
            return max(self.retrieved, self.tokens)
        batch = self.merge_every * self.tokens
        # A batch stays until its frequency is gone, the cache beside it; and while
        # fewer than R would be left, none goes.
        lives = math.ceil((self.recalls - LEAST_RECALLS) / self.decay) - 1
        most = max(0, lives) * batch
        return (most if most > self.retrieved else self.retrieved + batch) + batch

    @property
    def prefix(self) -> int:
        """Slots of a reading before its tokens: bos, retrieved rows, pool.

        Rows that attention finds differ from token to token, and have no slots.
        """
        return 1 + (0 if self.by_attention else self.retrieved) + self.pool


#: A row whose recall frequency is not above this leaves the store.
LEAST_RECALLS = 0.01


class LayerStore(NamedTuple):
    """One layer's rows that the pool dropped.

    Attributes:
        rows: the memory tokens, with retrieval "attention" their values; the first
            `Store.held` are filled.
        keys: of the retriever, or of the layer's attention, made when the row was
            dropped.
        born: the clock when the row was made (with `legacy`, what its age at the drop
            says): its age is clock - born.
    """

    rows: Float[Array, "B M D"]
    keys: Float[Array, "B M d"]
    born: Int[Array, "B M"]


class Store(NamedTuple):
    """The long-term store; every layer holds as many rows.

    Attributes:
        layers: their rows.
        recalls: recall frequency, for eviction by it.
        held: filled rows, those of the drop cache last.
        fresh: rows in the drop cache, which is searched as well.
    """

    layers: tuple[LayerStore, ...]
    recalls: Float[Array, "B M"]
    held: Int[Array, " B"]
    fresh: Int[Array, " B"]


class Reading(NamedTuple):
    """Keys and values of [bos, retrieved rows, pool, tokens], layer by layer.

    Attributes:
        keys: with RoPE.
        values: of the same slots.
        visible: False in slots that nobody may see: empty memory, no token yet.
        first: slot of the first token.
        length: tokens so far.
        offset: RoPE position of the first token, the number of visible slots before.
    """

    keys: tuple[Float[Array, "B S G H"], ...]
    values: tuple[Float[Array, "B S G H"], ...]
    visible: Bool[Array, "B S"]
    first: Int[Array, " B"]
    length: Int[Array, " B"]
    offset: Int[Array, " B"]


class MPlusState(NamedTuple):
    """The memory of every row of the batch.

    Attributes:
        pool: short-term memory, the residual stream's vectors; the last `held` rows of
            a layer are filled, oldest first.
        ages: of the pool's rows, in memory tokens.
        held: filled rows of the pool, the same in all layers.
        clock: memory tokens made so far: K an update.
        store: None without long-term memory.
        tokens: the open chunk, 0 from `filled` on.
        filled: tokens in it, in [0, C).
        queries: the retriever's, of the tokens that were read last: token i of a chunk
            is in place i. None without a retriever.
        asked: how many of them there are.
        reading: of the open chunk.
        ready: whether `reading` is up to date; if not, the next read makes it anew.
        key: of the row's random numbers.
    """

    pool: Float[Array, "B L N D"]
    ages: Int[Array, "B L N"]
    held: Int[Array, " B"]
    clock: Int[Array, " B"]
    store: Store | None
    tokens: Int[Array, "B C"]
    filled: Int[Array, " B"]
    queries: Float[Array, "B L C d"] | None
    asked: Int[Array, " B"]
    reading: Reading
    ready: Bool[Array, " B"]
    key: UInt32[Array, "B 2"]


class Initial(NamedTuple):
    """Memory of a checkpoint, from which every text starts.

    Attributes:
        pool: [L, N, D], short-term memory, of age 0.
        rows: [L, n, D] of the long-term store, n in [1, M]; none where the checkpoint
            has none.
        keys: [L, n, d], theirs.
        born: [L, n], minus their ages.
        recalls: [n], their recall frequency.
    """

    pool: Frozen
    rows: Frozen | None = None
    keys: Frozen | None = None
    born: Frozen | None = None
    recalls: Frozen | None = None

    def fill(self, state: MPlusState) -> MPlusState:
        """An empty state with this memory in every row."""
        batch, pool = state.held.shape[0], self.pool.get_value()
        each = lambda x: jnp.broadcast_to(x[None], (batch, *x.shape))
        state = state._replace(
            pool=near(lambda _, start: start, state.pool, each(pool), stays=True),
            held=jnp.full_like(state.held, pool.shape[1]),
        )
        parts = (self.rows, self.keys, self.born, self.recalls)
        if state.store is None or self.recalls is None:
            return state
        *parts, recalls = (part.get_value() for part in parts if part is not None)
        count = recalls.shape[0]
        start = lambda buffer, start: buffer.at[:, :count].set(start[None])
        begin = functools.partial(near, start, stays=True)
        layers = tuple(
            jax.tree.map(begin, layer, LayerStore(*(part[i] for part in parts)))
            for i, layer in enumerate(state.store.layers)
        )
        store = state.store._replace(
            layers=layers,
            recalls=begin(state.store.recalls, recalls),
            held=jnp.full_like(state.held, count),
        )
        return state._replace(store=store)
