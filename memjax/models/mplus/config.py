"""Sizes and choices of M+.

Wang et al. (2025), https://arxiv.org/abs/2502.00592.

Shapes: C open chunk, K memory tokens of a chunk, M capacity of the store, N rows of the
pool, R retrieved rows, d retriever's keys.
"""

import dataclasses
import math
from typing import Literal, get_args

from memjax.checks import check_sizes, require_known
from memjax.models.offload import Place

#: A row whose recall frequency is not above this leaves the store.
LEAST_RECALLS = 0.01


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
        """Slots of a cache before its tokens: bos, retrieved rows, pool.

        Rows that attention finds differ from token to token, and have no slots.
        """
        return 1 + (0 if self.by_attention else self.retrieved) + self.pool
