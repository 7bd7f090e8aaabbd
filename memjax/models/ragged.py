"""Rows that stand at different places: joining, cutting and placing by row.

Shapes: B batch, T time, L segment, E width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Shaped

from memjax.models.language_model.model import LAYER_INPUT

#: Keeps the layers' inputs in the host's memory for the backward pass, and no more.
offload_layers = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=[LAYER_INPUT],
    offload_src="device",
    offload_dst="pinned_host",
)


def kept(activations: str, function: Callable) -> Callable:
    """The function, of which the backward pass keeps what `HMTConfig` asks for."""
    match activations:
        case "keep":
            return function
        case "offload":
            return jax.checkpoint(function, policy=offload_layers)
        case _:
            return jax.checkpoint(function)


def run_if(
    needed: Bool[Array, ""], function: Callable, otherwise: Callable, *args: Any
) -> Any:
    """function(*args) where it is needed, else otherwise(*args).

    As `lax.cond` in forward mode; the backward pass runs the branch again. That of
    `lax.cond` keeps what the function would need, zeros of it where it was not run.
    Both take all arrays they use as arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    moves = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    fixed = [x for x, moving in zip(leaves, moves, strict=True) if not moving]

    def branches(fixed):
        def of(branch):
            def run(*moving):
                rest, first = iter(fixed), iter(moving)
                merged = [next(first) if moves_ else next(rest) for moves_ in moves]
                return branch(*jax.tree.unflatten(tree, merged))

            return run

        return of(function), of(otherwise)

    @jax.custom_vjp
    def run(needed, fixed, moving):
        return jax.lax.cond(needed, *branches(fixed), *moving)

    def forward(needed, fixed, moving):
        return run(needed, fixed, moving), (needed, fixed, moving)

    def backward(kept, cotangent):
        needed, fixed, moving = kept
        pull = lambda branch: lambda *moving: jax.vjp(branch, *moving)[1](cotangent)
        found = jax.lax.cond(needed, *map(pull, branches(fixed)), *moving)
        return None, None, list(found)

    run.defvjp(forward, backward)
    moving = [x for x, moving in zip(leaves, moves, strict=True) if moving]
    return run(needed, fixed, moving)


def check_tokens(tokens: Array, batch: int, vocab_size: int) -> None:
    """Raises ValueError unless tokens are [B, T >= 1], their known values in [0, V)."""
    integers = jnp.issubdtype(tokens.dtype, jnp.integer)
    shape = tokens.shape
    if not integers or tokens.ndim != 2 or shape[0] != batch or shape[1] < 1:
        raise ValueError(
            f"tokens must be integers [B, T] with {batch} rows, as the state has, and "
            f"T >= 1, got {tokens.dtype}{list(shape)}"
        )
    if isinstance(tokens, Tracer):
        return
    known = np.asarray(tokens)
    if known.min() < 0 or known.max() >= vocab_size:
        worst = known.min() if known.min() < 0 else known.max()
        raise ValueError(f"tokens must be in [0, {vocab_size}), got {worst}")


def check_mask(mask: Array, tokens: Array, expected: bool) -> None:
    """Raises ValueError unless a mask is `expected`, and bool [B, T]."""
    if mask.shape != tokens.shape or mask.dtype != bool:
        raise ValueError(
            f"mask must be bool{list(tokens.shape)}, as the tokens are, "
            f"got {mask.dtype}{list(mask.shape)}"
        )
    if not expected:
        raise ValueError(
            "mask needs a state made for it: init_state(batch, masked=True)"
        )


def take(x: Shaped[Array, "B T *E"], places: Int[Array, "B n"]) -> Any:
    """x[b, places[b]] for every row."""
    return jax.vmap(lambda row, at: row[at])(x, places)


def write(x: Shaped[Array, "B T *E"], places: Int[Array, "B n"], new: Array) -> Any:
    """x with new[b] at places[b] of every row; a place beyond T is dropped."""
    at_row = lambda row, at, new: row.at[at].set(new, mode="drop")
    return jax.vmap(at_row)(x, places, new)


def put(
    x: Shaped[Array, "B T E"], places: Int[Array, " B"], value: Shaped[Array, "B E"]
) -> Shaped[Array, "B T E"]:
    """x with value[b] at places[b]."""
    here = jnp.arange(x.shape[1], dtype=jnp.int32)[None] == places[:, None]
    return jnp.where(here[..., None], value[:, None], x)


def join(
    old: Shaped[Array, "B L"],
    held: Int[Array, " B"],
    new: Shaped[Array, "B T"],
    length: int,
) -> Shaped[Array, "B _"]:
    """The first held[b] of `old`, then `new`, then 0, in rows of `length`."""
    place = jnp.arange(length, dtype=jnp.int32)[None]
    after = place - held[:, None]
    source = jnp.where(
        after < 0,
        jnp.minimum(place, old.shape[1] - 1),
        old.shape[1] + jnp.minimum(after, new.shape[1] - 1),
    )
    joined = take(jnp.concatenate([old, new.astype(old.dtype)], axis=1), source)
    return jnp.where(after < new.shape[1], joined, jnp.zeros((), old.dtype))


def cut(
    x: Shaped[Array, "B T"],
    piece: Int[Array, " B"],
    length: int,
    held: Int[Array, " B"],
) -> Shaped[Array, "B L"]:
    """The first held[b] of each row's piece number piece[b] of `length`, then 0."""
    place = jnp.arange(length, dtype=jnp.int32)[None]
    source = jnp.minimum(piece[:, None] * length + place, x.shape[1] - 1)
    return jnp.where(place < held[:, None], take(x, source), jnp.zeros((), x.dtype))


def drop(
    x: Shaped[Array, "B T E"], count: int, rows: Bool[Array, " B"]
) -> Shaped[Array, "B T E"]:
    """Rows without their places 1 to `count`; what follows moves up."""
    place = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    moved = jnp.minimum(place + count, x.shape[1] - 1)
    return take(x, jnp.where(rows[:, None] & (place > 0), moved, place))


def mask(
    visible: Bool[Array, "B L"],
    start: Int[Array, " B"],
    held: Int[Array, " B"],
    length: int,
) -> Bool[Array, "B _"]:
    """What may be seen of a text of `length` whose place start[b] is visible[b, 0].

    The first held[b] of `visible` count; all before and after them may be seen.
    """
    place = jnp.arange(length, dtype=jnp.int32)[None] - start[:, None]
    inside = (place >= 0) & (place < held[:, None])
    seen = take(visible, jnp.clip(place, 0, visible.shape[1] - 1))
    return jnp.where(inside, seen, True)
