"""An op of two kernels, forward and backward, with gradients of every order.

Kernels give the gradient. Gradients of that gradient are taken through the op's XLA
form: `pallas_call` has none. Such an op has no forward mode (`jax.jvp`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from memjax_kernels._src.common.varying import vary_alike


def of_kernels(
    name: str,
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., tuple[Any, ...]],
    form: Callable[..., Any],
) -> Callable[..., Any]:
    """op(static, *primals) -> (memory, y), differentiable in its primals.

    The memories saved for the backward kernel and y are named "<name>_chunk_states" and
    "<name>_reads": with a rematerialisation policy that saves both, the forward kernel
    runs once.

    Args:
        name: of the op.
        forward: the kernel (static, *primals, with_residuals=) -> ((memory, y),
            residuals), None unless `with_residuals`.
        backward: the kernel (static, primals, residuals, cotangents of (memory, y)) ->
            cotangents of the primals.
        form: the same function as `forward` in XLA, (static, *primals) -> (memory, y).
    """
    differentiable = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))

    @differentiable
    def op(static, *primals):
        return forward(static, *primals, with_residuals=False)[0]

    # The gradient's calls are differentiable themselves, for gradients of gradients.
    # Residuals depend on the primals alone, so that their cotangents are left out.
    keeping: Any = differentiable(functools.partial(forward, with_residuals=True))
    pullback: Any = differentiable(backward)

    def op_forward(static, *primals):
        (memory, y), residuals = keeping(static, *primals)
        # Named, so that a rematerialisation policy can save them and skip the forward
        # kernel.
        residuals = checkpoint_name(residuals, f"{name}_chunk_states")
        return (memory, checkpoint_name(y, f"{name}_reads")), (primals, residuals)

    def op_backward(static, residuals, cotangents):
        return pullback(static, *residuals, cotangents)

    def keeping_forward(static, *primals):
        results = keeping(static, *primals)
        return results, (primals, results[1])

    def keeping_backward(static, residuals, cotangents):
        return pullback(static, *residuals, cotangents[0])

    def pullback_forward(static, *given):
        return pullback(static, *given), given

    def pullback_backward(static, given, second):
        primals, residuals, cotangents = given

        # The kernel itself has no gradient; the same function in XLA has.
        def in_xla(primals, cotangents):
            return jax.vjp(functools.partial(form, static), *primals)[1](cotangents)

        d_primals, d_cotangents = jax.vjp(in_xla, primals, cotangents)[1](second)
        return d_primals, jax.tree.map(jnp.zeros_like, residuals), d_cotangents

    op.defvjp(op_forward, op_backward)
    keeping.defvjp(keeping_forward, keeping_backward)
    pullback.defvjp(pullback_forward, pullback_backward)
    return op


def like(plain: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with the gradients, of both modes, of the same function in jax.

    For kernels of decoding, through which a gradient is rarely taken.
    """

    @jax.custom_jvp
    def op(*primals):
        return kernel(*primals)

    @op.defjvp
    def tangents(primals, tangents):
        return jax.jvp(plain, primals, tangents)

    return op


def unless_differentiated(
    form: Callable[..., Any], other: Callable[..., Any]
) -> Callable[..., Any]:
    """`form`, or `other` where a derivative is taken: they compute the same."""

    # The other may have no forward mode, which `like` needs.
    @jax.custom_vjp
    def op(*primals):
        # Inside a shard_map, what a scan carries must vary as what it computes does.
        return form(*vary_alike(primals))

    op.defvjp(lambda *x: jax.vjp(other, *x), lambda pull, given: pull(given))
    return op
