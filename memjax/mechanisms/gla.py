"""Gated linear attention: a decay per key channel and token.

    g_t = log sigmoid(W₂ W₁ x) / 16
    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √K

Yang et al. (2023), https://arxiv.org/abs/2312.06635, section 4.4: W₁ has rank 16, and
the 16 under the logarithm keeps the gates near 1.

HGRN2 ties keys to gates: what a channel forgets is what it writes.

    g_t = log(l + (1 - l) sigmoid(f_t))        k_t = 1 - exp(g_t)

Qin et al. (2024), https://arxiv.org/abs/2404.07904, section 3: f is the projection that
keys have elsewhere, l a bound of each channel that grows with the layers.

Shapes: B batch, T time, D model, H heads, G of keys, K key, V value, R rank.
"""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.divided_sequence import linear_share
from memjax.mechanisms.layers.norms import expand_leading_dims
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import Decay, gla_init_state, gla_step
from memjax_kernels import gla as gla_op

# Width between the two matrices of the gates, which saves parameters.
RANK = 16
# Divides the log gates, which keeps the gates near 1.
DAMPING = 16.0


@dataclasses.dataclass(frozen=True)
class GLAConfig(RecurrentConfig):
    """Sizes of a layer of gated linear attention; see `RecurrentConfig`.

    Attributes:
        gate_bias: whether the gates' logits have biases.
        tied_keys: HGRN2: the projected keys are the gates' logits.
        lower_bound: whether gates of tied keys have a learned lower bound.
    """

    name: ClassVar[str] = "gla"

    gate_bias: bool = False
    tied_keys: bool = False
    lower_bound: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.tied_keys and self.gate_bias:
            raise ValueError("gate_bias must be False with tied_keys, got True")
        if self.lower_bound and not self.tied_keys:
            raise ValueError("lower_bound needs tied_keys, got tied_keys=False")

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(
            self,
            init_params,
            init_state,
            step,
            apply,
            reset_chunk=1,
            apply_share=linear_share(apply),
            # Tied keys are gates, of which every head has its own.
            shares_keys=not self.tied_keys,
        )

    def with_half_lives(
        self,
        params: "GLAParams",
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> "GLAParams":
        """Gates of given half-lives, a head; see `CellConfig`.

        Raises:
            ValueError: with tied keys, whose gates are not of the tokens alone.
        """
        if self.tied_keys:
            raise ValueError("tied_keys must be False in a hybrid, got True")
        logits = gates.half_life_logits(half_lives, self.num_heads, DAMPING)
        # One of the narrow channels becomes constant, and carries the bias.
        bias = jnp.broadcast_to(logits[:, None], (self.num_heads, self.key_dim))
        narrow, widen = params.narrow, params.widen
        assert narrow is not None and widen is not None
        return params._replace(
            narrow=narrow.at[:, 0].set(constant), widen=widen.at[0].set(bias)
        )

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        of_heads = axes("heads")
        if self.tied_keys:
            return GLAParams(bound=of_heads if self.lower_bound else None)
        bias = of_heads if self.gate_bias else None
        return GLAParams(axes("model"), axes(None, "heads"), bias)


class GLAParams(NamedTuple):
    """Learned gates; None is what the configuration lacks.

    `bound` has the logits of the lower bounds.
    """

    narrow: Float[Array, "D R"] | None = None
    widen: Float[Array, "R H K"] | None = None
    bias: Float[Array, "H K"] | None = None
    bound: Float[Array, "H K"] | None = None


def init_params(config: GLAConfig, key: PRNGKeyArray) -> GLAParams:
    """Draws the weights of the gates; biases are 0, and bounds one half."""
    zeros = jnp.zeros((config.num_heads, config.key_dim))
    if config.tied_keys:
        return GLAParams(bound=zeros if config.lower_bound else None)
    narrow_key, widen_key = jax.random.split(key)
    return GLAParams(
        narrow=gates.draw_weight(narrow_key, config.model_dim, RANK),
        widen=gates.draw_weight(widen_key, RANK, config.num_heads, config.key_dim),
        bias=zeros if config.gate_bias else None,
    )


def init_state(config: GLAConfig, batch: int) -> Float[Array, "B H K V"]:
    """The empty memory: zeros."""
    return gla_init_state(batch, config.num_heads, config.key_dim, config.value_dim)


def step(
    config: GLAConfig,
    params: GLAParams,
    memory: Float[Array, "B H K V"],
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """Writes one token and reads with its query."""
    g, k = _log_gates(config, params, x, k)
    return gla_step(q * config.key_dim**-0.5, k, v, g, memory)


def apply(
    config: GLAConfig,
    params: GLAParams,
    memory: Float[Array, "B H K V"] | None,
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    g, k, decay = _gates(config, params, x, k)
    return gla_op(
        *(q * config.key_dim**-0.5, k, v, g, memory),
        reset=reset,
        implementation=config.implementation,
        decay=decay,
    )


def _gates(config, params, x, k):
    """Log gates [*B, H, K], or logits of `Decay`, and keys."""
    if config.tied_keys:
        logits = k.astype(jnp.float32)
        g, k = jax.nn.log_sigmoid(logits), jax.nn.sigmoid(-logits)
        if params.bound is not None:
            least = expand_leading_dims(params.bound, logits)
            g = jnp.logaddexp(jax.nn.log_sigmoid(least), jax.nn.log_sigmoid(-least) + g)
            k = k * jax.nn.sigmoid(-least)
        return g, k.astype(x.dtype), None
    shape = config.num_heads, config.key_dim
    bias = jnp.zeros(shape) if params.bias is None else -params.bias
    # log sigmoid(z) = -softplus(-z); the product was rounded to the dtype of x.
    logits = gates.low_rank_logits(x, params.narrow, params.widen).astype(x.dtype)
    return -logits, k, Decay(jnp.full(config.num_heads, -math.log(DAMPING)), bias)


def _log_gates(config, params, x, k):
    """g [*B, H, K], float32, and keys."""
    g, k, decay = _gates(config, params, x, k)
    return g if decay is None else decay.log_gates(g), k
