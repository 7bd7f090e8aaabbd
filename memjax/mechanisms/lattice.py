"""Lattice: slots on the unit sphere, written only by what is new to them.

    γ_t = sigmoid(w_γ x + b_γ)        λ_t = sigmoid(w_λ x + b_λ)
    s_i ← s_i - γ_t c_i (h_t - s_i ⟨s_i, h_t⟩), divided by its norm
    y_t = Σ_i q_{t,i} s_i

    variant   h_t          c_t
    "dec"     S k_t - v_t  k_t
    "enc"     v_t          Sᵀ v_t - k_t
    "sim"     -v_t         k_t

Karami & Mirrokni (2025), https://arxiv.org/abs/2504.05646, eqs. 6 to 18;
`memjax_kernels.lattice` is the recurrence. q and k are two convolutions of one
projection (appendix A), of unit norm, one channel a slot. Forgetting scales the slots
by 1 - γ λ ("l2", eq. 16) or draws their entries towards 0 by γ λ ("l1", eq. 18). What
the paper leaves open: γ starts at 0.05 and λ at 0.01; the slots' start, orthonormal
rows, is learned, and divided by its norm before use; "enc" divides values by their
norm, for they are what it predicts from, and a step of γ |v|² > 2 would diverge.

Shapes: B batch, T time, D model, H heads, M = K slots, V value, C chunk.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

import memjax_kernels
from memjax.checks import check_sizes, require_known
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers import gates, recurrent_block
from memjax.mechanisms.layers.gates import Gate
from memjax.mechanisms.layers.recurrent_block import BlockConfig, Core, Memory
from memjax_kernels.lattice import (
    VARIANTS,
    Forget,
    Variant,
    beginning,
    empty_state,
    step,
)
from memjax_kernels.lattice.memory import Initial
from memjax_kernels.lattice.sphere import unit


@dataclasses.dataclass(frozen=True)
class LatticeOptions:
    """Options of Lattice.

    Attributes:
        variant: the objective of a write.
        chunk_size: C, tokens whose gradients are taken at one memory; 1 is the
            recurrence of the paper. Part of what is computed.
        normalize: whether slots stay on the unit sphere (eq. 14); without, their
            directions are read by the objective and they themselves by the query.
        forget: None, "l2", or "l1", which needs chunk_size=1.
        initial: the start of training: "orthonormal" slots, which must not be more
            than they are wide, or "normalised", random ones of unit norm.
    """

    variant: Variant = "dec"
    chunk_size: int = 16
    normalize: bool = True
    forget: Forget | None = None
    initial: Initial = "orthonormal"

    def __post_init__(self):
        check_sizes(chunk_size=self.chunk_size)
        require_known("variant", self.variant, VARIANTS)
        require_known("forget", self.forget, (None, "l2", "l1"))
        require_known("initial", self.initial, ("orthonormal", "normalised"))
        if self.forget == "l1" and self.chunk_size > 1:
            raise ValueError(
                "forget='l1' is defined for chunk_size=1 only, got "
                f"chunk_size={self.chunk_size}"
            )


class LatticeParams(NamedTuple):
    """Learned gates, and slots to start from."""

    step: Gate
    forget: Gate | None
    start: Float[Array, "H M V"]


def lattice(config: BlockConfig, options: LatticeOptions | None = None) -> Mechanism:
    """Builds the mechanism for one configuration.

    Args:
        config: sizes; `key_dim` is the number of slots.
        options: which Lattice.

    Raises:
        ValueError: on initial="orthonormal" with more slots than `value_dim`.
    """
    options = options or LatticeOptions()
    heads, slots, width = config.num_heads, config.key_dim, config.value_dim
    size = options.chunk_size
    start = empty_state(1, heads, slots, width, size, initial=options.initial).start[0]
    rule = dict(
        variant=options.variant, normalize=options.normalize, forget=options.forget
    )

    def init_params(key: PRNGKeyArray) -> LatticeParams:
        step_key, forget_key = jax.random.split(key)
        gate = (config.model_dim, heads)
        forget = None
        if options.forget is not None:
            forget = gates.init_gate(forget_key, gate, 0.01)
        return LatticeParams(
            step=gates.init_gate(step_key, gate, 0.05),
            forget=forget,
            start=jnp.array(start),
        )

    def run(call, **static):
        def tokens(params, memory, x, q, k, v):
            gamma = jax.nn.sigmoid(gates.gate_logits(params.step, x))
            rows = jnp.repeat(params.start[None], x.shape[0], axis=0)
            if options.normalize:
                rows = unit(rows)
            if options.variant == "enc":
                v = recurrent_block.unit(v)
            state, y = call(
                *(q, k, v, gamma),
                recurrent_block.started(memory, beginning(rows, size)),
                g=_log_gate(options.forget, params, gamma, x),
                **static,
            )
            return Memory(state, jnp.zeros_like(memory.fresh)), y

        return tokens

    core = Core(
        init_params=init_params,
        init_memory=lambda batch: recurrent_block.unstarted(
            batch, empty_state(batch, heads, slots, width, size)
        ),
        step=run(step, **rule),
        apply=run(memjax_kernels.lattice, chunk_size=size, **rule),
    )
    return recurrent_block.build(config, core, shared_projection=True)


def _log_gate(forget, params, gamma, x):
    """log(1 - γ λ) for "l2", -γ λ for "l1"."""
    if forget is None:
        return None
    amount = gamma * jax.nn.sigmoid(gates.gate_logits(params.forget, x))
    return jnp.log1p(-amount) if forget == "l2" else -amount
