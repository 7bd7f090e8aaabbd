"""Hybrid of a sliding window and a memory of the tokens that have left it.

    q, k, v = projections of x                        those of the attention layer
    a_t = attention of q_t to the last W tokens, and to the sinks
    memory, r_t = cell(φ_q(q_t), φ_k(k_{t-W}), φ_v(v_{t-W}), memory)
    out_t = W_o (a_t + m_t (φ_r(r_t) - a_t))          m_t = α σ(w x_t + β)

The memory is any cell (`cells.base`): a recurrent mechanism without its convolution and
projections. It writes the token that has just left the window, so that it repeats
nothing of the window, and reads with the current query. Its gates read that token's key
and value. φ are linear maps of each head; φ_q and φ_k are followed by the norm that the
cell needs, and reads are bounded: r / √(1 + mean r²).

α is initialised to 0, so that the layer equals the window. With `gate="head"`, α is 1
and w is 0: with the memory of `cells/infini.py` that is Infini-attention.

A memory has a head for each query head, or for each key-value head, shared by the
queries of its group as keys and values are: a third of the bytes for groups of three.

Shapes: B batch, T time, D model, H query heads, G key-value heads, M memory heads, H or
G, K head width, F key and V value width of the memory, W window.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax import mechanisms
from memjax.checks import require_instance, require_known, short
from memjax.config_io import TYPES
from memjax.mechanisms.base import Mechanism, axes, check_input
from memjax.mechanisms.cells.base import Cell, CellConfig
from memjax.mechanisms.cells.grouped_queries import grouped_queries
from memjax.mechanisms.config import MechanismConfig, MechanismDefaults
from memjax.mechanisms.layers import gates, projections
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.layers.projections import AttentionParams
from memjax.mechanisms.sliding_window import (
    SlidingWindowConfig,
    SlidingWindowState,
    in_order,
)
from memjax.mechanisms.sliding_window import init_state as init_window
from memjax.mechanisms.sliding_window import oldest as oldest_of_window
from memjax.mechanisms.sliding_window import read as read_window
from memjax_kernels import l2_normalize

Gate = Literal["token", "head"]


def _memories() -> tuple[type, ...]:
    """The configurations of memories that a file may name."""
    return tuple(mechanisms.CELLS.values())


def require_cell(memory: object) -> None:
    """Raises ValueError unless `memory` is a cell's configuration."""
    if not hasattr(memory, "cell") or isinstance(memory, type):
        raise ValueError(f"memory must be a cell's configuration, got {short(memory)}")


@dataclasses.dataclass(frozen=True)
class HybridConfig(MechanismDefaults):
    """A window and a memory.

    Attributes:
        window: the attention layer, its window and its sinks.
        memory: a head for each query head or each key-value head. Its `model_dim`,
            the width that its gates read, is that of all keys and values of a token,
            2 G K. The memories of Infini and Elastic read the heads as they are, and
            have their sizes.
        gate: the memory's share: "token" is α σ(w x_t + β) with learned α, w and β,
            which starts at 0; "head" is σ(β), a number for each head, which starts at
            a half.
    """

    name: ClassVar[str] = "hybrid"

    window: SlidingWindowConfig
    memory: CellConfig = dataclasses.field(metadata={TYPES: _memories})
    gate: Gate = "token"

    def __post_init__(self):
        require_known("gate", self.gate, get_args(Gate))
        heads, memory = self.window, self.memory
        require_instance("window", heads, SlidingWindowConfig)
        require_cell(memory)
        if memory.cell().unit_norm:
            allowed = {
                "num_heads": (heads.num_heads, heads.num_kv_heads),
                "model_dim": (2 * heads.num_kv_heads * heads.head_dim,),
            }
        else:
            allowed = {
                "num_heads": (heads.num_heads,),
                "num_kv_heads": (heads.num_kv_heads,),
                "key_dim": (heads.head_dim,),
                "value_dim": (heads.head_dim,),
            }
        for name, sizes in allowed.items():
            if getattr(memory, name) not in sizes:
                raise ValueError(
                    f"memory.{name} must be {' or '.join(map(str, sizes))} with "
                    f"this window, got {getattr(memory, name)}"
                )

    @property
    def model_dim(self) -> int:
        """Width of the layer's input and output."""
        return self.window.model_dim

    @property
    def attention(self) -> HeadsConfig:
        """The heads of the window."""
        return self.window

    @property
    def tokens_per_call(self) -> int:
        """The window."""
        return self.window.window

    def keys_per_query(self, length: int) -> float:
        """Those of the window."""
        return self.window.keys_per_query(length)

    def shared_cell(self) -> Cell:
        """The memory, read by all query heads."""
        cell, heads = self.memory.cell(), self.window.num_heads
        queries = heads // self.memory.num_heads if cell.unit_norm else 1
        return grouped_queries(cell, queries)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return Mechanism(
            init_params=functools.partial(init_params, self),
            init_state=functools.partial(init_state, self),
            step=functools.partial(step, self),
            apply=functools.partial(apply, self),
        )

    def param_axes(self) -> "HybridParams":
        """Sharding axes of the parameters."""
        maps = FeatureParams(*(axes("heads") for _ in FeatureParams._fields))
        return HybridParams(
            attention=projections.AXES,
            features=maps if self.shared_cell().unit_norm else None,
            memory=self.memory.cell_axes(),
            balance=BalanceParams(axes(), axes("model", "heads"), axes())
            if self.gate == "token"
            else BalanceParams(None, None, axes()),
        )


class FeatureParams(NamedTuple):
    """φ, from the attention's heads to the memory's and back; biases are flat."""

    query: Float[Array, "H K F"]
    key: Float[Array, "M K F"]
    value: Float[Array, "M K V"]
    read: Float[Array, "H V K"]
    query_bias: Float[Array, " HF"]
    key_bias: Float[Array, " MF"]


class BalanceParams(NamedTuple):
    """α, w and β of the mixture of window and memory; β alone of a gate by head."""

    amount: Float[Array, " H"] | None
    weight: Float[Array, "D H"] | None
    bias: Float[Array, " H"]


class HybridParams(NamedTuple):
    """The attention layer's projections, and the parameters of the memory."""

    attention: AttentionParams
    features: FeatureParams | None  # None where the memory reads heads as they are
    memory: PyTree
    balance: BalanceParams

    @property
    def lora_parts(self) -> tuple[str, ...]:
        """Parameters whose matrices LoRA may change."""
        return ("attention",)


class HybridState(NamedTuple):
    """The window, and the memory of all earlier tokens."""

    window: SlidingWindowState
    memory: PyTree


def init_params(config: HybridConfig, key: PRNGKeyArray) -> HybridParams:
    """Draws the projections and the cell; the layer equals its window at first."""
    attention_key, memory_key = jax.random.split(key)
    attention = projections.init_params(config.window, attention_key)
    return init_memory(config, attention, memory_key)


def init_memory(
    config: HybridConfig, attention: AttentionParams, key: PRNGKeyArray
) -> HybridParams:
    """An attention layer's projections, and a new memory, α = 0 where it has one."""
    memory_key, feature_key = jax.random.split(key)
    cell = config.shared_cell()
    heads, by_token = config.window.num_heads, config.gate == "token"
    return HybridParams(
        attention=attention,
        features=init_features(config, feature_key) if cell.unit_norm else None,
        memory=cell.init_params(memory_key),
        balance=BalanceParams(
            # At α = 0 the output is the window's, and α has a gradient.
            amount=jnp.zeros(heads) if by_token else None,
            weight=jnp.zeros((config.model_dim, heads)) if by_token else None,
            bias=jnp.zeros(heads),
        ),
    )


def init_features(config: HybridConfig, key: PRNGKeyArray) -> FeatureParams:
    """Identity maps, or random ones between different widths."""
    width, heads, memories = _sizes(config)
    key_dim, value_dim = config.memory.key_dim, config.memory.value_dim
    _, key_key, value_key, read_key = jax.random.split(key, 4)

    def draw(key, count, *size):
        if size[0] == size[1]:
            return jnp.tile(jnp.eye(size[0])[None], (count, 1, 1))
        return jax.random.normal(key, (count, *size)) * size[0] ** -0.5

    keys = draw(key_key, memories, width, key_dim)
    return FeatureParams(
        # Equal for query and key, so that a query finds similar keys. Each a buffer of
        # its own, so that all can be donated.
        query=jnp.array(jnp.repeat(keys, heads // memories, axis=0)),
        key=keys,
        value=draw(value_key, memories, width, value_dim),
        read=draw(read_key, heads, value_dim, width),
        query_bias=jnp.zeros(heads * key_dim),
        key_bias=jnp.zeros(memories * key_dim),
    )


def _sizes(config: HybridConfig) -> tuple[int, int, int]:
    """K, H and M."""
    window = config.window
    return window.head_dim, window.num_heads, config.memory.num_heads


def init_state(config: HybridConfig, batch: int) -> HybridState:
    """An empty window and an empty memory."""
    return HybridState(
        init_window(config.window, batch), config.shared_cell().init_state(batch)
    )


def step(
    config: HybridConfig,
    params: HybridParams,
    state: HybridState,
    x: Float[Array, "B D"],
) -> tuple[HybridState, Float[Array, "B D"]]:
    """Slides the window by one token and writes the one that leaves it."""
    check_input(x, config.model_dim, state)
    segment = x[:, None]
    q, k, v = projections.qkv_projection(config.window, params.attention, segment)
    oldest = Left(*oldest_of_window(config.window, state.window))
    window, attended = read_window(config.window, state.window, q, k, v)
    inputs = memory_inputs(config, params, q, oldest)
    inputs = jax.tree.map(lambda leaf: leaf[:, 0], inputs)
    memory, read = config.shared_cell().step(params.memory, state.memory, *inputs)
    y = balance(params, segment, attended, read[:, None], oldest.written)
    y = projections.output_projection(params.attention, y, segment)
    return HybridState(window, memory), y[:, 0]


def apply(
    config: HybridConfig,
    params: HybridParams,
    state: HybridState,
    x: Float[Array, "B T D"],
) -> tuple[HybridState, Float[Array, "B T D"]]:
    """Equal to T steps, computed faster."""
    check_input(x, config.model_dim, state)
    q, k, v = projections.qkv_projection(config.window, params.attention, x)
    oldest = left_window(config.window, state.window, k, v)
    window, attended = read_window(config.window, state.window, q, k, v)
    inputs = memory_inputs(config, params, q, oldest)
    memory, read = config.shared_cell().apply(params.memory, state.memory, *inputs)
    y = balance(params, x, attended, read, oldest.written)
    y = projections.output_projection(params.attention, y, x)
    return HybridState(window, memory), y


class Left(NamedTuple):
    """Tokens that leave the window as T new ones arrive; zeros before the first."""

    keys: Float[Array, "B T G K"]
    values: Float[Array, "B T G K"]
    written: Bool[Array, "B T"]


def left_window(
    config: SlidingWindowConfig,
    window: SlidingWindowState,
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
) -> Left:
    """The tokens that T new ones push out of the window."""
    length = k.shape[1]
    new = (k, v, jnp.ones(k.shape[:2], bool))

    def join(old, new):
        return jnp.concatenate([old, new.astype(old.dtype)], axis=1)

    past = in_order(config, window)
    return Left(*(join(*pair)[:, :length] for pair in zip(past, new, strict=True)))


def memory_inputs(
    config: HybridConfig, params: HybridParams, q: Float[Array, "B T H K"], left: Left
) -> tuple[Array, Array, Array, Array]:
    """Inputs q, k, v and x of the cell, in the dtype of q."""
    k, v = left.keys.astype(q.dtype), left.values.astype(q.dtype)
    written = left.written[..., None]
    if params.features is None:
        return q, k, v, written.astype(q.dtype)
    maps = params.features
    groups = config.memory.num_heads // config.window.num_kv_heads
    of_heads = functools.partial(jnp.repeat, repeats=groups, axis=2)

    def into(x, weight):
        return jnp.einsum("bthk,hkf->bthf", x, weight.astype(x.dtype))

    def unit(x, weight, bias):
        shift = bias.reshape(1, 1, x.shape[2], -1).astype(x.dtype)
        return l2_normalize(into(x, weight) + shift)

    x = jnp.concatenate([k, v], axis=2).reshape(*k.shape[:2], -1)
    keys = unit(of_heads(k), maps.key, maps.key_bias)
    return (
        unit(q, maps.query, maps.query_bias),
        # A key of zeros writes nothing; with the bias it would have norm 1.
        jnp.where(written[..., None], keys, 0),
        into(of_heads(v), maps.value),
        x,
    )


def balance(
    params: HybridParams,
    x: Float[Array, "B T D"],
    attended: Float[Array, "B T H K"],
    read: Float[Array, "B T H V"],
    written: Bool[Array, "B T"],
) -> Float[Array, "B T H K"]:
    """a + m (φ_r(r) - a); only the window's output while the memory is empty."""
    amount, weight, bias = params.balance
    read = read.astype(x.dtype)
    if params.features is not None:
        high = read.astype(jnp.float32)
        # Reads of some memories grow with the text; small ones are unchanged.
        scale = jax.lax.rsqrt(1 + (high**2).mean(axis=-1, keepdims=True))
        read = jnp.einsum(
            "bthv,hvk->bthk",
            (high * scale).astype(x.dtype),
            params.features.read.astype(x.dtype),
        )
    logits = bias[None, None].astype(jnp.float32)
    if weight is not None:
        logits = gates.linear_logits(x, weight) + logits
    share = jax.nn.sigmoid(logits) * written[..., None].astype(logits.dtype)
    if amount is not None:
        share = amount[None, None] * share
    return attended + share[..., None].astype(x.dtype) * (read - attended)


def hybrids(layers: Iterable[MechanismConfig]) -> dict[int, HybridConfig]:
    """The hybrids of a model's layers, by number."""
    return {i: c for i, c in enumerate(layers) if isinstance(c, HybridConfig)}


def attention_params(params: PyTree) -> PyTree:
    """The projections of a hybrid's attention; other parameters as they are."""
    return params.attention if isinstance(params, HybridParams) else params
