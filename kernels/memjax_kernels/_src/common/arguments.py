"""Checks of an op's arguments, and arrays that are given twice."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import Array


def check_shapes(**arguments: tuple[Array | None, str]) -> dict[str, int]:
    """Binds shape letters to sizes and refuses arrays that do not fit them.

    Args:
        **arguments: by name, the array and its axes, as in q=(q, "B T H K"). The
            first array with a letter gives its size. None is skipped.

    Returns:
        The size of each letter.

    Raises:
        ValueError: on an array with other axes, of size zero, or not floating.
    """
    sizes: dict[str, int] = {}
    for name, (array, axes) in arguments.items():
        if array is None:
            continue
        letters = axes.split()
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


def check_choice(name: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def check_mask(name: str, mask: Array | None, batch: int, time: int) -> None:
    """Raises ValueError unless `mask` is None or bool [B, T]."""
    if mask is None:
        return
    if mask.shape != (batch, time) or mask.dtype != bool:
        raise ValueError(
            f"{name} must be bool of shape [B, T] = [{batch}, {time}], "
            f"got {mask.dtype}{list(mask.shape)}"
        )


def check_float32(name: str, array: Array | None) -> None:
    """Raises ValueError unless `array` is None or float32, as every memory is."""
    if array is not None and array.dtype != "float32":
        raise ValueError(f"{name} must be float32, got {array.dtype}")


def distinct(tree: Any) -> tuple[list[int], Callable[[Sequence[Any]], Any]]:
    """The indices of a tree's distinct leaves, and the inverse function.

    Kernels test with `is` whether two memories are one array. Functions that take
    leaves one by one (`jax.lax.platform_dependent`, `jax.shard_map`) would make two
    arrays of one.

    Returns:
        The indices, and a function (one leaf for each index) -> a tree in which leaves
        are the same where the given tree's are.
    """
    leaves, treedef = jax.tree.flatten(tree)
    first: dict[int, int] = {}
    for i, leaf in enumerate(leaves):
        first.setdefault(id(leaf), i)
    indices = list(first.values())
    place = {index: i for i, index in enumerate(indices)}
    places = [place[first[id(leaf)]] for leaf in leaves]

    def whole(given: Sequence[Any]) -> Any:
        return jax.tree.unflatten(treedef, [given[i] for i in places])

    return indices, whole
