"""Kernels on a mesh, each device with its share of batch elements and heads.

XLA partitions everything but kernels, so an op wraps its kernels in `jax.shard_map`.
The mesh is the one of `jax.set_mesh`, else the mesh of the op's arguments.
Inside a caller's `shard_map` over all axes a kernel runs as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

# Names of the mesh axes that divide the batch, and of those that divide the heads.
# A kernel runs whole on every device along any other axis of a mesh.
BATCH = ("data", "fsdp")
# Between mechanisms tokens are divided along the sequence; inside, where every token
# may depend on all before it, heads are divided instead: DeepSpeed-Ulysses, Jacobs et
# al. (2023), https://arxiv.org/abs/2309.14509. XLA exchanges one for the other.
SEQUENCE = "sequence"
HEADS = ("tensor", SEQUENCE)


def mesh_of(*arrays: Any) -> AbstractMesh:
    """The mesh of `jax.set_mesh`, else that of the arrays; empty if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    for x in jax.tree.leaves(arrays):
        mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty:
            return mesh
    return mesh


def chunkwise(
    form: Callable[..., tuple[Any, Any]], *, says_what_varies: bool = True
) -> Callable[..., tuple[Any, Any]]:
    """A chunk form (tokens, *memories) -> (memories, y), on each device's share.

    Tokens and y are [B, n, C, H, ...], flags among the tokens [B, n], and memories
    [B, H, ...], or [1, H, ...] for those that all batch elements share. Axes of the
    mesh that do not divide B or H evenly are left out: all devices along them compute
    the same. Without a mesh, the form as it is.

    Args:
        form: the chunk form.
        says_what_varies: whether its kernels tell over which axes of a mesh their
            results vary; jax's own do not.
    """
    return functools.partial(_on_shares, form, _of_chunks, says_what_varies)


def _of_chunks(fit, tokens, *memories):
    batch, _, _, heads = jax.tree.leaves(tokens)[0].shape[:4]
    b, h = fit(BATCH, batch), fit(HEADS, heads)
    along = P(b, None, None, h)
    token_specs = jax.tree.map(lambda x: along if x.ndim > 2 else P(b), tokens)

    def shared(x):
        return x.shape[0] == 1 < batch

    memory_specs = jax.tree.map(lambda x: P(None if shared(x) else b, h), memories)
    return (token_specs, *memory_specs), (P(b, h), along)


def head_ways(number: int, *arrays: Any) -> int:
    """The number of devices among which `chunkwise` divides the heads."""
    mesh = mesh_of(*arrays)
    axes = _undivided(mesh)
    found = _fit_heads(mesh, [name for name in HEADS if name in axes], number)
    return int(np.prod([mesh.shape[axis] for axis in found or ()]))


def by_rows(form: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A search (queries, rows) -> y, on each device's share.

    Queries are [B, T, ...], rows [B, M, ...] and y [B, M]: batch elements are divided
    as everywhere, and rows along the axis that divides heads elsewhere. Axes that do
    not divide B or M evenly are left out. Without a mesh, the form as it is.
    """
    return functools.partial(_on_shares, form, _of_rows, True)


def _of_rows(fit, queries, rows):
    b, m = fit(BATCH, rows.shape[0]), fit(HEADS[:1], rows.shape[1])
    return (P(b), P(b, m)), P(b, m)


def token_by_token(
    form: Callable[[Any, Any], Any], *, whole_sequences: bool = False
) -> Callable[[Any, Any], Any]:
    """A function (tokens, parameters) -> y of every token alone, on a device's share.

    Tokens and y are [B, T, H, K], the first of the tokens too, or [B, T, ...] without
    heads. Axes that do not divide B, T or H evenly are left out. Without a mesh, the
    form as it is.

    Args:
        form: the function; all devices have the whole parameters.
        whole_sequences: whether the axis that divides sequences divides heads, as
            inside a mechanism, and not tokens.
    """

    def specs(fit, tokens, parameters):
        batch, time, heads = jax.tree.leaves(tokens)[0].shape[:3]
        b, t = fit(BATCH, batch), None if whole_sequences else fit((SEQUENCE,), time)
        along = P(b, t, fit(HEADS if whole_sequences else HEADS[:1], heads))
        specs = jax.tree.map(lambda x: along if x.ndim == 4 else P(b, t), tokens)
        return (specs, P()), along

    return functools.partial(_on_shares, form, specs, True)


def by_experts(form: Callable[..., Any]) -> Callable[..., Any]:
    """A function (tokens, parameters, experts, first) -> y, on each device's share.

    Tokens and y are [B, ..., D], [B, T, D] where there is a sequence, and experts
    [E, ...], divided along the axis that divides heads elsewhere. A device has the
    experts from `first` on, and gives their part of a sum over all, whole parameters
    as everyone. Without a mesh, the form of all experts, with `first` 0.

    The call without `first` raises ValueError where the mesh does not divide E.
    """

    def divided(tokens, parameters, experts):
        mesh = mesh_of(tokens, parameters, experts)
        count, axis = jax.tree.leaves(experts)[0].shape[0], HEADS[0]
        ways = mesh.shape[axis] if axis in _undivided(mesh) else 1
        if count % ways:
            raise ValueError(
                f"{axis}={ways} devices of the mesh must divide the {count} experts"
            )

        def specs(fit, tokens, parameters, experts):
            t = fit((SEQUENCE,), tokens.shape[1]) if tokens.ndim > 2 else None
            along = P(fit(BATCH, tokens.shape[0]), t)
            return (along, P(), P(axis if ways > 1 else None)), along

        def share(tokens, parameters, experts):
            if ways == 1:
                return form(tokens, parameters, experts, 0)
            first = jax.lax.axis_index(axis) * (count // ways)
            return jax.lax.psum(form(tokens, parameters, experts, first), axis)

        return _on_shares(share, specs, True, tokens, parameters, experts)

    return divided


def _on_shares(form, specs, says_what_varies, *given, **options):
    """form(*given, **options), where there is a mesh on each device's share.

    `specs`, of (fit, *given), are those of the arguments and of the results; fit(names,
    size) gives the axes of these names that divide a size.
    """
    mesh = mesh_of(*given)
    axes = _undivided(mesh)
    if not axes:
        return form(*given, **options)

    def fit(names, size):
        present = [name for name in names if name in axes]
        return (_fit if names is BATCH else _fit_heads)(mesh, present, size)

    in_specs, out_specs = specs(fit, *given)
    return jax.shard_map(
        functools.partial(form, **options),
        mesh=mesh,
        axis_names=set(axes),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=says_what_varies,
    )(*given)


def _undivided(mesh: AbstractMesh) -> list[str]:
    """The axes along which the caller has not divided its arrays already."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind != AxisType.Manual]


def devices_of(*arrays: Any) -> int:
    """Devices among which XLA, or a `shard_map` still to come, divides arrays."""
    mesh = mesh_of(*arrays)
    return int(np.prod([mesh.shape[axis] for axis in _undivided(mesh)]))


def divides(*arrays: Any) -> bool:
    """True on a mesh, but not inside of a `shard_map` over all of its axes."""
    return bool(_undivided(mesh_of(*arrays)))


def along_batch(x: Any) -> Any:
    """The same [B, T, ...], divided along the batch and the sequence, and nothing else.

    XLA spreads the divisions of parameters to activations: where a matrix is divided
    along the axis that divides the batch, it may gather the activations of all batch
    elements in place of the matrix. An array that has been told where to lie stays.

    Only axes of the mesh of `jax.set_mesh` that XLA divides by itself count; without
    any, or where they do not divide B or T evenly, x as it is.
    """
    divided, ways = _divided_batch(x.shape[0]), sequence_ways(x.shape[1])
    if divided is None and ways == 1:
        return x
    spec = P(divided, SEQUENCE if ways > 1 else None)
    return jax.lax.with_sharding_constraint(x, spec)


def by_heads(x: Any) -> Any:
    """The same [B, T, H, ...], divided by heads instead of tokens.

    For functions along the sequence, which end with `by_tokens`. Without
    an axis that divides sequences, x as it is.
    """
    return channels_by_heads(x, x.shape[2])


def by_tokens(x: Any) -> Any:
    """The same [B, T, H, ...], divided by tokens again; see `by_heads`."""
    return _exchanged(x, x.shape[2], whole=False)


def channels_by_heads(x: Any, heads: int) -> Any:
    """`by_heads` of [B, T, H * K], in which the channels of a head are neighbours."""
    # First as they are: gradients then change one division at a time, where XLA would
    # gather the whole for two at once.
    return _exchanged(_exchanged(x, heads, whole=False), heads, whole=True)


def _exchanged(x, heads, whole):
    mesh = jax.sharding.get_abstract_mesh()
    # One token is a decoding step, which no axis divides.
    alone = not _automatic((SEQUENCE,)) or mesh.shape[SEQUENCE] == 1
    if alone or x.shape[1] == 1:
        return x
    axes = _automatic(HEADS if whole else HEADS[:1])
    along = None
    if not whole and sequence_ways(x.shape[1]) > 1:
        along = SEQUENCE
    spec = P(_divided_batch(x.shape[0]), along, _fit_heads(mesh, axes, heads))
    return jax.lax.with_sharding_constraint(x, spec)


def sequence_ways(length: int) -> int:
    """Devices that divide a sequence of `length` tokens, 1 where they cannot."""
    mesh = jax.sharding.get_abstract_mesh()
    ways = mesh.shape[SEQUENCE] if _automatic((SEQUENCE,)) else 1
    return 1 if length % ways else ways


def _automatic(names: tuple[str, ...]) -> list[str]:
    """Those axes of the mesh of `jax.set_mesh` that XLA divides by itself."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return [name for name in names if kinds.get(name) == AxisType.Auto]


def elements_a_device(batch: int) -> int:
    """Of `batch` elements those that a device computes, as `along_batch` divides."""
    mesh = jax.sharding.get_abstract_mesh()
    divided = _divided_batch(batch) or ()
    return batch // int(np.prod([mesh.shape[axis] for axis in divided]))


def _divided_batch(batch: int) -> tuple[str, ...] | None:
    """The axes of the mesh that `jax.set_mesh` divides a batch along, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    return _fit(mesh, _automatic(BATCH), batch)


def _fit(mesh: AbstractMesh, axes: list[str], size: int) -> tuple[str, ...] | None:
    """The axes, if they divide `size` evenly."""
    devices = int(np.prod([mesh.shape[axis] for axis in axes]))
    # A `shard_map` cannot pad: what does not divide is computed by all alike.
    return tuple(axes) if axes and size % devices == 0 else None


def _fit_heads(
    mesh: AbstractMesh, axes: list[str], heads: int
) -> tuple[str, ...] | None:
    """The axes that divide the heads: all, or else the first of them that do."""
    for count in range(len(axes), 0, -1):
        if fitting := _fit(mesh, axes[:count], heads):
            return fitting
    return None
