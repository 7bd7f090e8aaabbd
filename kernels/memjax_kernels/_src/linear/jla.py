"""The linear ops by jax-linear-attention, which has kernels for Hopper GPUs.

    pip install "jax-linear-attention[cuda]==0.1.0"     Python 3.12 or newer, jax 0.11.2

Implementation "jla" of an op is one call of its `jla.ops.linear_attention`. Equations
and layouts are the same, gates come by name, and documents as segment ids. Its kernels
take bfloat16 heads of 64 or 128, and compute products in bfloat16 with float32 sums.
gated_slots is not there: its first pass has gates of the channels that are read, which
no op of jax-linear-attention has.
"""

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from memjax_kernels._src.common.implementations import needs

#: The kind of each op there, and its gates' names in our order.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "linear_attention": ("simple_gla", ("g",)),
    "ssd": ("simple_gla", ("g",)),
    "gla": ("gla", ("g",)),
    "delta_rule": ("deltanet", ("beta",)),
    "gated_delta_rule": ("gated_deltanet", ("beta", "g")),
    "kda": ("kda", ("beta", "g")),
    "gdn2": ("gdn2", ("b", "w", "g")),
}
#: Kinds whose kernels read one key head for several value heads.
GROUPED = ("simple_gla", "deltanet", "gated_deltanet")
KERNELS = "mosaic_gpu"
INSTALL = 'pip install "jax-linear-attention[cuda]==0.1.0" on Python 3.12 or newer'


def unsupported(op: str, *tokens: Any) -> str:
    """Why no kernel can take a call here; "" if one can."""
    if importlib.util.find_spec("jla") is None:
        return f"it is not installed: {INSTALL}"
    if reason := needs("gpu"):
        return reason
    ops, (kind, _) = importlib.import_module("jla.ops"), KINDS[op]
    if KERNELS not in ops.available(kind):
        return f"this jax lacks Mosaic GPU: {INSTALL}"
    q, k, v, gates = jax.eval_shape(lambda *x: _arguments(op, KERNELS, *x), *tokens)
    _, supports, _ = ops._REGISTRY[KERNELS][kind]
    if supports(q, k, v, *(gates[name] for name in ops.KINDS[kind][1])):
        return ""
    shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k, v))
    return f"jax-linear-attention has no kernel for q, k, v of {shapes}"


def run(op: str, *given: Any, implementation: str = KERNELS) -> tuple[Array, Array]:
    """An op over (*tokens, state, reset) -> (state, y).

    `implementation` is one of jax-linear-attention; "reference" and "chunked" run on
    any device.
    """
    *tokens, state, reset = given
    q, k, v, gates = _arguments(op, implementation, *tokens)
    y, state = importlib.import_module("jla.ops").linear_attention(
        KINDS[op][0],
        q,
        k,
        v,
        impl=implementation,
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        segment_ids=None if reset is None else jnp.cumsum(reset, 1, dtype=jnp.int32),
        **gates,
    )
    return state, y.astype(v.dtype)


def _arguments(
    op: str, implementation: str, q: Array, k: Array, v: Array, *gates: Array
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Its q, k and v, and gates by their names there."""
    kind, names = KINDS[op]
    ways = v.shape[2] // q.shape[2]
    if ways > 1 and (implementation != KERNELS or kind not in GROUPED):
        q, k = (jnp.repeat(x, ways, axis=2) for x in (q, k))
    if not gates:
        # No decay.
        gates = (jnp.zeros(v.shape[:3], jnp.float32),)
    return q, k, v, dict(zip(names, gates, strict=True))
