"""Trellis: keys, then values, compressed into slots by online gradient descent.

    γ_t = step · sigmoid(w_γ x + b_γ)        g_t = log sigmoid(w_g x + b_g)
    a_t = W_a x, the target of both passes
    M ← exp(g_t) M - γ_t J_φ(M' k_t)ᵀ (φ(M' k_t) - a_t) k_tᵀ    M' at the chunk's start
    y_t = Ṽ_tᵀ f(K̃_t q_t)

Karami et al., "Trellis: Learning to Compress Key-Value Memory in Attention Models",
eqs. 8 to 14; `memjax_kernels.trellis` is the recurrence. What the paper leaves open:
values are divided by their norm, for they are the keys of the second pass, in which a
step of γ |v|² > 2 would diverge; both memories start from learned weights; a memory
begins to forget with exp(g) = 0.99.

Shapes: B batch, T time, D model, H heads, K key, V value, M slots, C chunk.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.checks import check_positive, check_sizes, require_known
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.gates import Gate
from memjax.mechanisms.layers.recurrent_block import BlockConfig, Core, Memory
from memjax_kernels.trellis import TrellisState, empty_state, step
from memjax_kernels.trellis.functions import ACTIVATIONS, PHIS, Activation, Phi


@dataclasses.dataclass(frozen=True)
class TrellisOptions:
    """Options of Trellis.

    Attributes:
        chunk_size: C, tokens whose gradients are taken at one memory; 1 is the fully
            nonlinear recurrence. Part of what is computed.
        phi: φ, what bends a prediction before it is compared with its target.
        activation: f, between the passes.
        forget: whether the memories forget; without, g = 0.
        shared_gates: whether both passes have the same γ and g; else each its own.
        step_size: largest γ. None is 1 / chunk_size: all gradients of a chunk are
            taken at one memory, and steps of 1 overshoot it. With φ = identity or silu
            they diverge on a key that repeats; with φ = l2_silu and chunks of 64 a
            small model came to perplexity 14.1 instead of 11.8
            (`experiments/recurrent/trellis_ablation.py`).
    """

    chunk_size: int = 64
    phi: Phi = "l2_silu"
    activation: Activation = "ln_silu"
    forget: bool = True
    shared_gates: bool = True
    step_size: float | None = None

    def __post_init__(self):
        check_sizes(chunk_size=self.chunk_size)
        require_known("phi", self.phi, PHIS)
        require_known("activation", self.activation, ACTIVATIONS)
        if self.step_size is not None:
            check_positive(step_size=self.step_size)

    @property
    def largest_step(self) -> float:
        """`step_size`, with None resolved."""
        return 1.0 / self.chunk_size if self.step_size is None else self.step_size


class TrellisParams(NamedTuple):
    """Learned target, gates, and memories to start from."""

    target: Float[Array, "D H M"]
    step: Gate
    forget: Gate | None
    keys: Float[Array, "H M K"]
    values: Float[Array, "H M V"]


def trellis(
    config: BlockConfig, slots: int = 64, options: TrellisOptions | None = None
) -> Mechanism:
    """Builds the mechanism for one configuration and number of slots M."""
    check_sizes(slots=slots)
    options = options or TrellisOptions()
    size = options.chunk_size
    functions = dict(phi=options.phi, activation=options.activation)

    def run(call, **static):
        def tokens(params, memory, x, q, k, v):
            start = _start(params, x.shape[0], size)
            gamma = jax.nn.sigmoid(gates.gate_logits(params.step, x))
            g = None
            if params.forget is not None:
                g = jax.nn.log_sigmoid(gates.gate_logits(params.forget, x))
            state, y = call(
                *(q, k, gates.unit(v)),
                gates.project(x, params.target),
                gamma * options.largest_step,
                g,
                recurrent_block.started(memory, start),
                **static,
            )
            return Memory(state, jnp.zeros_like(memory.fresh)), y

        return tokens

    core = Core(
        init_params=lambda key: _init_params(config, slots, options, key),
        init_memory=lambda batch: recurrent_block.unstarted(
            batch,
            empty_state(
                *(batch, config.num_heads, slots, config.key_dim, config.value_dim),
                chunk_size=size,
            ),
        ),
        step=run(step, **functions),
        apply=run(memjax_kernels.trellis, chunk_size=size, **functions),
    )
    return recurrent_block.build(config, core)


def _init_params(
    config: BlockConfig, slots: int, options: TrellisOptions, key: PRNGKeyArray
) -> TrellisParams:
    """Draws memories that map unit keys to vectors of norm √(M / K)."""
    d, h = config.model_dim, config.num_heads
    target_key, step_key, forget_key, keys_key, values_key = jax.random.split(key, 5)
    gate = (d, h) if options.shared_gates else (d, h, 2)
    draw = lambda key, width: jax.random.normal(key, (h, slots, width)) * width**-0.5
    return TrellisParams(
        target=gates.draw_weight(target_key, d, h, slots),
        step=gates.init_gate(step_key, gate, 0.5),
        forget=gates.init_gate(forget_key, gate, 0.99) if options.forget else None,
        keys=draw(keys_key, config.key_dim),
        values=draw(values_key, config.value_dim),
    )


def _start(params, batch, chunk_size):
    """The learned memory, at the start of a chunk, for every row."""
    keys, values = (
        jnp.repeat(matrix[None], batch, axis=0)
        for matrix in (params.keys, params.values)
    )
    position = jnp.zeros(batch, jnp.int32)
    return TrellisState(keys, keys, values, values, position, chunk_size)
