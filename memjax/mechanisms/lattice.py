"""Lattice: slots on the unit sphere, updated orthogonally to themselves.

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
the paper leaves open: γ is initialised to 0.05 and λ to 0.01; the initial slots,
orthonormal rows, are learned, and normalised before use; "enc" normalises values, from
which it predicts, because a step of γ |v|² > 2 would diverge.

Shapes: B batch, T time, D model, H heads, M = K slots, V value, C chunk.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.checks import check_sizes, require_known
from memjax.mechanisms.base import Mechanism, axes
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
from memjax.mechanisms.layers.gates import Gate
from memjax.mechanisms.layers.recurrent import block
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import (
    LATTICE_VARIANTS,
    LatticeForget,
    LatticeInitial,
    LatticeVariant,
    lattice_init_state,
    lattice_state,
    lattice_step,
)
from memjax_kernels import l2_normalize as l2_normalize_heads
from memjax_kernels import lattice as lattice_op
from memjax_kernels._src.lattice.sphere import l2_normalize


@dataclasses.dataclass(frozen=True)
class LatticeConfig(RecurrentConfig):
    """Sizes and options of a layer of Lattice.

    Queries and keys have a channel for each slot: `key_dim` is no argument.

    Attributes:
        slots: M, of each head; None is `value_dim`.
        variant: the objective of a write.
        chunk_size: C, tokens whose gradients are taken at one memory; 1 is the
            recurrence of the paper. Part of what is computed.
        normalize: whether slots stay on the unit sphere (eq. 14); without, their
            directions are read by the objective and they themselves by the query.
        forget: None, "l2", or "l1", which needs chunk_size=1.
        initial: slots before training: "orthonormal", at most `value_dim`, or
            "normalised", random ones of unit norm.
    """

    name: ClassVar[str] = "lattice"

    key_dim: int = dataclasses.field(init=False, repr=False)
    slots: int | None = None
    variant: LatticeVariant = "dec"
    chunk_size: int = 16
    normalize: bool = True
    forget: LatticeForget | None = None
    initial: LatticeInitial = "orthonormal"

    def __post_init__(self):
        slots = self.value_dim if self.slots is None else self.slots
        check_sizes(slots=slots, chunk_size=self.chunk_size)
        object.__setattr__(self, "key_dim", slots)
        super().__post_init__()
        require_known("variant", self.variant, LATTICE_VARIANTS)
        require_known("forget", self.forget, (None, "l2", "l1"))
        require_known("initial", self.initial, ("orthonormal", "normalised"))
        if self.forget == "l1" and self.chunk_size > 1:
            raise ValueError(
                "forget='l1' is defined for chunk_size=1 only, got "
                f"chunk_size={self.chunk_size}"
            )
        if self.initial == "orthonormal" and self.key_dim > self.value_dim:
            raise ValueError(
                f"initial='orthonormal' needs slots <= value_dim={self.value_dim}, "
                f"got {self.key_dim}; initial='normalised' takes more"
            )

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        # Appendix A of the paper: query and key are two convolutions of one projection.
        return block.mechanism(self, self.cell(), shared_projection=True)

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(
            self, init_params, init_state, step, apply, reset_chunk=self.chunk_size
        )

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return AXES


class LatticeParams(NamedTuple):
    """Learned gates and initial slots."""

    step: Gate
    forget: Gate | None
    slots: Float[Array, "H M V"]


AXES = LatticeParams(step=gates.AXES, forget=gates.AXES, slots=axes("heads"))


def init_params(config: LatticeConfig, key: PRNGKeyArray) -> LatticeParams:
    """Draws the gates' weights and the initial slots."""
    step_key, forget_key = jax.random.split(key)
    gate = (config.model_dim, config.num_heads)
    forget = None
    if config.forget is not None:
        forget = gates.init_gate(forget_key, gate, 0.01)
    # The op's own empty memory: an untrained layer equals the op.
    slots = lattice_init_state(1, *_sizes(config), initial=config.initial).start[0]
    return LatticeParams(gates.init_gate(step_key, gate, 0.05), forget, slots)


def init_state(config: LatticeConfig, batch: int) -> LearnedInit:
    """Slots to be initialised by the first call."""
    return uninitialised(batch, lattice_init_state(batch, *_sizes(config)))


def step(
    config: LatticeConfig,
    params: LatticeParams,
    memory: LearnedInit,
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[LearnedInit, Float[Array, "B H V"]]:
    """Writes one token and reads with its query."""
    gamma, g = _gates(config, params, x)
    slots, y = lattice_step(
        q,
        k,
        _values(config, v),
        gamma,
        g,
        initialise_in_place(memory, _initial(config, params, 1)),
        variant=config.variant,
        normalize=config.normalize,
        forget=config.forget,
    )
    return initialised(slots), y


def apply(
    config: LatticeConfig,
    params: LatticeParams,
    memory: LearnedInit | None,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[LearnedInit, Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    initial = _initial(config, params, x.shape[0])
    slots = None if memory is None else initialise(memory, initial)
    gamma, g = _gates(config, params, x)
    slots, y = lattice_op(
        q,
        k,
        _values(config, v),
        gamma,
        g,
        slots,
        empty=initial,
        chunk_size=config.chunk_size,
        variant=config.variant,
        normalize=config.normalize,
        forget=config.forget,
        reset=reset,
        implementation=config.implementation,
    )
    return initialised(slots), y


def _sizes(config):
    """H, M, V and C, in the op's order."""
    return config.num_heads, config.key_dim, config.value_dim, config.chunk_size


def _initial(config, params, batch):
    """The learned slots of a batch, at the start of a chunk."""
    # Training moves the learned slots off the unit sphere, where the recurrence begins.
    slots = for_batch(params.slots, batch)
    return lattice_state(
        l2_normalize(slots) if config.normalize else slots, config.chunk_size
    )


def _values(config, v):
    """Values, of unit norm in "enc"."""
    # "enc" predicts from the values, and a step of γ |v|² > 2 would diverge.
    return l2_normalize_heads(v) if config.variant == "enc" else v


def _gates(config, params, x):
    """γ, and the log decay: log(1 - γ λ) for "l2", -γ λ for "l1"."""
    gamma = jax.nn.sigmoid(gates.gate_logits(params.step, x))
    if config.forget is None:
        return gamma, None
    # Forgetting is part of the gradient step, and so is scaled by its rate γ.
    amount = gamma * jax.nn.sigmoid(gates.gate_logits(params.forget, x))
    # log1p keeps small amounts, for which 1 - γ λ would round to 1.
    return gamma, jnp.log1p(-amount) if config.forget == "l2" else -amount
