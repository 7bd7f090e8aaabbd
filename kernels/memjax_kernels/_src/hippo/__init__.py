"""HiPPO-LegS: the full history on shifted Legendre polynomials, a block at a time.

    C_{j+1} = P_j C_j + K_j F_j        M_j = R C_j

Elastic Memory, equations 6 to 8. F_j are the tokens of block j, C_j the coefficients
before it and M_j the memory tokens that it reads.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from memjax_kernels._src.common import arguments
from memjax_kernels._src.hippo import on_demand, xla
from memjax_kernels._src.hippo.bank import HippoBank
from memjax_kernels._src.hippo.reference import hippo_reference

#: Coefficients of all channels, float32.
HippoState = Float[Array, "B N X"]

HippoImplementation = Literal["reference", "scan", "associative", "direct"]


def hippo(
    features: Float[Array, "B n L X"],
    reconstruction: Float[Array, "M N"],
    state: HippoState | None = None,
    *,
    start: Int[Array, " B"] | None = None,
    count: Int[Array, " B"] | None = None,
    in_step: bool | None = None,
    bank: HippoBank | None = None,
    implementation: HippoImplementation | None = None,
) -> tuple[HippoState, Float[Array, "B n M X"]]:
    """Absorbs blocks of tokens and reads the memory as it was before each of them.

    Args:
        features: float32 signals, X channels, n >= 1 blocks of L tokens.
        reconstruction: basis values at the sampled fractions: `hippo_reconstruction`.
        state: coefficients of the history; None is empty. Not read where start is 0.
        start: tokens behind `state`, per batch element; None is none. Any number: it
            need not be a multiple of L, nor small.
        count: how many of the n blocks to absorb, per batch element, in [0, n]; None is
            all. Memory tokens of later blocks repeat those of block `count`.
        in_step: whether all batch elements have the same `start` and `count`, and so
            share their matrices. True is the caller's promise and is not checked. None
            decides at run time, for which both ways are compiled.
        bank: matrices of the first blocks, used where all batch elements start at the
            same multiple of L that it covers; otherwise they are computed on demand.
        implementation: by default the one with the fewest operations, see `cost`.

    Returns:
        The coefficients after the absorbed blocks, and each block's M memory tokens;
        both are zero where nothing came before.

    Raises:
        ValueError: on an unknown implementation, or shapes that do not fit.
    """
    _check(features, reconstruction, state, start, count, bank, implementation)
    if in_step is not None:
        arguments.check_flag("in_step", in_step)
    b, n, length, x = features.shape
    samples, order = reconstruction.shape
    if state is None:
        state = jnp.zeros((b, order, x), jnp.float32)
    start = jnp.zeros(b, jnp.int32) if start is None else start
    # No history has no coefficients: all forms must agree on that.
    state = jnp.where((start > 0)[:, None, None], state, 0.0)
    count = jnp.full(b, n, jnp.int32) if count is None else count
    if implementation is None:
        implementation = cheapest(order, length, samples, n, b * x, bank is not None)
    if implementation == "reference":
        return hippo_reference(features, state, start, count, reconstruction)

    separate = functools.partial(_absorb, implementation, None, None)
    shared = functools.partial(_absorb, implementation, 1, None)
    if bank is not None and implementation != "direct":
        shared = functools.partial(_look_up_or_compute, implementation, bank)
    inputs = (features, state, start, count, reconstruction)
    if in_step is not None:
        return (shared if in_step else separate)(*inputs)
    # In step, all batch elements share their matrices, which are then computed once.
    agree = jnp.all(start == start[0]) & jnp.all(count == count[0])
    return jax.lax.cond(agree, shared, separate, *inputs)


def hippo_update(
    features: Float[Array, "B T X"],
    state: HippoState,
    start: Int[Array, " B"],
    count: Int[Array, " B"] | None = None,
) -> HippoState:
    """Absorbs one block of any length: C <- (t0/t1)^A C + K(t0..t1) F (eq. 6).

    Args:
        features: float32 signals of T tokens.
        state: coefficients of the history.
        start: tokens behind `state`, per batch element: t0.
        count: how many of the T tokens count, per batch element; None is all.
            t1 = t0 + count.

    Raises:
        ValueError: on shapes that do not fit, or known counts out of range.
    """
    sizes = arguments.check_shapes(features=(features, "B T X"), state=(state, "B N X"))
    order, length = sizes["N"], sizes["T"]
    check_counts("start", start, sizes["B"], np.inf)
    check_counts("count", count, sizes["B"], length)
    if count is None:
        return xla.computed(order, start, length).absorb(0, state, features)
    stop = start + count
    moved = on_demand.advance(start, stop, state)
    kernel = on_demand.kernel(order, start, stop, length)
    written = on_demand.product(kernel, features)
    # Without tokens the move is from t0 to t0, which rounding would change a little.
    return jnp.where((count > 0)[:, None, None], moved + written, state)


def cost(
    order: int, length: int, samples: int, blocks: int, channels: int, banked: bool
) -> dict[HippoImplementation, int]:
    """Multiply-adds of each implementation, whole batch, all elements in step.

    Args:
        order: N.
        length: L, tokens a block.
        samples: M, memory tokens.
        blocks: n.
        channels: batch elements times channels, B * X.
        banked: whether a bank holds the matrices; without one transitions are applied
            through two factors, twice the work, and so are blocks, but shorter ones
            than the order.

    Returns:
        Operations by implementation name. `direct` counts the products of the
        reconstruction with the matrices, which all channels share; it wins where the
        order is large against the memory tokens, or the channels are many.
    """
    transition = order * order * (1 if banked else 2)
    factors = 0 if banked or order > length else order
    write = blocks * order * (length + factors) * channels
    read = blocks * samples * order * channels
    form = 0 if banked else 2 * order**3 * blocks
    tokens = blocks * length
    return {
        "scan": blocks * transition * channels + write + read,
        "associative": form
        + 2 * blocks * (order**3 + order * order * channels)
        + write
        + read,
        "direct": blocks * samples * (tokens + order) * (order + channels)
        + 2 * order * order * channels
        + order * tokens * channels,
    }


def cheapest(
    order: int, length: int, samples: int, blocks: int, channels: int, banked: bool
) -> HippoImplementation:
    """The implementation with the fewest multiply-adds; `scan` where they tie."""
    costs = cost(order, length, samples, blocks, channels, banked)
    # Ties go to `scan`, with one state in memory instead of all.
    return min(costs, key=lambda name: (costs[name], name != "scan"))


def _absorb(implementation, rows, bank, features, state, start, count, reconstruction):
    """Runs one form; `rows` 1 is one set of matrices, None one an element."""
    order, length = state.shape[1], features.shape[2]
    if implementation == "direct":
        return xla.direct(features, state, start[:rows], count[:rows], reconstruction)
    if bank is None:
        matrices = xla.computed(order, start[:rows], length)
    else:
        matrices = xla.banked(bank, start, length)
    form = xla.scan if implementation == "scan" else xla.associative
    return form(features, state, count, reconstruction, matrices)


def _look_up_or_compute(implementation, bank, features, state, start, *rest):
    """With the bank's matrices while the stream is within the blocks that it covers."""
    blocks, length = features.shape[1:3]
    first, offset = start[0] // length, start[0] % length
    # The bank is of whole blocks from the history's start.
    covered = (offset == 0) & (first + blocks <= bank.kernel.shape[0])
    forms = (functools.partial(_absorb, implementation, 1, x) for x in (bank, None))
    return jax.lax.cond(covered, *forms, features, state, start, *rest)


def check_counts(name: str, count: Array | None, batch: int, most: float | int) -> None:
    """Raises ValueError unless counts are integers [B], known ones in [0, most]."""
    if count is None:
        return
    arguments.require_array(name, count, "B")
    if count.shape != (batch,) or not jnp.issubdtype(count.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be integers of shape [B] = [{batch}], "
            f"got {count.dtype}{list(count.shape)}"
        )
    arguments.check_range(name, count, 0.0, float(most))


def _check(features, reconstruction, state, start, count, bank, implementation):
    allowed = (None, *get_args(HippoImplementation))
    arguments.check_choice("implementation", implementation, allowed)
    sizes = arguments.check_shapes(
        features=(features, "B n L X"),
        reconstruction=(reconstruction, "M N"),
        state=(state, "B N X?"),
    )
    order, length = sizes["N"], sizes["L"]
    arguments.check_float32("state", state)
    check_counts("start", start, sizes["B"], np.inf)
    check_counts("count", count, sizes["B"], sizes["n"])
    if not isinstance(bank, HippoBank | None):
        raise ValueError(f"bank must be a HippoBank, got {type(bank).__name__}")
    if bank is not None and bank.kernel.shape[1:] != (order, length):
        raise ValueError(
            f"bank is for (order, block) {bank.kernel.shape[1:]}, "
            f"not {(order, length)}: build it for these"
        )
