"""Elastic Memory: keys and values of the past as polynomials, read at sampled points.

    C_i = P_i C_{i-1} + K_i F_i         for F = keys without RoPE, and values  (eq. 6)
    K_mem, V_mem = R C_{i-1}            R: Legendre basis at sampled fractions (eq. 8)
    O = softmax(Q [K_mem, K]ᵀ / √K + mask) [V_mem, V]                   (eqs. 9, 10)

Song et al. (2026), "Towards Compressive and Scalable Recurrent Memory", Algorithm 1.
C holds the first N Legendre coefficients of everything before the current block;
queries see all memory tokens and, causally, their own block. Parameters are those of
plain attention, and parameters and state do not depend on the sampling.

Shapes: B batch, T time, D model, H query heads, G key-value heads, K head width,
L block, N order, M memory tokens, n blocks, X = 2 G K channels.
"""

import dataclasses
import functools
from typing import ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from memjax.checks import check_sizes, require_known
from memjax.mechanisms.base import Mechanism, check_input
from memjax.mechanisms.config import MechanismDefaults
from memjax.mechanisms.layers import coefficients, places, projections
from memjax.mechanisms.layers.divided_sequence import on_shares
from memjax.mechanisms.layers.heads import HeadsConfig, mean_keys
from memjax.mechanisms.layers.projections import AttentionParams
from memjax.mechanisms.layers.saturating_counter import advanced
from memjax.mechanisms.layers.softmax import prefix_causal
from memjax_kernels import (
    HippoImplementation,
    HippoSampling,
    hippo,
    hippo_sample_points,
    hippo_update,
)
from memjax_kernels._src.common.partition import sequence_ways
from memjax_kernels._src.common.steps.in_place import change_if

#: Numbers of a bank, 8 GB.
MAX_BANK = 2**31


@dataclasses.dataclass(frozen=True)
class ElasticMemoryConfig(HeadsConfig, MechanismDefaults):
    """Sizes of an Elastic Memory layer.

    Attributes:
        block: L, tokens with exact attention to each other; the paper's 2048.
        order: N, coefficients per channel; the paper's 540 is its 1x memory.
        memory_tokens: M, points at which the memory is read; None is min(N, L).
        sampling: their positions in the history, "uniform" or "exponential".
        decay: of the exponential sampling, in (0, 1): the distance to the present
            shrinks by it from one point to the next.
        positions: "block" restarts RoPE in each block, so that neither cost nor
            behaviour depends on the stream's length; "stream" counts on.
        bank_blocks: blocks whose matrices are built ahead, order * (order + block)
            floats each, held in the compiled program; later ones are computed when
            met. 0 stores none, the choice for large orders.
        implementation: form of the recurrence in `apply`; None is the cheapest.
    The token counter saturates at 2**30.
    """

    name: ClassVar[str] = "elastic_memory"

    block: int = 2048
    order: int = 540
    memory_tokens: int | None = None
    sampling: HippoSampling = "uniform"
    decay: float = 0.98
    positions: Literal["block", "stream"] = "block"
    bank_blocks: int = 0
    implementation: HippoImplementation | None = None

    def __post_init__(self):
        super().__post_init__()
        check_sizes(block=self.block, order=self.order, memory_tokens=self.samples)
        check_sizes(least=0, bank_blocks=self.bank_blocks)
        numbers = self.bank_blocks * self.order * (self.order + self.block)
        if numbers > MAX_BANK:
            made = f"makes matrices of {numbers:,} numbers, of at most {MAX_BANK:,}"
            raise ValueError(f"bank_blocks={self.bank_blocks} {made}")
        require_known("positions", self.positions, ("block", "stream"))
        implementations = (None, *get_args(HippoImplementation))
        require_known("implementation", self.implementation, implementations)
        # Called for its checks, so that a bad sampling is refused here and not in the
        # first call.
        hippo_sample_points(1, self.sampling, self.decay)

    @property
    def samples(self) -> int:
        """M."""
        if self.memory_tokens is None:
            return min(self.order, self.block)
        return self.memory_tokens

    @property
    def tokens_per_call(self) -> int:
        """A block."""
        return self.block

    def keys_per_query(self, length: int) -> float:
        """The block, and the points of the memory where a block came before."""
        own = mean_keys(min(length, self.block), self.block)
        return own + self.samples * max(0.0, 1 - self.block / length)

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        return Mechanism(
            init_params=functools.partial(projections.init_params, self),
            init_state=functools.partial(init_state, self),
            step=functools.partial(step, self),
            apply=functools.partial(apply, self),
        )

    def param_axes(self) -> AttentionParams:
        """Sharding axes of the projections."""
        return projections.AXES


class ElasticMemoryState(NamedTuple):
    """Coefficients of the past blocks and the tokens of the open one, in float32."""

    keys: Float[Array, "B G N K"]
    values: Float[Array, "B G N K"]
    length: Int[Array, " B"]  # tokens in the coefficients; saturates at 2**30
    # J = G K channels of a token; zero beyond `open_length`.
    open_keys: Float[Array, "B L J"]  # with RoPE of their positions in the block
    open_values: Float[Array, "B L J"]
    open_length: Int[Array, " B"]


def init_state(config: ElasticMemoryConfig, batch: int) -> ElasticMemoryState:
    """Returns the empty memory."""
    heads, width = config.num_kv_heads, config.head_dim
    numbers = (batch, heads, config.order, width)
    tokens = (batch, config.block, heads * width)
    # Each leaf its own buffer, so that a state can be donated.
    return ElasticMemoryState(
        keys=jnp.zeros(numbers, jnp.float32),
        values=jnp.zeros(numbers, jnp.float32),
        length=jnp.zeros(batch, jnp.int32),
        open_keys=jnp.zeros(tokens, jnp.float32),
        open_values=jnp.zeros(tokens, jnp.float32),
        open_length=jnp.zeros(batch, jnp.int32),
    )


def step(
    config: ElasticMemoryConfig,
    params: AttentionParams,
    state: ElasticMemoryState,
    x: Float[Array, "B D"],
) -> tuple[ElasticMemoryState, Float[Array, "B D"]]:
    """Attends from one token; compresses the block that it completes."""
    check_input(x, config.model_dim, state)
    q, k, v = projections.qkv_projection(config, params, x[:, None])
    state, y = read_token(config, state, q[:, 0], k[:, 0], v[:, 0])
    y = projections.output_projection(params, y[:, None].astype(x.dtype), x[:, None])
    return state, y[:, 0]


def read_token(
    config: ElasticMemoryConfig,
    state: ElasticMemoryState,
    q: Float[Array, "B H K"],
    k: Float[Array, "B G K"],
    v: Float[Array, "B G K"],
) -> tuple[ElasticMemoryState, Float[Array, "B H K"]]:
    """`step` between the projections, in float32.

    The memory is read as R (C q) and (wᵀ R) C: no memory token is ever formed.
    """
    token = coefficients.as_rows(
        config, k[:, None], v[:, None], state.open_length[:, None]
    )
    write = jax.vmap(lambda block, token, at: block.at[at].set(token[0]))
    open_keys, open_values = (
        write(block, row, state.open_length)
        for block, row in zip((state.open_keys, state.open_values), token, strict=True)
    )
    # The token sees itself, so it is written to the open block before it attends.
    y = prefix_causal.one_token(
        config,
        q,
        (state.keys, state.values),
        jnp.asarray(_tables(config).reconstruction),
        prefix_causal.OpenBlock(open_keys, open_values, state.open_length),
        state.length,
        config.positions == "stream",
    )

    # Only one token in L completes a block: the others must not pay for compression.
    length = state.open_length + 1
    complete = length == config.block
    state = state._replace(
        open_keys=open_keys, open_values=open_values, open_length=length
    )
    # Read before the change: else both states are live, and copied for each token.
    state, y = jax.lax.optimization_barrier((state, y))
    compress = functools.partial(_compress, config, of_blocks=True)
    return change_if(compress, jnp.any(complete), state, complete), y


def apply(
    config: ElasticMemoryConfig,
    params: AttentionParams,
    state: ElasticMemoryState,
    x: Float[Array, "B T D"],
) -> tuple[ElasticMemoryState, Float[Array, "B T D"]]:
    """Attends block by block, each batch element at its own position in its block."""
    check_input(x, config.model_dim, state)
    # In training: full blocks, at the same position in all rows.
    in_step = jnp.all((state.open_length == 0) & (state.length == state.length[0]))
    ways = sequence_ways(x.shape[1])
    fixed = (params, state)
    if ways > 1 and x.shape[1] % (ways * config.block) == 0:
        share, anywhere = (
            functools.partial(_between_projections, one, config)
            for one in (_read_share, read)
        )
        divided = functools.partial(on_shares, share)
        return jax.lax.cond(in_step, divided, anywhere, fixed, x)

    def any_read(config, *given):
        if x.shape[1] % config.block:
            return read(config, *given)
        ways_to_read = (functools.partial(f, config) for f in (_read_whole, read))
        return jax.lax.cond(in_step, *ways_to_read, *given)

    return _between_projections(any_read, config, fixed, x)


def read(
    config: ElasticMemoryConfig,
    state: ElasticMemoryState,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G K"],
    lengths: Int[Array, " B"] | None = None,
) -> tuple[ElasticMemoryState, Float[Array, "B T H K"]]:
    """`apply` between the projections, for any positions in the blocks.

    With `lengths`, batch element b has `lengths[b]` tokens, and zeros behind them.
    """
    # An open block of up to L-1 tokens may push the segment into one block more.
    blocks = (q.shape[1] + config.block - 2) // config.block + 1
    t, size = q.shape[1], blocks * config.block
    tokens_read = t if lengths is None else lengths
    lay_out = functools.partial(places.lay_out, size, state.open_length)
    # Open tokens were answered by the calls that read them: they are keys here, and
    # their positions have no queries.
    queries = lay_out(jnp.zeros_like(q[:, :0], jnp.float32), q)
    before = coefficients.of_rows(config, state.open_keys, state.open_values)
    keys, values = (lay_out(*pair) for pair in zip(before, (k, v), strict=True))
    # Only full blocks become coefficients; the rest stays open, as tokens.
    count = (state.open_length + tokens_read) // config.block
    tokens = prefix_causal.Tokens(*(_split(config, x) for x in (queries, keys, values)))
    state, attended = _apply_blocks(config, state, tokens, count, q.dtype)
    after = count * config.block
    left = (places.take(tokens, after, config.block) for tokens in (keys, values))
    open_keys, open_values = coefficients.as_rows(config, *left)
    return state._replace(
        open_keys=open_keys,
        open_values=open_values,
        open_length=state.open_length + tokens_read - after,
    ), places.take(attended.reshape(queries.shape), state.open_length, t)


def flush(config: ElasticMemoryConfig, state: ElasticMemoryState) -> ElasticMemoryState:
    """Compresses the open block, however short, and begins a new one."""
    return _compress(config, state, state.open_length > 0)


def _between_projections(read, config, fixed, x):
    """`apply` by one of the functions that read; `fixed` are params and state."""
    params, state = fixed
    q, k, v = projections.qkv_projection(config, params, x)
    state, y = read(config, state, q, k, v)
    return state, projections.output_projection(params, y, x)


def _read_share(config, state, q, k, v):
    """`_read_whole` of this device's tokens, `state` before those of all devices."""
    basis, bank = _tables(config)
    channels = coefficients.to_channels(_split(config, k), _split(config, v))
    chosen = config.implementation
    own, _ = hippo(
        channels, jnp.asarray(basis), in_step=True, bank=bank, implementation=chosen
    )
    now = coefficients.of_state(state.keys, state.values)
    before, length = coefficients.before_share(own, now, state.length, q.shape[1])
    keys, values = coefficients.to_state(before, _heads(config))
    state = state._replace(keys=keys, values=values, length=length)
    return _read_whole(config, state, q, k, v)


def _read_whole(config, state, q, k, v):
    """`read` of whole blocks with none open before, all batch elements in step.

    Tokens are already in blocks: nothing is moved.
    """
    tokens = prefix_causal.Tokens(*(_split(config, x) for x in (q, k, v)))
    count = jnp.full(q.shape[0], tokens.query.shape[1], jnp.int32)
    state, y = _apply_blocks(config, state, tokens, count, q.dtype, in_step=True)
    return state, y.reshape(q.shape)


def _apply_blocks(config, state, tokens, count, dtype, in_step=False):
    """Algorithm 1: the state after the first `count` blocks, and all blocks' outputs.

    The tokens are keys and values of all blocks; `dtype` is attention's.
    """
    # Constants of the program: the sampling and the order are static.
    basis, bank = _tables(config)
    after, memory = hippo(
        coefficients.to_channels(tokens.key, tokens.value),
        jnp.asarray(basis),
        coefficients.of_state(state.keys, state.values),
        start=state.length,
        count=count,
        in_step=in_step,
        bank=bank,
        implementation=config.implementation,
    )
    # A block attends to its own tokens; all blocks before it are in the coefficients.
    memory = coefficients.from_channels(memory.astype(dtype), _heads(config))
    attended = prefix_causal.by_blocks(
        config,
        prefix_causal.Tokens(*(x.astype(dtype) for x in tokens)),
        prefix_causal.Memory(*memory),
        state.length,
        config.positions == "stream",
    )
    keys, values = coefficients.to_state(after, _heads(config))
    length = advanced(state.length, count * config.block)
    return state._replace(keys=keys, values=values, length=length), attended


def _tables(config):
    return coefficients.tables(
        order=config.order,
        block=config.block,
        bank_blocks=config.bank_blocks,
        samples=config.samples,
        sampling=config.sampling,
        decay=config.decay,
    )


def _heads(config):
    return config.num_kv_heads, config.head_dim


def _split(config, tokens):
    """[B, n L, ...] as blocks [B, n, L, ...]."""
    return tokens.reshape(tokens.shape[0], -1, config.block, *tokens.shape[2:])


def _compress(config, state, chosen, of_blocks=False):
    """Absorbs the open tokens of some batch elements into coefficients (eq. 6).

    Full blocks, `of_blocks`, have matrices of their own.
    """
    count = jnp.where(chosen, state.open_length, 0)
    before = coefficients.of_state(state.keys, state.values)
    tokens = coefficients.of_rows(config, state.open_keys, state.open_values)
    tokens = coefficients.to_channels(*tokens)
    new = hippo_update(tokens, before, state.length, None if of_blocks else count)
    after = jnp.where(chosen[:, None, None], new, before)
    keys, values = coefficients.to_state(after, _heads(config))
    # The state promises zeros beyond `open_length`.
    keep = jnp.where(chosen, 0.0, 1.0)[:, None, None]
    return ElasticMemoryState(
        keys=keys,
        values=values,
        length=advanced(state.length, count),
        open_keys=state.open_keys * keep,
        open_values=state.open_values * keep,
        open_length=state.open_length - count,
    )


def fitted(config: object, heads: HeadsConfig, block: int) -> ElasticMemoryConfig:
    """The configuration; ValueError unless it has these heads and this block."""
    if isinstance(config, ElasticMemoryConfig):
        if (config.heads, config.block) == (heads.heads, block):
            return config
    raise ValueError(
        f"memory must be Elastic Memory with the layer's heads, {heads.heads}, and "
        f"block={block}, the window; got {config}"
    )
