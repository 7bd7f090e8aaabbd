"""Causal attention on a TPU with its gradients, without a transpose of heads."""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from memjax_kernels._src.causal_attention.backward import backward
from memjax_kernels._src.causal_attention.forward import forward
from memjax_kernels._src.causal_attention.grid import WIDTH as WIDTH
from memjax_kernels._src.causal_attention.grid import Static as Static

#: The name of what the backward kernel reads, by which a remat policy can save it.
READS = "attention_reads"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(static: Static, q, k, v):
    """The output for heads side by side, [B, T, H K]."""
    return _forward_call(static, q, k, v)[0]


def _forward(static, q, k, v):
    y, mass = _forward_call(static, q, k, v)
    return y, (q, k, v, y, mass)


# What is not asked for again leaves out a whole call, and not a kernel alone.
@functools.partial(jax.jit, static_argnums=0)
def _forward_call(static, q, k, v):
    # Named here, where the output and its residuals are made, so that the kernel
    # does not run again for either.
    return tuple(checkpoint_name(x, READS) for x in forward(static, q, k, v))


attention.defvjp(_forward, backward)
