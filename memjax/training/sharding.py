"""One mesh, one table of rules: where each parameter, memory and batch row lives."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from memjax_kernels.common.partition import BATCH

# First match wins. A leaf is named by its path, say params/blocks/0/mixer/query, a
# matrix with LoRA mixer/query/weight; optimizer moments share their parameter's path.
RULES: tuple[tuple[str, P], ...] = (
    (r"^memory(/|$)", P(BATCH)),
    # LoRA's changes are small, and everywhere.
    (r"/(query|key|value|output|gate|up|down)/(down|up)$", P()),
    (r"(^|/)embedding", P("tensor", "fsdp")),
    (r"(^|/)head$", P("fsdp", "tensor")),
    # Of attention; HMT's W_q and W_k too, whose prompts have no second axis.
    (r"(^|/)(query|key|value)(/weight)?$", P("fsdp", "tensor")),
    (r"mixer/query_key$", P("fsdp", None, "tensor")),
    (r"mixer/filters$", P(None, None, "tensor")),
    (r"core/(rate|forget|target|.*/weight)$", P("fsdp", "tensor")),
    (r"core/narrow$", P("fsdp")),
    (r"core/widen$", P(None, "tensor")),
    (r"core/(keys|values|start|weights|bias)$", P("tensor")),
    (r"output(/weight)?$", P("tensor", None, "fsdp")),
    (r"(gate|up)(/weight)?$", P("fsdp", "tensor")),
    (r"down(/weight)?$", P("tensor", "fsdp")),
    (r"", P()),
)


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; their product is the number of devices.

    Attributes:
        data: copies of the model, each with its rows; 0 is all devices left over.
        fsdp: devices that share parameters and optimizer state, each with its rows.
        tensor: devices that share heads, hidden units and vocabulary.
    """

    data: int = 0
    fsdp: int = 1
    tensor: int = 1


def make_mesh(config: MeshConfig) -> Mesh:
    """Arranges all devices.

    Raises:
        ValueError: if the axes do not multiply to the number of devices.
    """
    devices = jax.device_count()
    if config.fsdp < 1 or config.tensor < 1 or config.data < 0:
        raise ValueError(f"mesh axes must be positive (data may be 0), got {config}")
    data = config.data or devices // (config.fsdp * config.tensor)
    if data * config.fsdp * config.tensor != devices:
        raise ValueError(
            f"mesh data={config.data} fsdp={config.fsdp} tensor={config.tensor} does "
            f"not fit {devices} devices"
        )
    return jax.make_mesh(
        (data, config.fsdp, config.tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
    )


def shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """The sharding of each leaf, by the rules.

    An axis of the mesh that does not divide its dimension is left out for that leaf,
    which is then replicated along it: 2 key-value heads on 4 tensor devices, say.
    """

    def place(path, leaf):
        name = leaf_name(path)
        spec = next(spec for pattern, spec in RULES if re.search(pattern, name))
        return NamedSharding(mesh, _fit(mesh, spec, leaf.shape))

    return jax.tree_util.tree_map_with_path(place, tree)


def put_batch(mesh: Mesh, batch: PyTree) -> PyTree:
    """Puts this host's rows on its devices, as its part of the global batch.

    Raises:
        ValueError: if the rows do not divide among the devices.
    """
    sharding = NamedSharding(mesh, P(BATCH))
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = jax.tree.leaves(batch)[0].shape[0] * jax.process_count()
    if rows % ways:
        raise ValueError(
            f"batch of {rows} rows does not divide among data * fsdp = {ways} devices"
        )
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), batch
    )


def _fit(mesh, spec, shape):
    """Drops from `spec` what `shape` has no room for."""
    axes = []
    for axis, size in zip(spec, shape, strict=False):
        names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
        ways = int(np.prod([mesh.shape[name] for name in names]))
        axes.append(axis if ways > 1 and size % ways == 0 else None)
    return P(*axes)


def leaf_name(path: Any) -> str:
    """The keys, fields and indices of a path, joined by slashes.

    Without the last, "value", by which an nnx.Param holds its array.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/value")
