"""Causal attention of full sequences on a TPU, one kernel forward and one backward.

    y_t = Σ_s softmax_s(q_t · k_s / √K) v_s        t - window < s <= t

Dao (2023), FlashAttention-2, https://arxiv.org/abs/2307.08691: scores are
not stored; the backward pass recomputes them from each query's log-sum-exp.

Shapes: B batch, T time, H heads, K channels of a head.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from memjax_kernels._src.causal_attention import pallas_tpu
from memjax_kernels._src.causal_attention.pallas_tpu import READS as READS
from memjax_kernels._src.common import arguments, implementations
from memjax_kernels._src.common.packs.tiles import LANES

#: The longest sequence: the gradient of its queries is held on the chip.
LONGEST = 32_768


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
    if width != pallas_tpu.WIDTH or heads % 2:
        # Of 128 channels jax's kernel takes as long or less.
        return f"heads must be an even number of {pallas_tpu.WIDTH} channels, " + (
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
    static = pallas_tpu.Static(window, interpret)
    y: Any = pallas_tpu.attention(
        static, *(x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    )
    return y.reshape(q.shape)
