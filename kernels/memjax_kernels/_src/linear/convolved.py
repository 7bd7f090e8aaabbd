"""The gated delta rule of what projections leave: convolutions and gates with it.

On a TPU, where no derivative is taken, it is one kernel; else the ops one after the
other, which have kernels for gradients.

Shapes: B batch, T time, H heads, G heads of queries and keys, K key, V value, W width
of the filters.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from memjax_kernels._src.common import arguments, chunks, gradients, implementations
from memjax_kernels._src.linear import convolved_tpu
from memjax_kernels._src.linear.convolved_tpu import Segment
from memjax_kernels._src.linear.delta_rules import gated_delta_rule
from memjax_kernels._src.linear.steps import MatrixState, linear_attention_init_state
from memjax_kernels._src.linear.table import Decay, check_decay, check_heads
from memjax_kernels._src.recurrent_block import short_convolution
from memjax_kernels._src.recurrent_block.xla import last_inputs

Implementation = Literal["xla", "pallas_tpu"]
#: Of queries, keys and values.
OfEach = tuple[Array, Array, Array]
NAMES = ("q", "k", "v")
# Axes of their heads.
OWN = ("G K", "G K", "H V")


def convolved_gated_delta_rule(
    inputs: OfEach,
    filters: OfEach,
    before: OfEach,
    rates: Float[Array, "B T H"],
    paces: Float[Array, "B T H"],
    decay: Decay,
    state: MatrixState | None = None,
    *,
    biases: OfEach | None = None,
    reset: Bool[Array, "B T"] | None = None,
    scale: float = 1.0,
    max_rate: float = 1.0,
    implementation: Implementation | None = None,
) -> tuple[MatrixState, OfEach, Float[Array, "B T H V"]]:
    """`gated_delta_rule` behind `short_convolution` and gates, for T tokens.

    Queries and keys have unit norm behind the convolution and silu, values have none:

        β = max_rate sigmoid(rates)        g = decay.log_gates(paces)

    Yang, Kautz & Hatamizadeh (2024), https://arxiv.org/abs/2412.06464, figure 1.

    Args:
        inputs: of q and k [B, T, G, K] and v [B, T, H, V], before the convolution;
            G divides H, and value head h reads h // (H / G).
        filters: of each, [W, G, K] or [W, H, V]; the last tap multiplies the token.
        before: the W - 1 inputs of each before the segment, zeros where there are none.
        rates: logits of β.
        paces: logits of the decay.
        decay: of each head.
        state: the memory before the segment, float32; None is empty.
        biases: of the convolutions, [G, K] or [H, V]; None is none.
        reset: True empties the memory of a batch element before that token, whose
            filters see nothing before it.
        scale: of the normed queries.
        max_rate: largest β, in (0, 2].
        implementation: "pallas_tpu" is one kernel, and with derivatives as "xla", the
            ops one after the other by XLA; None is the fastest that can.

    Returns:
        The memory after the segment, float32, the last W - 1 inputs of each in the
        dtype of `before`, zeros where these are before a reset, and the read after each
        token's write, in the dtype of v.

    Raises:
        ValueError: on arguments that do not fit each other, a `max_rate` outside its
            range, or an implementation that cannot run.
    """
    given = {"inputs": inputs, "filters": filters, "before": before}
    given |= {} if biases is None else {"biases": biases}
    for name, of_each in given.items():
        if not isinstance(of_each, tuple | list) or len(of_each) != len(NAMES):
            raise ValueError(f"{name} must be three arrays, of {', '.join(NAMES)}")
    check_heads(*inputs)
    check_decay(decay)
    axes = {}
    for name, lead in (("inputs", "B T"), ("filters", "W"), ("biases", "")):
        for part, x, own in zip(NAMES, given.get(name, ()), OWN, strict=False):
            axes[f"{name} of {part}"] = x, f"{lead} {own}"
    sizes = arguments.check_shapes(
        **axes,
        rates=(rates, "B T H"),
        paces=(paces, "B T H"),
        log_rate=(decay.log_rate, "H"),
        bias=(decay.bias, "H"),
        state=(state, "B H K V?"),
    )
    for part, x, first in zip(NAMES, inputs, before, strict=True):
        expected = (x.shape[0], sizes["W"] - 1, *x.shape[2:])
        if getattr(first, "shape", None) != expected:
            got = getattr(first, "shape", type(first).__name__)
            raise ValueError(f"before of {part} must have shape {expected}, got {got}")
        if not jnp.issubdtype(first.dtype, jnp.floating):
            raise ValueError(f"before of {part} must be floating, got {first.dtype}")
    arguments.check_float32("state", state)
    arguments.check_mask("reset", reset, sizes["B"], sizes["T"])
    if not 0 < max_rate <= 2:
        raise ValueError(f"max_rate must be in (0, 2], got {max_rate}")
    if state is None:
        state = linear_attention_init_state(*(sizes[letter] for letter in "BHKV"))
    elif reset is not None:
        # A decay of 0 would leave NaN of a memory that is not finite.
        state = chunks.where(reset[:, 0], 0.0, state)
    seen = None if reset is None else _since_reset(reset, sizes["W"])
    gates = rates, paces, decay
    x = Segment(inputs, filters, biases, before, *gates, state, seen)
    options = {"scale": scale, "max_rate": max_rate}
    composed = functools.partial(
        _composed, by="xla" if implementation == "xla" else None, **options
    )
    kernel = functools.partial(convolved_tpu.convolved_gated_delta_rule_tpu, **options)
    form = implementations.choose(
        "convolved_gated_delta_rule",
        implementation,
        {
            "xla": composed,
            "pallas_tpu": gradients.unless_differentiated(kernel, composed),
        },
        {"pallas_tpu": convolved_tpu.unsupported(x)},
    )
    memory, y = form(x)
    q, k, v = map(functools.partial(_last_inputs, seen), before, inputs)
    return memory, (q, k, v), y


def _last_inputs(seen: Array | None, before: Array, x: Array) -> Array:
    """As many as there were before, zeros before the last reset."""
    last = last_inputs(before, x)
    if seen is None:
        return last
    back = jnp.arange(last.shape[1])[::-1]
    return jnp.where((back[None] <= seen[:, -1:])[..., None, None], last, 0)


def _composed(
    x: Segment, *, by: Any, scale: float, max_rate: float
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """The ops one after the other, of one implementation."""

    def convolved(i):
        return short_convolution(
            x.inputs[i],
            x.filters[i],
            x.before[i],
            x.seen,
            bias=None if x.biases is None else x.biases[i],
            unit_norm=NAMES[i] != "v",
            implementation=by,
        )

    q, k, v = map(convolved, range(3))
    q = q if scale == 1 else (scale * q).astype(q.dtype)
    beta = max_rate * jax.nn.sigmoid(x.rates.astype(jnp.float32))
    return gated_delta_rule(
        *(q, k, v, beta, x.paces, x.state),
        reset=None if x.seen is None else x.seen == 0,
        implementation=by,
        decay=x.decay,
    )


def _since_reset(reset: Bool[Array, "B T"], most: int) -> Array:
    """Tokens since the last reset, `most` at most, and where there was none."""
    at = jnp.arange(reset.shape[1])[None]
    last = jax.lax.cummax(jnp.where(reset, at, -most), axis=1)
    return jnp.minimum(at - last, most)
