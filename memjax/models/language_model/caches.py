"""Sizes of full attention's caches in a model's state.

A cache has slots, one a token, and a capacity, the most slots that it may have. Its
number of slots is part of the shapes of a program: few sizes are few compilations.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, PyTree

from memjax import mechanisms
from memjax.mechanisms import Mechanism
from memjax.mechanisms.base import require_state

# Fewer slots would save little memory, and a program more must be compiled for them.
LEAST_SLOTS = 256
State = tuple[PyTree, ...]


def init_state(
    layers: Sequence[Mechanism], batch: int, capacity: int | None, dtype: DTypeLike
) -> State:
    """Empty memories; caches with room for `capacity` tokens, in `dtype`."""
    return tuple(
        layer.init_state(batch)
        if layer.cache is None
        else layer.cache.init(batch, capacity, dtype)
        for layer in layers
    )


def check_state(
    layers: Sequence[Mechanism], names: Sequence[str], state: State
) -> None:
    """Raises ValueError on memories of other layers, or of other sizes.

    Args:
        layers: of the model.
        names: of their mechanisms.
        state: of any number of batch elements, and of slots of caches.
    """
    for i, (layer, memory) in enumerate(zip(layers, state, strict=True)):
        where = f"state[{i}], of {names[i]},"
        require_state(memory, layer.init_state, layer.cache, where)


def reset(layers: Sequence[Mechanism], state: State, mask: Bool[Array, " B"]) -> State:
    """Clears the memory of the batch elements in `mask`; caches keep their slots."""
    empty = tuple(
        layer.init_state(mask.shape[0])
        if layer.cache is None
        else jax.tree.map(jnp.zeros_like, memory)
        for layer, memory in zip(layers, state, strict=True)
    )
    return mechanisms.replace_rows(state, empty, mask)


def remaining(layers: Sequence[Mechanism], state: State) -> int | None:
    """Number of further tokens that all caches can hold; None without a bound."""
    filled = _filled(layers, state)
    rooms = [layers[i].cache.capacity - count for i, count in filled.items()]
    return min(rooms, default=None)


def reserve(layers: Sequence[Mechanism], state: State, tokens: int) -> State:
    """The same memories with slots for `tokens` more.

    Raises:
        ValueError: if a cache has no such capacity.
    """
    room = remaining(layers, state)
    if room is None:
        return state
    if tokens > room:
        raise ValueError(
            f"{tokens} tokens are to be read; full attention has room for {room} more"
        )
    after = list(state)
    for i, count in _filled(layers, state).items():
        after[i] = _with_slots(layers[i], state[i], count + tokens)
    return tuple(after)


def fit_call(layers: Sequence[Mechanism], state: State, tokens: int) -> State:
    """Grows caches with fewer slots than the call has tokens.

    How many slots are filled is unknown inside jit: all may be.
    """
    return tuple(
        _with_slots(layer, memory, memory.keys.shape[1] + tokens)
        if layer.cache is not None
        and layer.cache.capacity is not None
        and memory.keys.shape[1] < min(tokens, layer.cache.capacity)
        else memory
        for layer, memory in zip(layers, state, strict=True)
    )


def _filled(layers, state):
    """Slots in use of each layer whose cache has a capacity, by the layer's number."""
    # Fetched at once: a model has many layers.
    lengths = {
        i: memory.length
        for i, (layer, memory) in enumerate(zip(layers, state, strict=True))
        if layer.cache is not None and layer.cache.capacity is not None
    }
    return {i: int(max(length)) for i, length in jax.device_get(lengths).items()}


def _with_slots(layer, memory, needed):
    """A cache with `needed` slots or more, a power of two, at most its capacity."""
    if needed <= memory.keys.shape[1]:
        return memory
    slots = max(LEAST_SLOTS, 1 << (needed - 1).bit_length())
    return layer.cache.resize(memory, min(slots, layer.cache.capacity))
