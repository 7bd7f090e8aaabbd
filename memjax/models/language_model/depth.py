"""Runs the layers of a model one after the other, equal ones by one `lax.scan`.

A program that has every layer written out takes a time to trace and compile that grows
with the depth. Here layers of one kind are one loop, with a body traced and compiled
once: the parameters stay a tree a layer, and are stacked inside the program. Without
the loop they are traced once all the same, as one function that the program calls.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from memjax.mechanisms import Mechanism
from memjax.models.language_model.config import BlockStyle
from memjax_kernels._src.common.partition import devices_of


class Layer(NamedTuple):
    """Mechanism, parameters, memory and style of a layer."""

    mechanism: Mechanism
    params: PyTree
    memory: PyTree
    style: BlockStyle


#: (layer, h) -> (memory after the call, h).
Run = Callable[[Layer, Float[Array, "B T D"]], tuple[PyTree, Float[Array, "B T D"]]]


def run_layers(
    run: Run, layers: Sequence[Layer], h: Float[Array, "B T D"], scan: bool
) -> tuple[list[PyTree], Float[Array, "B T D"]]:
    """The memories after all layers, and the last one's output.

    With `scan`, layers that repeat are one loop.
    """
    after: list[PyTree] = []
    for period, repeats in repetitions(layers) if scan else [(len(layers), 1)]:
        part = layers[len(after) : len(after) + period * repeats]
        if repeats > 1:
            memories, h = _scan(run, part, period, h)
        else:
            memories, h = _in_turn(run, part, h)
        after += memories
    return after, h


def repetitions(layers: Sequence[Layer]) -> list[tuple[int, int]]:
    """Runs of `layers`, as pairs of a period and its repeats.

    All layers are one part where they have a period, as in a hybrid; else equal
    neighbours are.
    """
    kinds = [_kind(layer) for layer in layers]
    depth = len(kinds)
    for period in range(1, depth // 2 + 1):
        if depth % period == 0 and kinds[period:] == kinds[:-period]:
            return [(period, depth // period)]
    starts = [i for i in range(depth) if i == 0 or kinds[i] != kinds[i - 1]]
    ends = [*starts[1:], depth]
    return [(1, end - start) for start, end in zip(starts, ends, strict=True)]


def _in_turn(run, layers, h):
    after, kinds, functions = [], [], []
    for layer in layers:
        kind = _kind(layer)
        if kind not in kinds:
            kinds.append(kind)
            functions.append(_function(run, layer, h))
        memory, h = functions[kinds.index(kind)](_arrays(layer), h)
        after.append(memory)
    return after, h


def _function(run, layer, h):
    """`run` of the arrays of any layer of this kind, traced once on one device."""

    def of_arrays(arrays, h):
        return run(_with_arrays(layer, arrays), h)

    # Among several devices what a function takes and returns may be sent at its edge.
    return of_arrays if devices_of(h) > 1 else jax.jit(of_arrays)


def _scan(run, layers, period, h):
    """Layers that are equal to those `period` before them."""
    first, repeats = layers[:period], len(layers) // period
    # Of each layer of the period the arrays of all repetitions, [repeats, ...].
    stacked = [
        [jnp.stack(arrays) for arrays in zip(*map(_arrays, equal), strict=True)]
        for equal in (layers[i::period] for i in range(period))
    ]

    def repetition(h, arrays):
        here = [_with_arrays(*given) for given in zip(first, arrays, strict=True)]
        after, h = _in_turn(run, here, h)
        return h, after

    h, stacked = jax.lax.scan(repetition, h, stacked)

    def take(i):
        return jax.tree.map(lambda x: x[i // period], stacked[i % period])

    return [take(i) for i in range(period * repeats)], h


def _kind(layer):
    """Key of layers that can share a loop."""
    leaves, tree = jax.tree.flatten((layer.params, layer.memory))
    shapes = [(x.shape, x.dtype) if _is_array(x) else x for x in leaves]
    return layer.mechanism, layer.style, tree, shapes


def _arrays(layer):
    leaves = jax.tree.leaves((layer.params, layer.memory))
    return [leaf for leaf in leaves if _is_array(leaf)]


def _with_arrays(layer, arrays):
    """The layer with these arrays; its Python numbers, as LoRA's scale, stay."""
    leaves, tree = jax.tree.flatten((layer.params, layer.memory))
    given = iter(arrays)
    leaves = [next(given) if _is_array(leaf) else leaf for leaf in leaves]
    params, memory = jax.tree.unflatten(tree, leaves)
    return layer._replace(params=params, memory=memory)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")
