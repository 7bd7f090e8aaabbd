"""Ragged batches: checks, gathers and joins.

Shapes: B batch, T time, L segment, n positions, E width.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Shaped

from memjax.checks import check_sizes, require_instance
from memjax.models.base import Model


def check_tokens(tokens: Array, batch: int, vocab_size: int) -> None:
    """Raises ValueError unless tokens are [B, T >= 1], their known values in [0, V)."""
    integers = jnp.issubdtype(tokens.dtype, jnp.integer)
    shape = tokens.shape
    if not integers or tokens.ndim != 2 or shape[0] != batch or shape[1] < 1:
        raise ValueError(
            f"tokens must be integers [B, T] with {batch} rows, as the state has, and "
            f"T >= 1, got {tokens.dtype}{list(shape)}"
        )
    check_known(tokens, vocab_size)


def check_kind(state: Any, kind: type) -> None:
    """Raises ValueError unless a state is of this kind of model."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state must be a {kind.__name__}, from this model's init_state, got a "
            f"{type(state).__name__}"
        )


def check_parts(state: Any, count: int) -> None:
    """Raises ValueError unless a plain model's state has `count` parts."""
    # A named tuple is the state of a memory around a model.
    parts = len(state) if isinstance(state, tuple) else None
    if hasattr(state, "_fields") or parts != count:
        found = "" if parts is None else f" of {parts}"
        raise ValueError(
            f"state must have {count} parts, from this model's init_state, got "
            f"a {type(state).__name__}{found}"
        )


def check_known(tokens: Array, vocab_size: int) -> None:
    """Raises ValueError unless known tokens are in [0, V)."""
    # Inside jit there are no values to check; `embed` then gives NaN for a bad one.
    if isinstance(tokens, Tracer) or not tokens.size:
        return
    known = np.asarray(tokens)
    if known.min() < 0 or known.max() >= vocab_size:
        worst = known.min() if known.min() < 0 else known.max()
        raise ValueError(f"tokens must be in [0, {vocab_size}), got {worst}")


def check_lengths(
    lengths: Array | np.ndarray | None, tokens: Array | np.ndarray, least: int
) -> None:
    """Raises ValueError unless lengths are integers [B], known ones in [least, T]."""
    if lengths is None:
        return
    b, t = tokens.shape[:2]
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape != (b,):
        raise ValueError(
            f"lengths must be integers [{b}], got {lengths.dtype}{list(lengths.shape)}"
        )
    if isinstance(lengths, Tracer):
        return
    known = np.asarray(lengths)
    if known.min() < least or known.max() > t:
        raise ValueError(f"lengths must be in [{least}, T={t}], got {known.tolist()}")


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


def check_prompt(
    model: Model,
    prompt: Any,
    lengths: Sequence[int] | None,
    max_new_tokens: int,
    tokens_per_call: int,
    samples: int,
) -> None:
    """Raises ValueError on what `generate` cannot read or draw."""
    require_instance("model", model, Model)
    prompt = np.asarray(prompt)
    integers = np.issubdtype(prompt.dtype, np.integer)
    if not integers or prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"prompt must be integers [B, T] with T >= 1, got {prompt.dtype}"
            f"{list(prompt.shape)}"
        )
    check_sizes(
        max_new_tokens=max_new_tokens, tokens_per_call=tokens_per_call, samples=samples
    )
    if prompt.min() < 0 or prompt.max() >= model.vocab_size:
        worst = prompt.max() if prompt.max() >= model.vocab_size else prompt.min()
        raise ValueError(
            f"prompt must hold tokens in [0, {model.vocab_size}), got {worst}"
        )
    if lengths is not None:
        check_lengths(np.asarray(lengths), prompt, 1)


def take(x: Shaped[Array, "B T *E"], positions: Int[Array, "B n"]) -> Any:
    """x[b, positions[b]] for every batch element b."""
    return jax.vmap(lambda x, positions: x[positions])(x, positions)


def write(
    x: Shaped[Array, "B T *E"], positions: Int[Array, "B n"], values: Array
) -> Any:
    """x with values[b] at positions[b]; a position beyond T is dropped."""

    def write_one(x, at, values):
        return x.at[at].set(values, mode="drop")

    return jax.vmap(write_one)(x, positions, values)


def put(
    x: Shaped[Array, "B T E"], position: Int[Array, " B"], value: Shaped[Array, "B E"]
) -> Shaped[Array, "B T E"]:
    """x with value[b] at position[b]."""
    here = jnp.arange(x.shape[1], dtype=jnp.int32)[None] == position[:, None]
    return jnp.where(here[..., None], value[:, None], x)


def join(
    old: Shaped[Array, "B L"],
    lengths: Int[Array, " B"],
    new: Shaped[Array, "B T"],
    size: int,
) -> Shaped[Array, "B _"]:
    """The first lengths[b] of `old`, then `new`, then 0, up to `size`."""
    position = jnp.arange(size, dtype=jnp.int32)[None]
    after = position - lengths[:, None]
    source = jnp.where(
        after < 0,
        # Indices that the other branch covers must still be inside.
        jnp.minimum(position, old.shape[1] - 1),
        old.shape[1] + jnp.minimum(after, new.shape[1] - 1),
    )
    joined = take(jnp.concatenate([old, new.astype(old.dtype)], axis=1), source)
    return jnp.where(after < new.shape[1], joined, jnp.zeros((), old.dtype))


def drop(
    x: Shaped[Array, "B T E"], count: int, where: Bool[Array, " B"]
) -> Shaped[Array, "B T E"]:
    """x without positions 1 to `count` where True; what follows moves up."""
    position = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    moved = jnp.minimum(position + count, x.shape[1] - 1)
    return take(x, jnp.where(where[:, None] & (position > 0), moved, position))


def mask(
    visible: Bool[Array, "B L"],
    start: Int[Array, " B"],
    lengths: Int[Array, " B"],
    size: int,
) -> Bool[Array, "B _"]:
    """The mask of a sequence of `size`, in which visible[b, 0] is at start[b].

    The first lengths[b] of `visible` count; all positions before and after are True.
    """
    position = jnp.arange(size, dtype=jnp.int32)[None] - start[:, None]
    inside = (position >= 0) & (position < lengths[:, None])
    found = take(visible, jnp.clip(position, 0, visible.shape[1] - 1))
    return jnp.where(inside, found, True)
