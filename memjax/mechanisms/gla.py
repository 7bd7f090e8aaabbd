"""Gated linear attention: a decay per key channel and token.

    g_t = log sigmoid(W₂ W₁ x) / 16
    S_t = diag(exp(g_t)) S_{t-1} + k_t v_tᵀ        y_t = S_tᵀ q_t / √K

Yang et al. (2023), https://arxiv.org/abs/2312.06635, section 4.4: W₁ has rank 16, and
the 16 under the logarithm keeps the gates near 1.

Shapes: B batch, T time, D model, H heads, K key, V value, R rank.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.divided_sequence import linear_share
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import gla as gla_op
from memjax_kernels import gla_init_state, gla_step

# Width between the two matrices of the gates, which saves parameters.
RANK = 16
# Divides the log gates, which keeps the gates near 1.
DAMPING = 16.0


@dataclasses.dataclass(frozen=True)
class GLAConfig(RecurrentConfig):
    """Sizes of a layer of gated linear attention; see `RecurrentConfig`."""

    name: ClassVar[str] = "gla"

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
        )

    def with_half_lives(
        self,
        params: "GLAParams",
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> "GLAParams":
        """Gates of given half-lives, a head; see `CellConfig`."""
        logits = gates.half_life_logits(half_lives, self.num_heads, DAMPING)
        # One of the narrow channels becomes constant, and carries the bias.
        bias = jnp.broadcast_to(logits[:, None], params.widen.shape[1:])
        return GLAParams(
            narrow=params.narrow.at[:, 0].set(constant),
            widen=params.widen.at[0].set(bias),
        )

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return AXES


class GLAParams(NamedTuple):
    """Learned gates."""

    narrow: Float[Array, "D R"]
    widen: Float[Array, "R H K"]


AXES = GLAParams(narrow=axes("model"), widen=axes(None, "heads"))


def init_params(config: GLAConfig, key: PRNGKeyArray) -> GLAParams:
    """Draws the weights of the gates."""
    narrow_key, widen_key = jax.random.split(key)
    return GLAParams(
        narrow=gates.draw_weight(narrow_key, config.model_dim, RANK),
        widen=gates.draw_weight(widen_key, RANK, config.num_heads, config.key_dim),
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
    g = _log_gates(params, x)
    return gla_step(q * config.key_dim**-0.5, k, v, g, memory)


def apply(
    config: GLAConfig,
    params: GLAParams,
    memory: Float[Array, "B H K V"] | None,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    g = _log_gates(params, x)
    q = q * config.key_dim**-0.5
    return gla_op(q, k, v, g, memory, reset=reset, implementation=config.implementation)


def _log_gates(params: GLAParams, x: Float[Array, "*B D"]) -> Float[Array, "*B H K"]:
    # `linear_logits` gives float32; the second product is in the dtype of x as the
    # first.
    narrow = gates.linear_logits(x, params.narrow, of_heads=False).astype(x.dtype)
    logits = gates.linear_logits(narrow, params.widen)
    return jax.nn.log_sigmoid(logits) / DAMPING
