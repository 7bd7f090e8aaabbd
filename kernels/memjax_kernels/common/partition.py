"""Kernels on several devices: each runs on the rows and heads that its device holds.

XLA partitions everything but kernels. Inside `over` an op wraps its kernels in
`shard_map`, so that a program written for one device runs on a mesh as it is; outside
it a caller does so, or the op takes its XLA form.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P


class Partition(NamedTuple):
    """Which axes of a mesh divide the rows of a batch, and which the heads."""

    mesh: Mesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]


_current: contextvars.ContextVar[Partition | None] = contextvars.ContextVar(
    "partition", default=None
)


@contextlib.contextmanager
def over(
    mesh: Mesh, *, batch: tuple[str, ...] = (), heads: tuple[str, ...] = ()
) -> Iterator[None]:
    """Ops traced inside run their kernels on this mesh.

    The mesh also says for which platform they are traced, which need not be here: a
    program can be compiled for a TPU pod from its topology. Enter it inside the
    function that is jitted: jit does not know that a trace depended on it.

    Args:
        mesh: the devices.
        batch: axes over which rows are divided. Where they do not divide them evenly,
            every device of these axes runs all rows.
        heads: likewise for heads.

    Raises:
        ValueError: for an axis that the mesh does not have.
    """
    unknown = (set(batch) | set(heads)) - set(mesh.axis_names)
    if unknown:
        raise ValueError(
            f"batch and heads must be axes of the mesh, {mesh.axis_names}, got "
            f"{sorted(unknown)}"
        )
    token = _current.set(Partition(mesh, batch, heads))
    try:
        yield
    finally:
        _current.reset(token)


def platform() -> str:
    """Where ops are traced for: "cpu", "gpu" or "tpu"."""
    partition = _current.get()
    if partition is None:
        return jax.default_backend()
    here = partition.mesh.devices.flat[0].platform
    return "gpu" if here == "cuda" else here


def is_whole() -> bool:
    """Whether a kernel sees all of its arrays: one device, `over`, or `shard_map`."""
    if _current.get() is not None or jax.device_count() == 1:
        return True
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)


def chunkwise(form: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """A chunk form (tokens, *memories) -> (memories, y) on each device's share.

    Tokens and y are [B, n, C, H, ...], flags among the tokens [B, n], and memories
    [B, H, ...]. Outside `over`, the form as it is.
    """
    partition = _current.get()
    if partition is None:
        return form

    def run(tokens, *memories):
        rows, _, _, heads = jax.tree.leaves(tokens)[0].shape[:4]
        b = _fit(partition.mesh, partition.batch, rows)
        h = _fit(partition.mesh, partition.heads, heads)
        along = P(b, None, None, h)
        specs = jax.tree.map(lambda x: along if x.ndim > 2 else P(b), tokens)
        held = jax.tree.map(lambda _: P(b, h), memories)
        divided = jax.shard_map(
            form,
            mesh=partition.mesh,
            in_specs=(specs, *held),
            out_specs=(P(b, h), along),
        )
        return divided(tokens, *memories)

    return run


def _fit(
    mesh: Mesh | AbstractMesh, axes: tuple[str, ...], size: int
) -> tuple[str, ...] | None:
    ways = int(np.prod([mesh.shape[axis] for axis in axes]))
    return axes if axes and size % ways == 0 else None
