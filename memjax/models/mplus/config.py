"""Sizes and options of M+.

Wang et al. (2025), https://arxiv.org/abs/2502.00592. Where this file says "the
program", it means the code that the authors published.

Shapes: C longest chunk, K memory tokens of a chunk, M capacity of the store, N rows of
the pool, R retrieved rows, d width of the retriever's keys.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from memjax.checks import check_flags, check_numbers, check_sizes, require_known
from memjax.models.offload import Place

#: A row whose recall frequency is not above this leaves the store.
LEAST_RECALLS = 0.01
#: Evictions that a row may survive; the simulation takes as many steps.
MOST_EVICTIONS = 100_000


@dataclasses.dataclass(frozen=True)
class MPlusConfig:
    """Sizes of the memory; the defaults are the paper's for an 8B backbone.

    Attributes:
        num_memory_tokens: K, memory tokens that a chunk is compressed to in each layer.
        pool_size: N, rows of the short-term pool; a multiple of K.
        chunk_size: C >= K, most tokens that are compressed at once.
        min_chunk_size: in [1, C]; `flush` does not compress a chunk with fewer tokens.
        num_retrieved: R, rows that a read retrieves from the long-term store. 0 is
            MemoryLLM, which has no store.
        store_size: M >= R, rows of the store.
        retrieval: how rows are found. "learned": a trained retriever selects one set of
            rows per layer for all tokens of a read. "attention": each token and head
            selects its own by attention scores, the paper's ablation M+-Attn
            (`attention_retrieval.py`). It has no parameters, and requires
            store_memory="device", legacy=False, equal_ages=None and
            retrieval_source="prefix".
        stored: which hidden states of a chunk's last K positions become the memory of
            layer l. "output": what layer l computes, as in the program. A read feeds
            it to layer l as input, which the backbone has to learn. "input": what
            layer l is given, which an untrained backbone can read, as Transformer-XL
            does.
        key_dim: d, width of the retriever's queries and keys.
        rank: of the two LoRA adapters, on q, k, v, gate, up and down.
        alpha: the adapters' changes are scaled by alpha / rank.
        legacy: follows the program in four points: ages count from when the pool
            dropped a row, eviction is by frequency, a store of fewer than R rows is
            repeated until R rows are read, and retrieved rows of equal age are in
            falling order. False counts ages from when a row was made.
        equal_ages: the order of retrieved rows of equal age, by their place in the
            store: "rising" or "falling". The program sorts rising ages and turns the
            result round, which is "falling" where NumPy's sort is stable; with AVX its
            order is arbitrary. None is "falling" with `legacy` and "rising" without.
        eviction: which rows leave a full store. "oldest", or those of lowest recall
            "frequency", as in the program. None is "frequency" with `legacy` and
            "oldest" without.
        merge_every: number of updates after which pending rows are merged into the
            store, for "frequency".
        recalls: recall frequency of a row when it is merged, for "frequency"; above
            decay + 0.01.
        decay: subtracted from all frequencies at each merge, for "frequency".
        memory_dtype: number format of the pool, of the store's rows and of the KV
            cache; None is that of the backbone's activations. The retriever's queries
            and keys are float32 with any.
        store_memory: place of the store's rows, "device" or "host". Their keys are
            always on the device. With "host" only the R retrieved rows are copied.
        pool_memory: place of the pool. With "host" a read copies it layer by layer.
            No gradient flows through memory on the host.
        retrieval_source: which tokens of a training target, and of a read without
            `prompt_length`, select the rows. "prefix": the tokens before those that are
            scored. "all": every token, as in the program; then a score has seen the
            token that it predicts.
    """

    num_memory_tokens: int = 256
    pool_size: int = 10_240
    chunk_size: int = 512
    min_chunk_size: int = 16
    num_retrieved: int = 2_560
    store_size: int = 153_600
    retrieval: Literal["learned", "attention"] = "learned"
    stored: Literal["output", "input"] = "output"
    key_dim: int = 256
    rank: int = 16
    alpha: float = 32.0
    legacy: bool = False
    equal_ages: Literal["rising", "falling"] | None = None
    eviction: Literal["oldest", "frequency"] | None = None
    merge_every: int = 60
    recalls: float = 10.0
    decay: float = 1.0
    retrieval_source: Literal["prefix", "all"] = "prefix"
    memory_dtype: Literal["float32", "bfloat16"] | None = None
    store_memory: Place = "device"
    pool_memory: Place = "device"

    def __post_init__(self):
        check_flags(self)
        check_sizes(
            least=0, num_retrieved=self.num_retrieved, store_size=self.store_size
        )
        check_sizes(
            num_memory_tokens=self.num_memory_tokens,
            pool_size=self.pool_size,
            chunk_size=self.chunk_size,
            min_chunk_size=self.min_chunk_size,
            key_dim=self.key_dim,
            rank=self.rank,
            merge_every=self.merge_every,
        )
        # The pool fills, and drops, K rows at a time.
        if self.pool_size % self.num_memory_tokens:
            raise ValueError(
                f"pool_size must be a multiple of num_memory_tokens="
                f"{self.num_memory_tokens}, got {self.pool_size}"
            )
        # A chunk's last K positions become its memory tokens.
        if self.chunk_size < self.num_memory_tokens:
            raise ValueError(
                f"chunk_size must be at least num_memory_tokens="
                f"{self.num_memory_tokens}, got {self.chunk_size}"
            )
        if self.min_chunk_size > self.chunk_size:
            raise ValueError(
                f"min_chunk_size must be in [1, chunk_size={self.chunk_size}], "
                f"got {self.min_chunk_size}"
            )
        for name in ("alpha", "recalls", "decay"):
            value = getattr(self, name)
            check_numbers(**{name: value})
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.eviction is not None:
            require_known("eviction", self.eviction, ("oldest", "frequency"))
        if self.equal_ages is not None:
            require_known("equal_ages", self.equal_ages, ("rising", "falling"))
        require_known("retrieval", self.retrieval, ("learned", "attention"))
        require_known("stored", self.stored, ("output", "input"))
        require_known("retrieval_source", self.retrieval_source, ("prefix", "all"))
        if self.memory_dtype is not None:
            require_known("memory_dtype", self.memory_dtype, ("float32", "bfloat16"))
        require_known("store_memory", self.store_memory, get_args(Place))
        require_known("pool_memory", self.pool_memory, get_args(Place))
        if self.by_attention:
            self._check_by_attention()
        if self.num_retrieved and self.store_size < self.min_store_size:
            raise ValueError(
                f"store_size must be at least {self.min_store_size}, with "
                f"num_retrieved={self.num_retrieved} and "
                f"by_frequency={self.by_frequency}, got {self.store_size}"
            )

    def _check_by_attention(self):
        for name, allowed in (
            ("legacy", False),
            ("equal_ages", None),
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
        """Whether attention retrieves rows of the store."""
        return self.num_retrieved > 0 and self.retrieval == "attention"

    @property
    def has_retriever(self) -> bool:
        """Whether the learned retriever retrieves rows of the store."""
        return self.num_retrieved > 0 and self.retrieval == "learned"

    @property
    def by_frequency(self) -> bool:
        """Whether rows leave the store by their recall frequency."""
        return (self.eviction or ("frequency" if self.legacy else "oldest")) == (
            "frequency"
        )

    @property
    def falling(self) -> bool:
        """Whether retrieved rows of equal age are in falling order."""
        return (self.equal_ages or ("falling" if self.legacy else "rising")) == (
            "falling"
        )

    @property
    def min_store_size(self) -> int:
        """Smallest capacity of a store that begins empty."""
        return self.min_store_size_from(())

    def min_store_size_from(self, start: Sequence[float]) -> int:
        """Smallest capacity of a store that begins with rows of these frequencies."""
        least = max(self.num_retrieved, self.num_memory_tokens, len(start))
        if not self.by_frequency:
            return least
        batch = self.merge_every * self.num_memory_tokens
        rows = collections.Counter(start)
        need = most_rows(batch, self.num_retrieved, self.recalls, self.decay, rows)
        return max(least, need)

    @property
    def prefix(self) -> int:
        """Positions of the KV cache before the tokens: bos, retrieved rows, pool.

        Rows that attention retrieves differ from token to token, and are not cached.
        """
        return 1 + (0 if self.by_attention else self.num_retrieved) + self.pool_size


@functools.cache
def survived_evictions(recalls: float, decay: float) -> int:
    """How many evictions a row survives that is merged with frequency `recalls`.

    Raises:
        ValueError: beyond 100,000.
    """
    # In float32, as the store computes: 0.3 three times is not 0.9 there.
    left, count = np.float32(recalls), 0
    while (left := left - np.float32(decay)) > np.float32(LEAST_RECALLS):
        count += 1
        if count > MOST_EVICTIONS:
            raise ValueError(
                f"recalls must be at most {MOST_EVICTIONS} * decay, got "
                f"recalls={recalls} and decay={decay}"
            )
    return count


def most_rows(
    batch: int, retrieved: int, recalls: float, decay: float, start: Mapping[float, int]
) -> int:
    """The most rows that a store holds at a time that evicts by recall frequency.

    Pending rows count. A merge would take `decay` from all frequencies; rows that have
    none left then leave, if more than R others remain. If not, it leaves every row and
    every frequency as it was. So a row survives a fixed number of evictions, and what
    the store holds follows from counts alone, which are simulated.

    Args:
        batch: rows that are merged at a time.
        retrieved: R.
        recalls: frequency of a row when it is merged.
        decay: what an eviction takes from every frequency.
        start: how many rows of each frequency the store begins with.

    Raises:
        ValueError: if no merged row survives an eviction, so that the store would grow
            without bound, or rows survive more than 100,000.
    """
    lives = survived_evictions(recalls, decay)
    if not lives:
        raise ValueError(
            f"recalls must be above decay + {LEAST_RECALLS}, or the store grows "
            f"without bound, got recalls={recalls} and decay={decay}"
        )
    starts = tuple((survived_evictions(x, decay), n) for x, n in start.items())
    return _simulate(batch, retrieved, lives, starts)


@functools.cache
def _simulate(batch, retrieved, lives, starts):
    # rows[i] will survive i more evictions.
    size = max([lives, *(left for left, _ in starts)]) + 1
    rows = collections.deque([0] * size)
    for left, count in starts:
        rows[left] += count
    total = most = sum(rows)
    # Rows of the start are gone after `size` evictions. From then on the numbers of
    # batches between evictions repeat with a period of `lives`.
    for _ in range(size + 3 * (lives + 1)):
        # As many batches as there must be before one merge evicts.
        missing = retrieved + 1 - (total - rows[0])
        more = max(1, -(-missing // batch)) * batch
        rows[lives] += more
        total += more
        most = max(most, total)
        total -= rows.popleft()
        rows.append(0)
    return most
