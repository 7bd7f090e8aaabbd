"""Checks of `lattice`'s arguments, and its empty memory."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from memjax_kernels._src.common.arguments import (
    check_choice,
    check_flag,
    check_gates,
    check_shapes,
    check_sizes,
)
from memjax_kernels._src.common.steps import segment
from memjax_kernels._src.lattice.memory import (
    LATTICE_VARIANTS,
    LatticeState,
    Rule,
    lattice_init_state,
    lattice_state,
)


def check_options(rule: Rule, chunk_size: int, g: Array | None) -> None:
    """Raises ValueError for options that are unknown or do not fit each other."""
    check_choice("variant", rule.variant, LATTICE_VARIANTS)
    check_choice("forget", rule.forget, (None, "l2", "l1"))
    check_sizes(chunk_size=chunk_size)
    check_flag("normalize", rule.normalize)
    if (g is None) != (rule.forget is None):
        given = "None" if g is None else "an array"
        raise ValueError(
            f"g must be given if and only if forget is, got g={given} and "
            f"forget={rule.forget!r}"
        )
    if rule.forget == "l1" and chunk_size > 1:
        raise ValueError(
            "forget='l1' is a soft threshold after every token, which is defined for "
            f"chunk_size=1 only, got chunk_size={chunk_size}"
        )


def check_tokens(
    q: Array, k: Array, v: Array, gamma: Array, g: Array | None, lead: str = "B T H"
) -> dict[str, int]:
    """The sizes B, T, H, M and V; `lead` has the first axes, those of a gate.

    Raises:
        ValueError: on shapes that do not fit, and known gates outside their range.
    """
    sizes = check_shapes(
        q=(q, f"{lead} M"),
        k=(k, f"{lead} M"),
        v=(v, f"{lead} V"),
        gamma=(gamma, lead),
        g=(g, f"{lead}?"),
    )
    check_gates(gamma=gamma, g=g)
    return sizes


def check_states(
    state: LatticeState | None,
    empty: LatticeState | None,
    sizes: dict[str, int],
    chunk_size: int,
    rule: Rule,
) -> LatticeState:
    """The empty memory, given or by default.

    Raises:
        ValueError: as `segment.check_state`, and on known slots that cannot be.
    """
    shape = (sizes[letter] for letter in "BHMV")
    default = functools.partial(lattice_init_state, *shape, chunk_size)
    found = segment.check_states(state, empty, like(sizes, chunk_size), default)
    check_norms("state", state, rule)
    check_norms("empty", empty, rule)
    return found


def like(sizes: dict[str, int], chunk_size: int) -> Callable[[], LatticeState]:
    """A state of these sizes, without the slots of the default."""
    shape = tuple(sizes[letter] for letter in "BHMV")
    return lambda: lattice_state(jnp.zeros(shape, jnp.float32), chunk_size)


def check_norms(name: str, state: LatticeState | None, rule: Rule) -> None:
    """Raises ValueError for slots that are known and not of unit norm, if they must."""
    # The equations assume unit slots; others would give wrong norms and no error.
    if not rule.normalize or state is None or isinstance(state.start, Tracer):
        return
    norms = np.linalg.norm(np.asarray(state.start), axis=-1)
    # A slot that a soft threshold emptied has norm 0.
    if np.any((norms != 0) & ~(np.abs(norms - 1) <= 1e-3)):
        raise ValueError(
            f"{name}.start must hold slots of unit norm where normalize=True, "
            f"got norms from {norms.min()} to {norms.max()}"
        )
