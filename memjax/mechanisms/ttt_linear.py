"""TTT-linear: the memory is a linear layer, trained on the tokens it reads.

    η_t = rate / C · sigmoid(w x)
    ℓ_t(W, b) = ½ |LN(k_tᵀ W + b) - (v_t - k_t)|²
    W ← W - Σ η_t ∇_W ℓ_t        b likewise        y_t = q_t + LN(q_tᵀ W + b)

Sun et al. (2024), https://arxiv.org/abs/2407.04620, sections 2.4, 2.5 and 2.7. All
gradients of a mini-batch of C tokens are taken at its start; the rate is divided by
C, so that a mini-batch takes one step of their mean, as the official code does. Keys
are of unit norm here and of norm √K there, so there is no division by K, and W starts
√K times as large, at the same |LN's input|.

Shapes: B batch, T time, D model, H heads, K key, V = K value, C mini-batch.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.checks import check_positive, check_sizes
from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import Cell, bind
from memjax.mechanisms.cells.learned_init import (
    LearnedInit,
    for_batch,
    initialise,
    initialise_in_place,
    initialised,
    uninitialised,
)
from memjax.mechanisms.layers import gates
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import ttt_linear as ttt_linear_op
from memjax_kernels import (
    ttt_linear_init_state,
    ttt_linear_state,
    ttt_linear_step,
)


@dataclasses.dataclass(frozen=True)
class TTTLinearConfig(RecurrentConfig):
    """Sizes and options of a layer of TTT-linear; `key_dim` must be `value_dim`.

    Attributes:
        chunk_size: C, tokens of a mini-batch; part of what is computed.
        rate: largest learning rate of a mini-batch, the paper's 1.
    """

    name: ClassVar[str] = "ttt_linear"

    chunk_size: int = 16
    rate: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_sizes(chunk_size=self.chunk_size)
        check_positive(rate=self.rate)
        if self.key_dim != self.value_dim:
            raise ValueError(
                f"ttt_linear needs key_dim == value_dim, got {self.key_dim} and "
                f"{self.value_dim}"
            )

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(
            self, init_params, init_state, step, apply, reset_chunk=self.chunk_size
        )

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return AXES


class TTTParams(NamedTuple):
    """Learned gate, layer norm and initial weights of the memory."""

    rate: Float[Array, "D H"]
    scale: Float[Array, " HV"]
    shift: Float[Array, " HV"]
    weights: Float[Array, "H K V"]
    bias: Float[Array, "H V"]


AXES = TTTParams(
    rate=axes("model", "heads"),
    scale=axes(),
    shift=axes(),
    weights=axes("heads"),
    bias=axes("heads"),
)


def init_params(config: TTTLinearConfig, key: PRNGKeyArray) -> TTTParams:
    """Draws the weights of the rate and of the initial memory."""
    rate_key, weights_key = jax.random.split(key)
    heads, width = config.num_heads, config.key_dim
    # Keys have norm 1 here and √K in the official code: W starts √K times as large.
    deviation = 0.02 * width**0.5
    return TTTParams(
        rate=gates.draw_weight(rate_key, config.model_dim, heads),
        scale=jnp.ones(heads * width),
        shift=jnp.zeros(heads * width),
        weights=jax.random.normal(weights_key, (heads, width, width)) * deviation,
        bias=jnp.zeros((heads, width)),
    )


def init_state(config: TTTLinearConfig, batch: int) -> LearnedInit:
    """A memory to be initialised by the first call."""
    memory = ttt_linear_init_state(
        batch, config.num_heads, config.key_dim, config.chunk_size
    )
    return uninitialised(batch, memory)


def step(
    config: TTTLinearConfig,
    params: TTTParams,
    memory: LearnedInit,
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[LearnedInit, Float[Array, "B H V"]]:
    """Trains the memory on one token and reads with its query."""
    layer = initialise_in_place(memory, _initial(config, params, 1))
    eta, scale, shift = _rate_and_norm(config, params, x)
    layer, y = ttt_linear_step(
        q, k, v, eta, scale, shift, layer, chunk_size=config.chunk_size
    )
    return initialised(layer), y


def apply(
    config: TTTLinearConfig,
    params: TTTParams,
    memory: LearnedInit | None,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[LearnedInit, Float[Array, "B T H V"]]:
    """Equal to T steps, computed by mini-batches."""
    initial = _initial(config, params, x.shape[0])
    layer = None if memory is None else initialise(memory, initial)
    eta, scale, shift = _rate_and_norm(config, params, x)
    layer, y = ttt_linear_op(
        q,
        k,
        v,
        eta,
        scale,
        shift,
        layer,
        empty=initial,
        chunk_size=config.chunk_size,
        reset=reset,
        implementation=config.implementation,
    )
    return initialised(layer), y


def _initial(config, params, batch):
    """The learned memory of a batch, at the start of a mini-batch."""
    weights, bias = for_batch((params.weights, params.bias), batch)
    return ttt_linear_state(weights, bias, config.chunk_size)


def _rate_and_norm(config, params, x):
    """η [*B, H], and the layer norm's scale and shift [H, V]."""
    heads, width = config.num_heads, config.key_dim
    eta = jax.nn.sigmoid(gates.linear_logits(x, params.rate))
    return (
        # Divided by C, so that the C gradients of a mini-batch make one step of their
        # mean.
        eta * (config.rate / config.chunk_size),
        params.scale.reshape(heads, width),
        params.shift.reshape(heads, width),
    )
