"""Trellis's functions over the slots of packs, with gradients for the kernels.

The gradients of `l2_silu` as phi and of `ln_silu` as the activation, the defaults, are
written by hand: they take a quarter fewer operations than those of `jax.vjp`, keep
fewer residuals, and share their sums over slots with the gradients of gates.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import packs
from memjax_kernels._src.common.packs import sum_slots
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.chunk import Options

Slots = Float[Array, "P M CC"]
Row = Float[Array, "P 1 CC"]


def activate(options: Options, reads: Slots) -> Slots:
    """f of the first pass's reads, slots as rows."""
    return functions.apply(options.activation, reads, packs.over_slots, packs.sigmoid)


def error_gradient(options: Options, z: Slots, target: Slots) -> Slots:
    """E of a memory's prediction."""
    return functions.error_gradient(
        options.phi, z, target, packs.over_slots, packs.sigmoid
    )


def activate_vjp(
    options: Options, z: Slots
) -> tuple[Slots, Callable[[Slots, Row], Slots]]:
    """f, and of d_f and its sum over slots with f the gradient of z."""
    if options.activation == "ln_silu":
        return _ln_silu_vjp(z)
    f, back = jax.vjp(functools.partial(activate, options), z)
    return f, lambda d_f, _: back(d_f)[0]


def _ln_silu_vjp(z):
    mean = functools.partial(packs.over_slots, jnp.mean)
    s, gate = _silu(z)
    centred = s - mean(s)
    scale = jax.lax.rsqrt(mean(centred * centred) + functions.EPS)
    f = centred * scale

    def of_z(d_f, along):
        d = d_f - mean(d_f) - f * (along / z.shape[1])
        return d * (gate + s * (1.0 - gate)) * scale

    return f, of_z


def write_vjp(
    options: Options, z: Slots, target: Slots, gamma: Row
) -> tuple[Slots, Callable[[Slots], tuple[Slots, Slots, Row]]]:
    """u = gamma E, and of d_u the gradients of z, target and gamma."""
    if options.phi == "l2_silu":
        return _write_l2_silu(z, target, gamma)
    error, back = jax.vjp(functools.partial(error_gradient, options), z, target)

    def of_all(d_u):
        return *back(gamma * d_u), sum_slots(error * d_u)

    return gamma * error, of_all


def _write_l2_silu(z, target, gamma):
    # E = r slope e with s = silu(z), r = 1 / |s|, n = s r, c = sum(n (n - target)) and
    # e = n - target - c n.
    s, gate = _silu(z)
    slope = gate + s * (1.0 - gate)
    r = jax.lax.rsqrt(sum_slots(s * s) + functions.EPS)
    n = s * r
    e = n - target
    c = sum_slots(n * e)
    e = e - n * c
    scale = gamma * r

    def of_all(d_u):
        p = d_u * slope
        # All other sums follow of those of p with e and n.
        along_e, along_n = sum_slots(p * e), r * sum_slots(p * s)
        of_r = gamma * (along_e + along_n * (functions.EPS * r * r - 2.0 * c))
        along_s = r * r * (scale * along_n * (1.0 + c) + r * of_r)
        d_s = p * (r * scale * (1.0 - c)) - e * (r * scale * along_n) - s * along_s
        bend = (1.0 - gate) * (gate - gate * s + slope)
        d_z = d_s * slope + d_u * e * bend * scale
        return d_z, s * (r * scale * along_n) - p * scale, r * along_e

    return e * slope * scale, of_all


def _silu(z):
    gate = packs.sigmoid(z)
    return z * gate, gate
