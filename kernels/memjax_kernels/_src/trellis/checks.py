"""Checks of `trellis`'s arguments, and its empty memory."""

import functools
from collections.abc import Callable

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
    q: Array,
    k: Array,
    v: Array,
    alpha: Array,
    gamma: Array,
    g: Array | None,
    lead: str = "B T H",
) -> dict[str, int]:
    """The sizes B, T, H, K, V and M; `lead` has the first axes, those of a gate.

    Raises:
        ValueError: on shapes that do not fit, and known gates outside their range.
    """
    axes = len(lead.split())

    # A gate of each pass has one axis more than one for both.
    def axes_of_gate(gate):
        return f"{lead} P" if getattr(gate, "ndim", axes) > axes else lead

    sizes = arguments.check_shapes(
        q=(q, f"{lead} K"),
        k=(k, f"{lead} K"),
        v=(v, f"{lead} V"),
        alpha=(alpha, f"{lead} M"),
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


def default(sizes: dict[str, int], chunk_size: int) -> Callable[[], TrellisState]:
    """The empty memory of these sizes, once it is called."""
    shape = (sizes[letter] for letter in "BHMKV")
    return functools.partial(trellis_init_state, *shape, chunk_size)
