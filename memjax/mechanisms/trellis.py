"""Trellis: keys, then values, compressed into slots by online gradient descent.

    γ_t = sigmoid(w_γ x + b_γ), bounded      g_t = log sigmoid(w_g x + b_g)
    a_t = √M W_a x / |W_a x|, the target of both passes
    M ← exp(g_t) M - γ_t J_φ(M' k_t)ᵀ (φ(M' k_t) - a_t) k_tᵀ    M' at the chunk's start
    y_t = Ṽ_tᵀ f(K̃_t q_t)

Karami et al., "Trellis: Learning to Compress Key-Value Memory in Attention Models",
eqs. 8 to 14; `memjax_kernels.trellis` is the recurrence. What the paper leaves open:
values are divided by their norm, for they are the keys of the second pass, in which a
step of γ |v|² > 2 would diverge; targets are divided by their root mean square, for a
step multiplies a small change of z = M' k by 1 - γ (φ'² + (φ - a) φ''), and where large
targets make that large, gradients explode; steps are bounded by what the keys of a
chunk have in common; both initial memories are learned; exp(g) is initialised to 0.99.

Shapes: B batch, T time, D model, H heads, K key, V value, M slots, C chunk.
"""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from memjax.checks import check_positive, check_sizes, require_known
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
from memjax.mechanisms.layers.gates import Gate
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig
from memjax_kernels import (
    TRELLIS_ACTIVATIONS,
    TRELLIS_PHIS,
    TrellisActivation,
    TrellisPhi,
    l2_normalize,
    trellis_init_state,
    trellis_state,
    trellis_step,
)
from memjax_kernels import trellis as trellis_op
from memjax_kernels._src.trellis.functions import apply as phi_of


@dataclasses.dataclass(frozen=True)
class TrellisConfig(RecurrentConfig):
    """Sizes and options of a layer of Trellis.

    Attributes:
        slots: M, of each head.
        chunk_size: C, tokens whose gradients are taken at one memory; 1 is the fully
            nonlinear recurrence. Part of what is computed.
        phi: φ, the nonlinearity of a prediction before the comparison with its target.
            Those that divide by a norm have unbounded gradients where it is near 0.
        activation: f, between the passes.
        forget: whether the memories forget; without, g = 0.
        shared_gates: whether both passes have the same γ and g; else each its own.
        step_size: largest γ. None bounds each γ, of 1 at most, by what the keys before
            it in its chunk have in common with its own (`bound_steps` of the op): a key
            is written whole when it comes once, and does not overshoot when it repeats.
            `experiments/memories/recall.py` compares both on validation data.
        normalize_target: whether a_t has root mean square 1 over the slots. Without it
            is W_a x as in the paper, and may grow in training until gradients overflow.
        readout: "linear", y = Ṽᵀ f(K̃ q) as in eq. 9; or "phi", y = φ(Ṽᵀ f(K̃ q)), as the
            text of section 3.2 has it.
    """

    name: ClassVar[str] = "trellis"

    slots: int = 64
    chunk_size: int = 16
    phi: TrellisPhi = "silu"
    activation: TrellisActivation = "ln_silu"
    forget: bool = True
    shared_gates: bool = True
    step_size: float | None = None
    normalize_target: bool = True
    readout: Literal["linear", "phi"] = "linear"

    def __post_init__(self):
        super().__post_init__()
        check_sizes(slots=self.slots, chunk_size=self.chunk_size)
        require_known("phi", self.phi, TRELLIS_PHIS)
        require_known("activation", self.activation, TRELLIS_ACTIVATIONS)
        require_known("readout", self.readout, ("linear", "phi"))
        if self.step_size is not None:
            check_positive(step_size=self.step_size)

    @property
    def bounded(self) -> bool:
        """Whether steps depend on the keys before them; a chunk of one has none."""
        return self.step_size is None and self.chunk_size > 1

    def cell(self) -> Cell:
        """The cell of these sizes."""
        return bind(
            self, init_params, init_state, step, apply, reset_chunk=self.chunk_size
        )

    def with_half_lives(
        self,
        params: "TrellisParams",
        half_lives: tuple[float, float],
        constant: Float[Array, " D"],
    ) -> "TrellisParams":
        """Forget gates of given half-lives, a head; see `CellConfig`."""
        if params.forget is None:
            return params
        logits = gates.half_life_logits(half_lives, self.num_heads)
        # With gates of its own a pass has as many.
        bias = jnp.repeat(logits, params.forget.bias.size // self.num_heads)
        return params._replace(forget=params.forget._replace(bias=bias))

    def cell_axes(self) -> PyTree:
        """Sharding axes of its parameters."""
        return AXES


class TrellisParams(NamedTuple):
    """Learned target, gates and initial memories."""

    target: Float[Array, "D H M"]
    step: Gate
    forget: Gate | None
    keys: Float[Array, "H M K"]
    values: Float[Array, "H M V"]


AXES = TrellisParams(
    target=axes("model", "heads"),
    step=gates.AXES,
    forget=gates.AXES,
    keys=axes("heads"),
    values=axes("heads"),
)


def init_params(config: TrellisConfig, key: PRNGKeyArray) -> TrellisParams:
    """Draws all weights; memories map unit keys to vectors of norm √(M / K)."""
    d, h, m = config.model_dim, config.num_heads, config.slots
    target_key, step_key, forget_key, keys_key, values_key = jax.random.split(key, 5)
    gate = (d, h) if config.shared_gates else (d, h, 2)

    # Scaled by the width that is summed over: a unit key predicts √(M / K).
    def draw(key, width):
        return jax.random.normal(key, (h, m, width)) * width**-0.5

    return TrellisParams(
        target=gates.draw_weight(target_key, d, h, m),
        step=gates.init_gate(step_key, gate, 0.5),
        # A gate of 0.99 leaves half of a write after 69 tokens.
        forget=gates.init_gate(forget_key, gate, 0.99) if config.forget else None,
        keys=draw(keys_key, config.key_dim),
        values=draw(values_key, config.value_dim),
    )


def init_state(config: TrellisConfig, batch: int) -> LearnedInit:
    """Memories to be initialised by the first call."""
    heads, slots = config.num_heads, config.slots
    memory = trellis_init_state(
        batch,
        heads,
        slots,
        config.key_dim,
        config.value_dim,
        chunk_size=config.chunk_size,
    )
    return uninitialised(batch, memory)


def step(
    config: TrellisConfig,
    params: TrellisParams,
    memory: LearnedInit,
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    x: Float[Array, "B D"],
) -> tuple[LearnedInit, Float[Array, "B H V"]]:
    """Writes one token into both memories and reads with its query."""
    slots = initialise_in_place(memory, _initial(config, params, 1))
    tokens = _tokens(config, params, q, k, v, x)
    slots, y = trellis_step(*tokens, slots, **_rule(config))
    return initialised(slots), _read(config, y)


def apply(
    config: TrellisConfig,
    params: TrellisParams,
    memory: LearnedInit | None,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    x: Float[Array, "B T D"],
    reset: Bool[Array, "B T"] | None = None,
) -> tuple[LearnedInit, Float[Array, "B T H V"]]:
    """Equal to T steps, computed chunk by chunk."""
    initial = _initial(config, params, x.shape[0])
    # None: all rows are at the start of a chunk, and tokens need no shift.
    before = None if memory is None else initialise(memory, initial)
    slots, y = trellis_op(
        *_tokens(config, params, q, k, v, x),
        before,
        empty=initial,
        chunk_size=config.chunk_size,
        **_rule(config),
        reset=reset,
        implementation=config.implementation,
    )
    return initialised(slots), _read(config, y)


def _rule(config):
    """The options of the recurrence."""
    return {
        "phi": config.phi,
        "activation": config.activation,
        "bound_steps": config.bounded,
        "normalize": config.normalize_target,
    }


def _read(config, y):
    """The readout, of what the second memory gives."""
    return phi_of(config.phi, y) if config.readout == "phi" else y


def _initial(config, params, batch):
    """The learned memories of a batch, at the start of a chunk."""
    keys, values = for_batch((params.keys, params.values), batch)
    return trellis_state(keys, values, config.chunk_size)


def _tokens(config, params, q, k, v, x):
    """q, k, v, a, γ and g of the tokens x; g is None without forgetting."""
    # Values are the keys of the second pass, in which a step of γ |v|² > 2 would
    # diverge. The op normalises them with its targets.
    if not config.normalize_target:
        v = l2_normalize(v)
    used = [params.step, *([] if params.forget is None else [params.forget])]
    step_logits, *forget_logits = gates.logits_of_gates(used, x)
    gamma = jax.nn.sigmoid(step_logits)
    # In log space: the decay over several tokens is a sum, and a gate near 0 does not
    # round to log 0.
    g = jax.nn.log_sigmoid(forget_logits[0]) if forget_logits else None
    # In the dtype of the tokens, as the product is.
    target = gates.linear_logits(x, params.target).astype(x.dtype)
    return q, k, v, target, gamma * (config.step_size or 1.0), g
