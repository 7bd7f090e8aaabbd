"""Checks of `trellis`'s arguments, and its empty memory."""

import functools
from typing import Any

import jax
from jaxtyping import Array

from memjax_kernels._src.common import arguments
from memjax_kernels._src.trellis import functions
from memjax_kernels._src.trellis.state import TrellisState, trellis_init_state


def check_options(chunk_size: int, phi: str, activation: str) -> None:
    """Raises ValueError for an unknown function or a chunk without tokens."""
    arguments.check_choice("phi", phi, functions.TRELLIS_PHIS)
    arguments.check_choice("activation", activation, functions.TRELLIS_ACTIVATIONS)
    arguments.check_sizes(chunk_size=chunk_size)


def check_tokens(
    q: Array, k: Array, v: Array, alpha: Array, gamma: Array, g: Array | None
) -> dict[str, int]:
    """The sizes B, T, H, K, V and M.

    Raises:
        ValueError: on shapes that do not fit, and known gates outside their range.
    """

    # A gate of each pass has one axis more than one for both.
    def axes_of_gate(gate):
        return "B T H P" if getattr(gate, "ndim", 3) > 3 else "B T H"

    sizes = arguments.check_shapes(
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        alpha=(alpha, "B T H M"),
        gamma=(gamma, axes_of_gate(gamma)),
        g=(g, axes_of_gate(g) + "?"),
    )
    if sizes.get("P", 2) != 2:
        raise ValueError(
            "gamma and g must have shape [B, T, H], or [B, T, H, 2] for a gate of "
            f"each pass, got {sizes['P']} as the last size"
        )
    arguments.check_gates(gamma=gamma, g=g)
    return sizes


def check_states(
    state: Any, empty: Any, sizes: dict[str, int], chunk_size: int
) -> TrellisState:
    """The empty memory, given or by default.

    Raises:
        ValueError: on a state of another type, chunk size, shape or dtype, or with a
            known position outside its chunk.
    """
    b, h, m, key, value = (sizes[letter] for letter in "BHMKV")
    # Shapes are compared without building the default, which may not be needed.
    default = functools.partial(trellis_init_state, b, h, m, key, value, chunk_size)
    like = jax.eval_shape(default)
    for name, given, last in (("state", state, chunk_size - 1), ("empty", empty, 0)):
        if given is not None:
            _check_state(name, given, like)
            arguments.check_range(f"{name}.position", given.position, 0.0, float(last))
    return default() if empty is None else empty


def _check_state(name, given, like):
    if type(given) is not type(like):
        raise ValueError(
            f"{name} must be a {type(like).__name__}, got {type(given).__name__}"
        )
    if given.chunk_size != like.chunk_size:
        raise ValueError(
            f"{name} is of chunk_size {given.chunk_size}, not {like.chunk_size}: "
            "gradients are taken at a chunk's start, so chunks cannot change inside"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(like):
        field = path[0].name
        got = getattr(given, field)
        if got.shape != leaf.shape or got.dtype != leaf.dtype:
            raise ValueError(
                f"{name}.{field} must be {leaf.dtype}{list(leaf.shape)}, "
                f"got {got.dtype}{list(got.shape)}"
            )
