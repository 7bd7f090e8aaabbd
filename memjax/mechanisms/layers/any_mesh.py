"""Functions of parameters, state and tokens on meshes of any axis types."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, auto_axes
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from memjax_kernels._src.common.partition import mesh_of


def on_any_mesh(
    function: Callable, has_state: bool = True, check: Callable | None = None
) -> Any:
    """A function of (params, [state], x, ...) with Explicit axes made Auto inside.

    Otherwise every indexing and reshape would have to name its result's sharding.
    `check` is called first, on the same arguments.
    """

    @functools.wraps(function)
    def call(*args):
        if check is not None:
            check(*args)
        mesh = mesh_of(args)
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
        if not explicit:
            return function(*args)
        of = functools.partial(jax.tree.map, functools.partial(_sharding, mesh))
        out = (of(args[1]), of(args[2])) if has_state else of(args[1])
        inside = auto_axes(function, axes=explicit, out_sharding=out)
        return inside(*args)

    return call


def _sharding(mesh: AbstractMesh, leaf: Array) -> NamedSharding:
    """Sharding of an array on the mesh; replicated if it has another mesh."""
    own = jax.typeof(leaf).sharding
    return NamedSharding(mesh, P() if own.mesh.empty else own.spec)
