"""Sharding of parameters, memories and batches over a mesh of devices.

A mechanism's config names the logical axes of its parameters, which are mapped to the
mesh here; rules by name cover all other arrays.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from memjax.models import ModelConfig
from memjax_kernels._src.common.partition import BATCH, SEQUENCE

# The axis of the mesh that divides a logical axis of a mechanism's parameters.
MESH_AXES = {"model": "fsdp", "heads": "tensor", None: None}
# All that is no mechanism's. First match wins. A leaf is named by its path, say
# params/blocks/0/feed_forward/up, a matrix with LoRA feed_forward/up/weight; optimizer
# moments share their parameter's path.
RULES: tuple[tuple[str, P], ...] = (
    # M+: what an update moves by width, so that each device moves its own channels, and
    # the keys by rows, so that each searches its own.
    (r"^memory/pool$", P(BATCH, None, None, "tensor")),
    (r"^memory/store/layers/\d+/rows$", P(BATCH, None, "tensor")),
    (r"^memory/store/layers/\d+/keys$", P(BATCH, "tensor")),
    (r"^memory(/|$)", P(BATCH)),
    # LoRA's changes are small, and everywhere.
    (r"/(gate|up|down)/(down|up)$", P()),
    (r"(^|/)embedding", P("tensor", "fsdp")),
    (r"(^|/)head$", P("fsdp", "tensor")),
    # HMT's W_q and W_k, whose prompts have no second axis.
    (r"(^|/)(query|key)$", P("fsdp", "tensor")),
    # Experts, whose matrices have them first, and their router.
    (r"/routed/(gate|up)$", P("tensor", "fsdp")),
    (r"/routed/down$", P("tensor", None, "fsdp")),
    (r"/router$", P("fsdp")),
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
        tensor: devices that share heads, hidden units, experts and vocabulary.
        slices: pods that are joined by the data-center network alone; `data` is divided
            among them, so that only gradients pass between.
        sequence: devices that share the tokens of each row, and inside of mechanisms
            whose memory is not linear the heads, for contexts beyond one device.
    """

    data: int = 0
    fsdp: int = 1
    tensor: int = 1
    slices: int = 1
    sequence: int = 1


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges all devices, or those that are given.

    Raises:
        ValueError: if the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    others = (config.fsdp, config.tensor, config.sequence)
    if min(*others, config.slices) < 1 or config.data < 0:
        raise ValueError(f"mesh axes must be positive (data may be 0), got {config}")
    data = config.data or len(devices) // math.prod(others)
    if data * math.prod(others) != len(devices):
        sequence = f" sequence={config.sequence}" if config.sequence > 1 else ""
        raise ValueError(
            f"mesh data={config.data} fsdp={config.fsdp} tensor={config.tensor}"
            f"{sequence} does not fit {len(devices)} devices"
        )
    shape, axes = (data, *others), ("data", "fsdp", "tensor", SEQUENCE)
    # XLA divides the program: only kernels are written for one device's share.
    kinds = (AxisType.Auto,) * 4
    _require_slices(config.slices, data, devices)
    try:
        if config.slices == 1:
            return jax.make_mesh(shape, axes, axis_types=kinds, devices=devices)
        arranged = _arranged(config.slices, shape, devices)
    except NotImplementedError:
        # An axis of the mesh is no product of whole axes of the chips' torus.
        arranged = _arranged(config.slices, shape, devices, split=True)
    return Mesh(arranged, axes, axis_types=kinds)


def _arranged(slices, shape, devices, split=False):
    """Devices in the mesh's order; `split` divides axes of their torus."""
    options = {"devices": devices, "allow_split_physical_axes": split}
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, **options)
    within, outer = (shape[0] // slices, *shape[1:]), (slices, 1, 1, 1)
    return mesh_utils.create_hybrid_device_mesh(within, outer, **options)


def _require_slices(slices: int, data: int, devices: Sequence[Any]) -> None:
    """Raises ValueError unless `slices` is that of the devices and divides data."""
    if data % slices:
        raise ValueError(f"mesh.slices={slices} must divide mesh.data={data}")
    # GPUs of several hosts are of several slices to jax, and need not be told.
    if slices == 1 and devices[0].platform != "tpu":
        return
    found = len({getattr(device, "slice_index", 0) for device in devices})
    if found != slices:
        raise ValueError(
            f"mesh.slices={slices} must be {found}, the number of slices of the devices"
        )


def require_divides(
    mesh: Mesh | AbstractMesh, batch_size: int, model: ModelConfig, length: int
) -> None:
    """Raises ValueError if the mesh does not divide batch, heads, experts or tokens.

    Key-value heads may be fewer than `tensor`: they are then on all its devices.

    Args:
        mesh: of the run.
        batch_size: batch elements of an update, over all devices.
        model: configuration of the layers with heads.
        length: T, tokens of a row.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % ways:
        below, above = batch_size // ways * ways, -(-batch_size // ways) * ways
        fits = f"{below} or {above}" if below else str(above)
        raise ValueError(
            f"batch_size={batch_size} does not divide among data * fsdp = {ways} "
            f"devices: {fits} would"
        )
    tensor, sequence = mesh.shape["tensor"], mesh.shape.get(SEQUENCE, 1)
    if length % sequence:
        raise ValueError(
            f"mesh.sequence={sequence} must divide the {length} tokens of a row"
        )
    for i, mechanism in enumerate(model.mechanisms):
        together, named = tensor, f"mesh.tensor={tensor}"
        # Some divide their tokens in the mechanism too.
        if sequence > 1 and not mechanism.divides_tokens:
            together = tensor * sequence
            named = f"mesh.tensor * mesh.sequence = {together}"
        mixture = model.styles[i].experts if model.styles else None
        if mixture is not None and mixture.num_experts % tensor:
            raise ValueError(
                f"mesh.tensor={tensor} does not divide the {mixture.num_experts} "
                f"experts of model.styles[{i}]"
            )
        heads = getattr(mechanism.attention, "num_heads", together)
        heads = getattr(mechanism, "num_heads", heads)
        if heads % together:
            fits = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"{named} does not divide the {heads} heads of "
                f"model.mechanisms[{i}]: {', '.join(fits)} would"
            )


def shardings(mesh: Mesh, tree: PyTree, model: ModelConfig) -> PyTree:
    """The sharding of each leaf: by its mechanism's axes, or by the rules.

    An axis of the mesh that does not divide its dimension is left out for that leaf,
    which is then replicated along it: 2 key-value heads on 4 tensor devices, say.

    Args:
        mesh: the devices.
        tree: a train state, of the model or of a memory around it.
        model: configuration of the language model, with its mechanisms' axes.
    """
    mechanisms = _mechanism_specs(model)

    def place(path, leaf):
        name = leaf_name(path)
        spec = _spec_in_mechanism(mechanisms, name)
        if spec is None:
            # The last rule matches every name: all else is replicated.
            spec = next(spec for pattern, spec in RULES if re.search(pattern, name))
        return NamedSharding(mesh, _fit(mesh, spec, leaf.shape))

    return jax.tree_util.tree_map_with_path(place, tree)


def _mechanism_specs(model: ModelConfig) -> dict[tuple[int, str], P]:
    """By layer and name, as in (0, "cell/rate")."""

    def is_axes(node):
        return type(node) is tuple

    def named(path):
        # A last "value" is a parameter here: `leaf_name` would drop it.
        return jax.tree_util.keystr(path, simple=True, separator="/")

    return {
        (layer, named(path)): P(*(MESH_AXES[axis] for axis in axes))
        for layer, mechanism in enumerate(model.layers)
        for path, axes in jax.tree_util.tree_leaves_with_path(
            mechanism.param_axes(), is_leaf=is_axes
        )
    }


def _spec_in_mechanism(specs: dict[tuple[int, str], P], name: str) -> P | None:
    """Of a mechanism's parameter, by a leaf's name; None is none.

    A matrix with LoRA is in an `Adapted`, as its `weight`, beside its changes.
    """
    found = re.search(r"blocks/(\d+)/mechanism/(.*)$", name)
    if found is None:
        return None
    layer, within = int(found[1]), found[2]
    if (layer, within) in specs:
        return specs[layer, within]
    matrix, _, part = within.rpartition("/")
    if (layer, matrix) not in specs:
        return None
    # The frozen matrix under an adapter is divided as it is without one. LoRA's changes
    # are small, and everywhere.
    return specs[layer, matrix] if part == "weight" else P()


@functools.lru_cache(maxsize=8)
def host_part(mesh: Mesh) -> tuple[int, int]:
    """Index and number of the equal parts of a batch, of which this host reads one.

    Hosts that share rows, because `tensor` is divided among them, read the
    same part. Parts follow the order of the mesh, so that batch element k is the same
    on any mesh.

    Raises:
        ValueError: the mesh gives hosts rows that are not neighbours, or not equal in
            number.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    places = NamedSharding(mesh, P(BATCH)).devices_indices_map((ways,))
    blocks: dict[int, set[int]] = {}
    for device, (rows,) in places.items():
        blocks.setdefault(device.process_index, set()).add(rows.start or 0)
    mine = blocks[jax.process_index()]
    for host, own in blocks.items():
        first, count = min(own), len(own)
        if count != len(mine) or first % count or max(own) != first + count - 1:
            raise ValueError(
                f"mesh {dict(mesh.shape)} gives process {host} the parts "
                f"{sorted(own)} of a batch in {ways}: hosts need equally many "
                "neighbours"
            )
    return min(mine) // len(mine), ways // len(mine)


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
    """Sharding of the rows of a batch.

    Raises:
        ValueError: if they do not divide among the devices.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % ways:
        raise ValueError(
            f"batch of {rows} rows does not divide among data * fsdp = {ways} devices"
        )
    return NamedSharding(mesh, P(BATCH))


def put_batch(mesh: Mesh, batch: PyTree) -> PyTree:
    """Puts this host's rows on its devices, as its part of the global batch.

    Raises:
        ValueError: if the rows do not divide among the devices.
    """
    # Each host holds its part of the batch; the check is of the whole.
    _, parts = host_part(mesh)
    sharding = batch_sharding(mesh, jax.tree.leaves(batch)[0].shape[0] * parts)

    def put(x):
        x = np.asarray(x)
        whole = (parts * x.shape[0], *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, x, whole)

    return jax.tree.map(put, batch)


def _fit(mesh, spec, shape):
    """Drops mesh axes from `spec` that do not divide `shape`."""
    axes = []
    for axis, size in zip(spec, shape, strict=False):
        names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
        ways = int(np.prod([mesh.shape[name] for name in names]))
        # Replicated rather than padded: a few key-value heads on many devices, say.
        axes.append(axis if ways > 1 and size % ways == 0 else None)
    return P(*axes)


def leaf_name(path: Any) -> str:
    """The keys, fields and indices of a path, joined by slashes.

    Without the last, "value", by which an nnx.Param holds its array.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/value")
