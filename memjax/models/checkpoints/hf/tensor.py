"""Where a checkpoint has a parameter: a tensor, its layout, and rows of fused ones.

Matrices of Hugging Face are [out, in] with joined heads. Ours are [in, out]; heads are
an axis.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

Layout = Literal["as_is", "flat", "into", "out_of", "less_one", "taps", "experts"]


class Piece(NamedTuple):
    """Rows of a tensor that are rows of a parameter.

    Attributes:
        name: of the tensor.
        rows: their indices, in the order of the parameter.
        total: rows of the whole tensor.
    """

    name: str
    rows: np.ndarray
    total: int


class Tensor(NamedTuple):
    """Where a parameter is in a checkpoint: one tensor, or rows of some.

    Attributes:
        name: in a model with a head; in one without it lacks the leading "model.".
        layout: "as_is"; "flat", a bias whose heads are joined; "into", a matrix whose
            first axis here is its input; "out_of", whose last axis is its output;
            "less_one", a scale of which 1 is taken (Gemma); "taps", filters whose first
            axis here is their last; "experts", matrices of E experts, each of "into",
            a tensor for each, or rows of the middle axis of one [E, out, in].
        pieces: rows of tensors, which together are this one's; "" is the name then.
    """

    name: str
    layout: Layout = "as_is"
    pieces: tuple[Piece, ...] = ()


def tensors_of(names: Any) -> list[Tensor]:
    """The tensors of a tree, in the order of its leaves."""
    return jax.tree.leaves(names, is_leaf=lambda node: isinstance(node, Tensor))


def stored_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in a checkpoint of a parameter that has `shape` here."""
    match layout:
        case "as_is" | "less_one":
            return shape
        case "flat":
            return (math.prod(shape),)
        case "into":
            return (math.prod(shape[1:]), shape[0])
        case "out_of":
            return (shape[-1], math.prod(shape[:-1]))
        case "taps":
            return (math.prod(shape[1:]), 1, shape[0])
        case "experts":
            return (shape[0], shape[2], shape[1])


def stored_shapes(
    tensor: Tensor, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that have a parameter of `shape`."""
    stored = stored_shape(tensor.layout, shape)
    if not tensor.pieces:
        yield tensor.name, stored
    each = tensor.layout == "experts" and len(tensor.pieces) > 1
    for piece in tensor.pieces:
        if tensor.layout != "experts":
            yield piece.name, (piece.total, *stored[1:])
        else:
            matrix = (piece.total, stored[2])
            yield piece.name, matrix if each else (stored[0], *matrix)


def read_parameter(
    tensor: Tensor, get: Callable[[str], np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    """A parameter of `shape`, from the tensors that `get` reads by name."""
    if not tensor.pieces:
        return from_stored(get(tensor.name), tensor.layout, shape)
    if tensor.layout != "experts":
        rows = [get(piece.name)[piece.rows] for piece in tensor.pieces]
        return from_stored(np.concatenate(rows), tensor.layout, shape)
    rows = [get(piece.name)[..., piece.rows, :] for piece in tensor.pieces]
    experts = np.stack(rows) if len(rows) > 1 else rows[0]
    return from_stored(experts, tensor.layout, shape)


def split_parameter(
    tensor: Tensor, stored: np.ndarray
) -> Iterator[tuple[Piece, np.ndarray]]:
    """The rows of each tensor that has a parameter, of it `to_stored`."""
    if tensor.layout == "experts":
        # An expert a tensor, or all of them in one.
        parts = stored if len(tensor.pieces) > 1 else [stored]
        yield from zip(tensor.pieces, parts, strict=True)
        return
    for piece in tensor.pieces:
        rows, stored = np.split(stored, [len(piece.rows)])
        yield piece, rows


def to_stored(value: np.ndarray, layout: Layout) -> np.ndarray:
    """A parameter in the layout of a checkpoint."""
    shape = stored_shape(layout, value.shape)
    if layout in ("into", "out_of"):
        return value.reshape(shape[::-1]).T
    if layout == "taps":
        return value.reshape(shape[2], shape[0]).T[:, None]
    if layout == "experts":
        return np.swapaxes(value, 1, 2)
    value = value.reshape(shape)
    return value - 1 if layout == "less_one" else value


def from_stored(
    value: np.ndarray, layout: Layout, shape: tuple[int, ...]
) -> np.ndarray:
    """A parameter of `shape` from a checkpoint's tensor."""
    if layout in ("into", "out_of"):
        value = value.T
    if layout == "taps":
        value = value[:, 0].T
    if layout == "experts":
        value = np.swapaxes(value.reshape(shape[0], shape[2], shape[1]), 1, 2)
    if layout == "less_one":
        # bfloat16 would round the sum.
        value = value.astype(np.float32) + 1
    return value.reshape(shape)
