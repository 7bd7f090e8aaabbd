"""TTT-linear: the memory is a linear layer that is trained while it reads.

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.checks import check_positive, check_sizes
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.recurrent_block import BlockConfig, Core, Memory
from memjax_kernels.ttt_linear import empty_state, start_state, step


@dataclasses.dataclass(frozen=True)
class TTTOptions:
    """Options of TTT-linear.

    Attributes:
        chunk_size: C, tokens of a mini-batch; part of what is computed.
        rate: largest learning rate of a mini-batch, the paper's 1.
    """

    chunk_size: int = 16
    rate: float = 1.0

    def __post_init__(self):
        check_sizes(chunk_size=self.chunk_size)
        check_positive(rate=self.rate)


class TTTParams(NamedTuple):
    """Learned gate, layer norm, and weights that the memory starts from.

    The layer norm's are flat, because weight decay passes over vectors.
    """

    rate: Float[Array, "D H"]
    scale: Float[Array, " HV"]
    shift: Float[Array, " HV"]
    weights: Float[Array, "H K V"]
    bias: Float[Array, "H V"]


def ttt_linear(config: BlockConfig, options: TTTOptions | None = None) -> Mechanism:
    """Builds the mechanism for one configuration.

    Raises:
        ValueError: unless keys and values have one width.
    """
    if config.key_dim != config.value_dim:
        raise ValueError(
            f"ttt_linear needs key_dim == value_dim, got {config.key_dim} and "
            f"{config.value_dim}"
        )
    options = options or TTTOptions()
    heads, width, size = config.num_heads, config.key_dim, options.chunk_size

    def init_params(key: PRNGKeyArray) -> TTTParams:
        rate_key, weights_key = jax.random.split(key)
        deviation = 0.02 * width**0.5
        return TTTParams(
            rate=gates.draw_weight(rate_key, config.model_dim, heads),
            scale=jnp.ones(heads * width),
            shift=jnp.zeros(heads * width),
            weights=jax.random.normal(weights_key, (heads, width, width)) * deviation,
            bias=jnp.zeros((heads, width)),
        )

    def run(call):
        def tokens(params, memory, x, q, k, v):
            batch = x.shape[0]
            start = start_state(
                jnp.repeat(params.weights[None], batch, axis=0),
                jnp.repeat(params.bias[None], batch, axis=0),
                size,
            )
            eta = jax.nn.sigmoid(gates.project(x, params.rate))
            state, y = call(
                *(q, k, v, eta * (options.rate / size)),
                params.scale.reshape(heads, width),
                params.shift.reshape(heads, width),
                recurrent_block.started(memory, start),
                chunk_size=size,
            )
            return Memory(state, jnp.zeros_like(memory.fresh)), y

        return tokens

    core = Core(
        init_params=init_params,
        init_memory=lambda batch: recurrent_block.unstarted(
            batch, empty_state(batch, heads, width, size)
        ),
        step=run(step),
        apply=run(memjax_kernels.ttt_linear),
    )
    return recurrent_block.build(config, core)
