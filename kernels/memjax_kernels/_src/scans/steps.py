"""One token of each gated scan, in float32: the definition. y has the dtype of u.

Shapes: B batch, I channels, N states of a channel.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.arguments import (
    check_gates,
    check_range,
    check_shapes,
    check_sizes,
)

#: The memory of `gated_scan`: a number for each channel, float32.
GatedScanState = Float[Array, "B I"]
#: The memory of `selective_scan`: N numbers for each channel, float32. Channels are
#: last: a TPU would pad an axis of 16 states to 128.
SelectiveScanState = Float[Array, "B N I"]

F32 = jnp.float32


def gated_scan_init_state(batch: int, channels: int) -> GatedScanState:
    """The memory before the first token: zeros, float32."""
    check_sizes(batch=batch, channels=channels)
    return jnp.zeros((batch, channels), F32)


def selective_scan_init_state(
    batch: int, channels: int, states: int
) -> SelectiveScanState:
    """The memory before the first token: zeros, float32."""
    check_sizes(batch=batch, channels=channels, states=states)
    return jnp.zeros((batch, states, channels), F32)


def gated_scan_step(
    u: Float[Array, "B I"], g: Float[Array, "B I"], state: GatedScanState
) -> tuple[GatedScanState, Float[Array, "B I"]]:
    """h ← exp(g) h + u, y = h.

    Raises:
        ValueError: on arrays that do not fit each other, or known to be out of range.
    """
    check_shapes(u=(u, "B I"), g=(g, "B I"), state=(state, "B I"))
    check_gates(g=g)
    state = jnp.exp(g.astype(F32)) * state + u.astype(F32)
    return state, state.astype(u.dtype)


def selective_scan_step(
    u: Float[Array, "B I"],
    delta: Float[Array, "B I"],
    a: Float[Array, "N I"],
    b: Float[Array, "B N"],
    c: Float[Array, "B N"],
    state: SelectiveScanState,
) -> tuple[SelectiveScanState, Float[Array, "B I"]]:
    """S ← exp(a Δ) S + b (Δ u)ᵀ, then y = Sᵀ c.

    Raises:
        ValueError: on arrays that do not fit each other, or known to be out of range.
    """
    check_selective(u, delta, a, b, c, state, lead="B")
    wide, delta, a, b, c = (x.astype(F32) for x in (u, delta, a, b, c))
    # An outer product with ones instead of a broadcast, whose gradient would be a sum
    # that takes a CPU several times as long as this one's product.
    rates = _outer(jnp.ones_like(b), delta) * a[None]
    state = jnp.exp(rates) * state + _outer(b, delta * wide)
    exact = jax.lax.Precision.HIGHEST
    y = jnp.einsum("bni,bn->bi", state, c, precision=exact)
    return state, y.astype(u.dtype)


def check_selective(
    u: Array,
    delta: Array,
    a: Array,
    b: Array,
    c: Array,
    state: Array | None,
    lead: str = "B T",
) -> dict[str, int]:
    """The sizes B, T, I and N; `lead` has the first axes of tokens.

    Raises:
        ValueError: on arrays that do not fit each other, and for known steps below 0 or
            rates of decay above it.
    """
    sizes = check_shapes(
        u=(u, f"{lead} I"),
        delta=(delta, f"{lead} I"),
        a=(a, "N I"),
        b=(b, f"{lead} N"),
        c=(c, f"{lead} N"),
        state=(state, "B N I?"),
    )
    check_range("delta", delta, 0.0, float("inf"))
    check_range("a", a, -float("inf"), 0.0)
    return sizes


def _outer(x: Float[Array, "B N"], y: Float[Array, "B I"]) -> Float[Array, "B N I"]:
    return jnp.einsum("bn,bi->bni", x, y, precision=jax.lax.Precision.HIGHEST)
