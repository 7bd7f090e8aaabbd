"""Elastic Memory as a cell, for hybrids.

    y_t = softmax(q_t [K_mem, K_open]ᵀ / √K) [V_mem, V_open]

K_mem and V_mem are sampled from the coefficients of all full blocks of the tokens that
have left the window, K_open and V_open are those of the open block; no position is
added to either. `elastic_memory.py` has the equations. Query heads of a
group read one memory.

Shapes: B batch, T time, H query heads, G key-value heads, K head width, N order, L
block, M memory tokens.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.mechanisms.base import replace_rows
from memjax.mechanisms.cells.base import Cell, CellDefaults, bind
from memjax.mechanisms.elastic_memory import (
    ElasticMemoryConfig,
    ElasticMemoryState,
    read,
    read_token,
)
from memjax.mechanisms.elastic_memory import init_state as init_memory
from memjax.mechanisms.layers import places
from memjax_kernels import HippoSampling


@dataclasses.dataclass(frozen=True)
class ElasticCellConfig(CellDefaults):
    """Sizes of the memory.

    Attributes:
        num_heads: query heads.
        num_kv_heads: of keys and values; divides `num_heads`.
        head_dim: width of a head, even.
        order: N, coefficients per channel.
        block: L, tokens that are compressed together.
        memory_tokens: M, points at which the memory is read; None is N.
        sampling: their positions in the history; see `ElasticMemoryConfig`.
        decay: of the exponential sampling.
        bank_blocks: blocks whose matrices are built ahead.
    """

    name: ClassVar[str] = "elastic"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    order: int = 96
    block: int = 32
    memory_tokens: int | None = None
    sampling: HippoSampling = "uniform"
    decay: float = 0.98
    bank_blocks: int = 0

    def __post_init__(self):
        # Checks all sizes.
        self.memory()

    def memory(self) -> ElasticMemoryConfig:
        """The memory as a layer's configuration, without positions."""
        samples = self.order if self.memory_tokens is None else self.memory_tokens
        return ElasticMemoryConfig(
            model_dim=self.model_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_theta=None,
            block=self.block,
            order=self.order,
            memory_tokens=samples,
            sampling=self.sampling,
            decay=self.decay,
            bank_blocks=self.bank_blocks,
        )

    @property
    def model_dim(self) -> int:
        """1: no gate reads the token."""
        return 1

    @property
    def key_dim(self) -> int:
        """K, of queries and keys."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """K, of values and reads."""
        return self.head_dim

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(self, init_params, init_state, step, apply, unit_norm=False)

    def cell_axes(self) -> "ElasticCellParams":
        """No parameters."""
        return ElasticCellParams()


class ElasticCellParams(NamedTuple):
    """No parameters."""


def init_params(config: ElasticCellConfig, key: PRNGKeyArray) -> ElasticCellParams:
    """No parameters: the memory reads the attention's own heads."""
    return ElasticCellParams()


def init_state(config: ElasticCellConfig, batch: int) -> ElasticMemoryState:
    """The empty memory."""
    return init_memory(config.memory(), batch)


def step(
    config: ElasticCellConfig,
    params: ElasticCellParams,
    memory: ElasticMemoryState,
    q: Float[Array, "B H K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B G K"],
    x: Float[Array, "B 1"],
) -> tuple[ElasticMemoryState, Float[Array, "B H K"]]:
    """Writes one token where x is 1, and reads."""
    after, y = read_token(config.memory(), memory, q, k, v)
    return replace_rows(after, memory, x[:, 0] == 0), y.astype(q.dtype)


def apply(
    config: ElasticCellConfig,
    params: ElasticCellParams,
    memory: ElasticMemoryState,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    x: Float[Array, "B T 1"],
) -> tuple[ElasticMemoryState, Float[Array, "B T H K"]]:
    """Equal to T steps, block by block; x is 0 only before the first token."""
    count = (x[..., 0] > 0).sum(axis=1, dtype=jnp.int32)
    empty = q.shape[1] - count
    # Written tokens come first; the zeros behind them are not counted.
    q, k, v = (_shifted(leaf, empty) for leaf in (q, k, v))
    memory, y = read(config.memory(), memory, q, k, v, count)
    return memory, _shifted(y, -empty)


def _shifted(x: Array, by: Array) -> Array:
    """x [B, T, ...] shifted left by `by` tokens [B], with zeros behind."""
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (length, 0)) + ((0, 0),) * (x.ndim - 2))
    return places.take(padded, length + by, length)
