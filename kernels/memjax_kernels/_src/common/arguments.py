"""Checks of an op's arguments."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

#: Ranges of gates and step sizes. Infinite ones would leave NaN in the memory;
#: β |k|² = 2 turns the sign of a memory.
RANGES = {
    "beta": (0.0, 2.0),
    "erase": (0.0, 2.0),
    "write": (0.0, 2.0),
    "gamma": (0.0, float(np.finfo(np.float32).max)),
    "g": (-float("inf"), 0.0),
    # A larger exponential, or none at all, would make NaN of 0 or infinite logits.
    "log_rate": (-87.0, 87.0),
    "bias": (-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max)),
    "eta": (0.0, float("inf")),
}


def check_shapes(**arguments: tuple[Any, str]) -> dict[str, int]:
    """Binds shape letters to sizes and refuses arrays that do not fit them.

    Args:
        **arguments: by name, the array and its axes, as in q=(q, "B T H K"). The
            first array with a letter gives its size. None is skipped where the axes
            end in "?".

    Returns:
        The size of each letter.

    Raises:
        ValueError: on an array with other axes, of size zero, or not floating; on
            anything but an array.
    """
    sizes: dict[str, int] = {}
    for name, (array, axes) in arguments.items():
        if array is None and axes.endswith("?"):
            continue
        letters = axes.removesuffix("?").split()
        array = require_array(name, array, letters)
        if array.ndim == len(letters):
            for letter, size in zip(letters, array.shape, strict=True):
                sizes.setdefault(letter, size)
        wanted = [sizes.get(letter, letter) for letter in letters]
        if list(array.shape) != wanted or 0 in array.shape:
            shape = f"[{', '.join(letters)}] = [{', '.join(map(str, wanted))}]"
            raise ValueError(
                f"{name} must have shape {shape}, no axis empty, "
                f"got {list(array.shape)}"
            )
        # bfloat16 is no numpy type, and so no subtype of its floats.
        if not np.issubdtype(array.dtype, np.floating) and array.dtype != "bfloat16":
            raise ValueError(f"{name} must be floating, got {array.dtype}")
    return sizes


def require_array(name: str, array: Any, letters: Sequence[str]) -> Any:
    """The array; raises ValueError for anything else, such as a list or None."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ValueError(
            f"{name} must be an array [{', '.join(letters)}], "
            f"got {type(array).__name__}"
        )
    return array


def token_axes(step: Callable[..., Any]) -> dict[str, str]:
    """Axes of the arrays that a step takes, as its annotations say: for `check_step`.

    Empty for a step of other arguments.
    """
    found = {}
    for name, parameter in inspect.signature(step).parameters.items():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            continue
        kinds = get_args(parameter.annotation) or (parameter.annotation,)
        axes = [kind.dim_str for kind in kinds if hasattr(kind, "dim_str")]
        found[name] = axes[0] + "?" * (len(kinds) > 1) if axes else ""
    return found if any(found.values()) else {}


def check_step(axes: Mapping[str, str], given: Sequence[Any]) -> None:
    """Raises ValueError unless a step's arguments fit each other and `RANGES`.

    Other batches would be broadcast in silence, as arrays of size 1 are.
    """
    if not axes:
        return
    arrays = {
        name: (x, axes[name])
        for name, x in zip(axes, given, strict=True)
        if axes[name] and "..." not in axes[name]
    }
    sizes = check_shapes(**arrays)
    lead = (sizes["B"], sizes["H"])
    rest = {name: x for name, x in zip(axes, given, strict=True) if name not in arrays}
    for name, x in rest.items():
        leaves = jax.tree.leaves(x)
        if not all(hasattr(leaf, "shape") for leaf in leaves) or (
            not leaves and not axes[name].endswith("?")
        ):
            raise ValueError(f"{name} must be arrays, got {type(x).__name__}")
        for leaf in leaves:
            # Memories of slots have those of alpha.
            wanted = (*lead, sizes.get("M")) if leaf.ndim == 4 else lead[: leaf.ndim]
            if any(
                n not in (m, None) for m, n in zip(leaf.shape, wanted, strict=False)
            ):
                raise ValueError(
                    f"{name} must begin with {list(wanted)}, as the tokens do, got an "
                    f"array {list(leaf.shape)}"
                )
    check_gates(**{n: x for n, x in zip(axes, given, strict=True) if n in RANGES})


def check_sizes(**sizes: int) -> None:
    """Raises ValueError unless every size is an integer of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise ValueError(f"{name} must be an integer, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_range(name: str, array: Array | None, low: float, high: float) -> None:
    """Raises ValueError for a value outside [low, high], or NaN, where it is known.

    Inside jit values are not known: there the range is the caller's promise.
    """
    # A traced array has no values to check.
    if array is None or isinstance(array, Tracer):
        return
    values = np.asarray(array, np.float32)
    if not np.all((values >= low) & (values <= high)):
        raise ValueError(
            f"{name} must lie in [{low}, {high}], "
            f"got values from {values.min()} to {values.max()}"
        )


def check_gates(**gates: Array | None) -> None:
    """Raises ValueError for gates outside of `RANGES`, by their names."""
    for name, gate in gates.items():
        check_range(name, gate, *RANGES[name])


def check_flag(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False; text would count as True."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def check_mask(name: str, mask: Array | None, *sizes: int, axes: str = "BT") -> None:
    """Raises ValueError unless `mask` is None or bool [B, T], or of other axes."""
    if mask is None:
        return
    require_array(name, mask, axes)
    if mask.shape != sizes or mask.dtype != bool:
        raise ValueError(
            f"{name} must be bool of shape [{', '.join(axes)}] = {list(sizes)}, "
            f"got {mask.dtype}{list(mask.shape)}"
        )


def check_float32(name: str, array: Array | None) -> None:
    """Raises ValueError unless `array` is None or float32, as every memory is."""
    if array is not None and array.dtype != "float32":
        raise ValueError(f"{name} must be float32, got {array.dtype}")
