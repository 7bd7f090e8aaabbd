"""The memory of Infini-attention: a normalised linear memory of keys and values.

    M_t = M_{t-1} + σ(k_t) (v_t - u_t)ᵀ        z_t = z_{t-1} + σ(k_t)
    y_t = M_tᵀ σ(q_t) / (σ(q_t)ᵀ z_t)          σ(x) = ELU(x) + 1

u_t is 0 with update="linear", and M_{t-1}ᵀ σ(k_t) / (σ(k_t)ᵀ z_{t-1}), what the memory
holds for the key already, with "delta". Munkhdalai et al. (2024),
https://arxiv.org/abs/2404.07143, eqs. 3 to 5. In a hybrid it is Infini-attention
(eq. 6); the paper writes a segment at a time, here each token is written when it leaves
the window. Query heads of a group read one memory. With `norm` reads have an RMS of 1,
without a learned scale: Elastic Memory's paper (Song et al. 2026, section 3.1) adds
RMSNorm to this baseline, to stabilise training, and no parameter.

Shapes: B batch, T time, H query heads, G key-value heads, K key, V value.
"""

import dataclasses
from typing import ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.checks import check_flags, check_sizes, require_known
from memjax.mechanisms.cells.base import Cell, CellDefaults, bind
from memjax.mechanisms.cells.grouped_queries import (
    copies,
    first_copy,
    to_batch,
    to_heads,
)
from memjax.mechanisms.layers.norms import rms_norm
from memjax_kernels import delta_rule, linear_attention

Update = Literal["linear", "delta"]
#: Of the norm of reads.
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class InfiniConfig(CellDefaults):
    """Sizes of the memory.

    Attributes:
        num_heads: query heads.
        num_kv_heads: memories; divides `num_heads`.
        key_dim: width of queries and keys.
        value_dim: width of values and reads.
        update: "linear" adds, "delta" replaces what the memory holds for a key.
        norm: whether reads are divided by their RMS.
    """

    name: ClassVar[str] = "infini"

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    update: Update = "delta"
    norm: bool = False

    def __post_init__(self):
        check_flags(self)
        sizes = ("num_heads", "num_kv_heads", "key_dim", "value_dim")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads={self.num_heads}, "
                f"got {self.num_kv_heads}"
            )
        require_known("update", self.update, get_args(Update))

    @property
    def model_dim(self) -> int:
        """1: no gate reads the token."""
        return 1

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(self, init_params, init_state, step, apply, unit_norm=False)

    def cell_axes(self) -> "InfiniParams":
        """No parameters."""
        return InfiniParams()


class InfiniParams(NamedTuple):
    """No parameters."""


class InfiniMemory(NamedTuple):
    """The sum of outer products, and of keys."""

    matrix: Float[Array, "B G K V"]
    norm: Float[Array, "B G K"]


def init_params(config: InfiniConfig, key: PRNGKeyArray) -> InfiniParams:
    """No parameters: the memory reads the attention's own heads."""
    return InfiniParams()


def init_state(config: InfiniConfig, batch: int) -> InfiniMemory:
    """The empty memory: zeros."""
    heads, key, value = config.num_kv_heads, config.key_dim, config.value_dim
    matrix = jnp.zeros((batch, heads, key, value), jnp.float32)
    return InfiniMemory(matrix, jnp.zeros((batch, heads, key), jnp.float32))


def step(
    config: InfiniConfig,
    params: InfiniParams,
    memory: InfiniMemory,
    q: Float[Array, "B H K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B G V"],
    x: Float[Array, "B 1"],
) -> tuple[InfiniMemory, Float[Array, "B H V"]]:
    """Writes one token where x is 1, and reads."""
    token = (leaf[:, None] for leaf in (q, k, v, x))
    memory, y = apply(config, params, memory, *token)
    return memory, y[:, 0]


def apply(
    config: InfiniConfig,
    params: InfiniParams,
    memory: InfiniMemory,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G V"],
    x: Float[Array, "B T 1"],
) -> tuple[InfiniMemory, Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    group = q.shape[2] // config.num_kv_heads
    # Exact 0 where nothing is written, and in float32: z sums over the whole text.
    keys = _features(k) * x[..., None].astype(jnp.float32)
    norm = memory.norm[:, None] + jnp.cumsum(keys, axis=1)
    queries, values = _features(q), v.astype(jnp.float32)
    if config.update == "linear":
        write, given = linear_attention, (keys, values, memory.matrix)
    else:
        # σ(k) (v - u)ᵀ is the delta rule of k / √c and v √c, for c = σ(k)ᵀ z.
        c = (keys * (norm - keys)).sum(axis=-1, keepdims=True)
        # The first key finds z = 0, and an empty memory, in which u is 0.
        root = jnp.sqrt(jnp.where(c > 0, c, 1.0))
        ones = jnp.ones(keys.shape[:-1], jnp.float32)
        given = keys / root, values * root, ones, memory.matrix
        write = delta_rule
    # All queries of a group read the same memory. A vmap over them would count the
    # cotangent of what they share once for each, where the op has its own gradient.
    matrix, y = write(to_batch(queries, group), *copies(given, group))
    y = to_heads(y, group)
    total = (queries * jnp.repeat(norm, group, axis=2)).sum(axis=-1, keepdims=True)
    y = y / jnp.where(total > 0, total, 1.0)
    if config.norm:
        y = rms_norm(y, jnp.ones(config.value_dim, y.dtype), EPSILON)
    return InfiniMemory(first_copy(matrix, group), norm[:, -1]), y.astype(q.dtype)


def _features(x):
    """σ(x), above 0."""
    return jax.nn.elu(x.astype(jnp.float32)) + 1
