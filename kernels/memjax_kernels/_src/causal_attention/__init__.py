"""Causal attention of full sequences on a TPU, one kernel forward and one backward.

    y_t = Σ_s softmax_s(q_t · k_s / √K) v_s        t - window < s <= t

Dao (2023), FlashAttention-2, https://arxiv.org/abs/2307.08691: scores are
not stored; the backward pass recomputes them from each query's log-sum-exp.

Shapes: B batch, T time, H heads, K channels of a head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jaxtyping import Array, Float

from memjax_kernels._src.causal_attention.backward import backward
from memjax_kernels._src.causal_attention.forward import forward
from memjax_kernels._src.causal_attention.grid import WIDTH, Static
from memjax_kernels._src.common import arguments, implementations
from memjax_kernels._src.common.packs.tiles import LANES

#: The longest sequence: the gradient of its queries is held on the chip.
LONGEST = 32_768
#: The name of what the backward kernel reads, by which a remat policy can save it.
READS = "attention_reads"


def unsupported(q: Any, k: Any) -> str:
    """Why the kernels do not take queries [B, T, H, K] of these keys; "" if they do.

    Both have a shape and a dtype.
    """
    time, heads, width = q.shape[-3:]
    if q.dtype != jnp.bfloat16:
        return f"tokens are {q.dtype}, not bfloat16"
    if k.shape[-3:] != q.shape[-3:]:
        return f"keys must be as queries, {q.shape[-3:]}, got {k.shape[-3:]}"
    if time % LANES or time > LONGEST:
        return f"{time} tokens are no multiple of {LANES} up to {LONGEST}"
    if width != WIDTH or heads % 2:
        # Of 128 channels jax's kernel takes as long or less.
        return f"heads must be an even number of {WIDTH} channels, " + (
            f"got {heads} of {width}"
        )
    return ""


def causal_attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H K"],
    window: int | None = None,
    *,
    interpret: Any = False,
) -> Float[Array, "B T H K"]:
    """Every query sees the keys up to its own: in a program for a TPU alone.

    Products are in the dtype of the tokens, with float32 sums.

    Args:
        q: queries, which `unsupported` does not refuse.
        k: keys.
        v: values.
        window: keys that a query sees, its own among them; None is all.
        interpret: run where there is no TPU.

    Raises:
        ValueError: on arrays that `unsupported` refuses, or of different shapes; on
            another device than a TPU, outside of jit.
    """
    arguments.check_shapes(q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T H K"))
    # Interpreted, float32 shows what rounding hides.
    dtype = jnp.bfloat16 if interpret else q.dtype
    if reason := unsupported(jax.ShapeDtypeStruct(q.shape, dtype), k):
        raise ValueError(f"causal_attention cannot run: {reason}")
    missing = "" if interpret or isinstance(q, Tracer) else implementations.needs("tpu")
    if missing:
        raise ValueError(
            f"causal_attention cannot run here: {missing}; "
            "jax.nn.dot_product_attention(q, k, v, is_causal=True) runs anywhere"
        )
    if window is not None:
        arguments.check_sizes(window=window)
    flat = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    y: Any = _attention(Static(window, interpret), *flat)
    return y.reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: Static, q, k, v):
    """The output for heads side by side, [B, T, H K]."""
    return _forward_call(static, q, k, v)[0]


def _forward(static, q, k, v):
    y, mass = _forward_call(static, q, k, v)
    return y, (q, k, v, y, mass)


# A call of its own: rematerialisation drops whole calls, not single kernels.
@functools.partial(jax.jit, static_argnums=0)
def _forward_call(static, q, k, v):
    # Named here, where the output and its residuals are made, so that the kernel
    # does not run again for either.
    return tuple(checkpoint_name(x, READS) for x in forward(static, q, k, v))


_attention.defvjp(_forward, backward)
