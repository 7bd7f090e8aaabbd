"""Inputs of a model: embeddings, positions, masks and packed documents."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PyTree

from memjax.checks import require_all, short
from memjax.mechanisms.config import MechanismConfig
from memjax.mechanisms.layers import documents
from memjax.models import ragged
from memjax.models.language_model import caches
from memjax.models.language_model.config import build_once
from memjax_kernels._src.stored_product import Stored, stored_rows


def rows_of(
    table: Float[Array, "N E"] | Stored, at: Int[Array, "B T"]
) -> Float[Array, "B T E"]:
    """Rows; NaN where there is none, as nothing can be raised inside jit."""
    if isinstance(table, Stored):
        return stored_rows(table, at)
    return table.at[at].get(
        mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
    )


def next_positions(
    taken: Int[Array, " B"], x: Float[Array, "B T D"], mask: Bool[Array, "B T"] | None
) -> tuple[Int[Array, " B"], Int[Array, "B T"]]:
    """Number of rows of OPT's table in use after new tokens, and their rows.

    Visible tokens take the next positions, from row 2 on; masked ones share row 1.
    """
    visible = jnp.ones(x.shape[:2], bool) if mask is None else mask
    counted = taken[:, None] + jnp.cumsum(visible, axis=1, dtype=jnp.int32)
    return counted[:, -1], jnp.where(visible, counted + 1, 1)


def check_embeddings(model: Any, state: PyTree, x: Array, mask: Array | None) -> None:
    """Raises ValueError on embeddings or a mask that a `LanguageModel` cannot read."""
    batch = x.shape[0] if state is None else jax.tree.leaves(state)[0].shape[0]
    if x.shape[0] != batch or x.shape[-1] != model.width:
        raise ValueError(
            f"x must have {batch} rows, as the state has, and {model.width} "
            f"channels, got {list(x.shape)}"
        )
    if mask is None:
        return
    if mask.shape != x.shape[:2] or mask.dtype != bool:
        raise ValueError(
            f"mask must be bool{list(x.shape[:2])}, as x is, got {mask.dtype}"
            f"{list(mask.shape)}"
        )
    for mechanism, block in zip(model.config.layers, model.blocks, strict=True):
        if block.functions.apply_masked is None:
            raise ValueError(
                "mask must be None with a mechanism that compresses what it reads, "
                f"got {type(mechanism).__name__} among the mechanisms"
            )


def memories_of(model: Any, state: PyTree) -> tuple[PyTree, ...]:
    """The memories of the layers; ValueError on a state of another model or sizes."""
    depth = len(model.blocks)
    learned = bool(model.config.architecture.learned_positions)
    ragged.check_parts(state, depth + learned)
    layers = [block.functions for block in model.blocks]
    names = [mechanism.name for mechanism in model.config.layers]
    caches.check_state(layers, names, state[:depth])
    return state[:depth]


def with_room(model: Any, state: PyTree, tokens: Int[Array, "B T"]) -> PyTree:
    """The state with slots for the tokens, where its lengths are known.

    Raises:
        ValueError: on tokens that the model with this state cannot read.
    """
    memories_of(model, state)
    leaves = jax.tree.leaves(state)
    shape = getattr(tokens, "shape", ())
    if len(shape) == 2 and not shape[1]:
        raise ValueError(f"tokens must be [B, T] with T >= 1, got {list(shape)}")
    if not shape:
        raise ValueError(f"tokens must be an array [B, T], got {short(tokens)}")
    if tokens.shape[:1] != leaves[0].shape[:1]:
        raise ValueError(
            f"tokens must be integers [B, T] with {leaves[0].shape[0]} rows, as "
            f"the state has, got {tokens.dtype}{list(tokens.shape)}"
        )
    if jnp.issubdtype(tokens.dtype, jnp.integer):
        ragged.check_known(tokens, model.vocab_size)
    if tokens.ndim < 2 or any(isinstance(leaf, Tracer) for leaf in leaves):
        return state
    return model.reserve(state, tokens.shape[1])


def no_state(model: Any, x: Array) -> PyTree:
    """An empty state for full sequences."""
    taken = [jnp.zeros(x.shape[0], jnp.int32)]
    learned = model.config.architecture.learned_positions
    return (*[None] * len(model.blocks), *(taken if learned else []))


def start_multiple(mechanisms: Sequence[MechanismConfig]) -> int:
    """Alignment of documents in packed rows, in tokens.

    Args:
        mechanisms: of the model, `ModelConfig.mechanisms`.

    Raises:
        ValueError: for a mechanism whose memory cannot be cleared inside a segment, or
            on anything else, by name.
    """
    require_all("mechanisms", mechanisms, MechanismConfig)
    chunks = []
    for mechanism in dict.fromkeys(mechanisms):
        packed = build_once(mechanism).packed
        if packed is None:
            raise ValueError(
                "packed rows need mechanisms whose memory can be cleared inside a "
                f"row, got {_named(mechanism)}; mode='chunked' and 'streamed' take any"
            )
        chunks.append(packed.chunk)
    return math.lcm(*chunks)


def check_starts(model: Any, x: Array, starts: Array) -> None:
    """Raises ValueError on starts that `LanguageModel.encode_packed` cannot read."""
    documents.check_starts(starts, x)
    multiple = start_multiple(model.config.mechanisms)
    if isinstance(starts, Tracer):
        return
    row, token = np.nonzero(np.asarray(starts))
    off = np.flatnonzero(token % multiple)
    if off.size:
        raise ValueError(
            f"starts must be at multiples of {multiple} tokens, as the mechanisms' "
            f"chunks are, got one in row {row[off[0]]} at token {token[off[0]]}"
        )


def _named(mechanism: MechanismConfig) -> str:
    """The mechanism's name, and the setting that prevents packing."""
    sinks = getattr(mechanism, "sinks", 0)
    return f"{type(mechanism).__name__}{f' with sinks={sinks}' if sinks else ''}"
