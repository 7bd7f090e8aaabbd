"""Offload large parts of a state to host memory, and compute there.

    rows = near(lambda store, at: store[at], store, at)

`near` runs a function in the memory of its first argument: only the result is copied
to the device. It has no gradient on the host.

XLA keeps such an array on the host through loops and branches only if a program reads
it first and writes it once afterwards; an array that is written and then read again is
copied through the device.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.experimental import compute_on
from jaxtyping import Array, PyTree

from memjax.checks import require_known

Place = Literal["device", "host"]
#: The kind of memory on the host.
HOST = "pinned_host"

# Newer versions of jax have this one alone, under the shorter name.
_compute_on: Any = getattr(compute_on, "compute_on2", compute_on.compute_on)


def require_place(name: str, place: str) -> None:
    """Raises ValueError unless `place` is one that the default device can reach."""
    require_known(name, place, get_args(Place))
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if place == "host" and HOST not in kinds:
        raise ValueError(
            f"{name} must be 'device' on {device.device_kind}, whose memories are "
            f"{kinds}, got {place!r}"
        )


def put(place: Place, memory: PyTree) -> PyTree:
    """The same arrays in that place."""
    return jax.device_put(memory, jax.memory.Space.Host) if place == "host" else memory


def near(
    function: Callable[..., Any], memory: Array, *args: Any, stays: Any = False
) -> Any:
    """function(memory, *args), computed where the memory is.

    Args:
        function: of arrays; on the host without jit or branches inside.
        memory: an array of either place.
        args: arrays, which travel to it.
        stays: which results stay where the memory is, a tree prefix of the results.
    """
    space = jax.typeof(memory).memory_space
    if space != jax.memory.Space.Host:
        return function(memory, *args)
    # Computation on the host has no gradient.
    given = jax.device_put(jax.lax.stop_gradient((memory, *args)), space)

    def back(stay):
        return space if stay else jax.memory.Space.Device

    spaces = jax.tree.map(back, stays)
    on_host = _compute_on(
        function, compute_type="device_host", out_memory_spaces=spaces
    )
    return on_host(*given)


def device_bytes(state: PyTree) -> dict[str, int]:
    """Bytes of a state's arrays in each kind of memory: "device", "pinned_host"."""
    found: dict[str, int] = {}
    for leaf in jax.tree.leaves(state):
        kind = leaf.sharding.memory_kind
        found[kind] = found.get(kind, 0) + leaf.nbytes
    return found
