"""Sizes and options of M+.

Wang et al. (2025), https://arxiv.org/abs/2502.00592. Where this file says "the
program", it means the code that the authors published.

Shapes: C longest chunk, K memory tokens of a chunk, M capacity of the store, N rows of
the pool, R retrieved rows, d width of the retriever's keys.
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
        tokens: K, memory tokens that a chunk is compressed to in each layer.
        pool: N, rows of the short-term pool; a multiple of K.
        chunk: C >= K, most tokens that are compressed at once.
        least_chunk: in [1, C]; `flush` does not compress a chunk with fewer tokens.
        retrieved: R, rows that a read retrieves from the long-term store. 0 is
            MemoryLLM, which has no store.
        store: M >= R, rows of the store.
        retrieval: how rows are found. "learned": a trained retriever selects one set of
            rows per layer for all tokens of a read. "attention": each token and head
            selects its own by attention scores, the paper's ablation M+-Attn
            (`attention_retrieval.py`). It has no parameters, and requires
            store_memory="device", legacy=False and retrieval_source="prefix".
        stored: which hidden states of a chunk's last K positions become the memory of
            layer l. "output": what layer l computes, as in the program. A read feeds
            it to layer l as input, which the backbone has to learn. "input": what
            layer l is given, which an untrained backbone can read, as Transformer-XL
            does.
        key_dim: d, width of the retriever's queries and keys.
        rank: of the two LoRA adapters, on q, k, v, gate, up and down.
        alpha: the adapters' changes are scaled by alpha / rank.
        legacy: follows the program in three points: ages count from when the pool
            dropped a row, eviction is by frequency, and a store of fewer than R rows
            is repeated until R rows are read. False counts ages from when a row was
            made.
        eviction: which rows leave a full store. "oldest", or those of lowest recall
            "frequency", as in the program. None is "frequency" with `legacy` and
            "oldest" without.
        merge_every: number of updates after which pending rows are merged into the
            store, for "frequency".
        recalls: recall frequency of a row when it is merged, for "frequency".
        decay: subtracted from all frequencies at each merge, for "frequency".
        store_memory: where the store's rows lie, "device" or "host". Their keys are
            always on the device. With "host" only the R retrieved rows are copied.
        pool_memory: where the pool lies. With "host" a read copies it layer by layer.
            No gradient flows through memory on the host.
        retrieval_source: which tokens of a training target select the rows. "prefix":
            the tokens before those that are scored. "all": every token, as in the
            program; then a score has seen the token that it predicts.
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
        # The pool fills, and drops, K rows at a time.
        if self.pool % self.tokens:
            raise ValueError(
                f"pool must be a multiple of tokens={self.tokens}, got {self.pool}"
            )
        # A chunk's last K positions become its memory tokens.
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
        """Smallest capacity that the store may have."""
        if not self.by_frequency:
            return max(self.retrieved, self.tokens)
        batch = self.merge_every * self.tokens
        # Merged rows stay until their frequency is used up, with the pending rows
        # beside them. While R rows or fewer would remain, none is evicted.
        lives = math.ceil((self.recalls - LEAST_RECALLS) / self.decay) - 1
        most = max(0, lives) * batch
        return (most if most > self.retrieved else self.retrieved + batch) + batch

    @property
    def prefix(self) -> int:
        """Positions of the KV cache before the tokens: bos, retrieved rows, pool.

        Rows that attention retrieves differ from token to token, and are not cached.
        """
        return 1 + (0 if self.by_attention else self.retrieved) + self.pool
