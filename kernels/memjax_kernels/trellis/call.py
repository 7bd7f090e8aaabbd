"""The way of a call of either door: checks, choice of code, chunks, the state after."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from memjax_kernels.common import arguments, chunks, implementations, partition
from memjax_kernels.trellis import (
    functions,
    pallas_gpu,
    pallas_tpu,
    reference,
    segment,
    xla,
)
from memjax_kernels.trellis.state import (
    Memories,
    TrellisState,
    empty_state,
)

# Chunk implementations, which `segment` describes.
CHUNKWISE: dict[str, Callable] = {
    "xla": xla.trellis_xla,
    "pallas_tpu": partition.chunkwise(pallas_tpu.trellis_tpu),
    "pallas_gpu": partition.chunkwise(pallas_gpu.trellis_gpu),
}


class Call(NamedTuple):
    """Arguments of `trellis`."""

    q: Array
    k: Array
    v: Array
    alpha: Array
    gamma: Array
    g: Array | None
    state: TrellisState | None
    reset: Array | None
    empty: TrellisState | None
    chunk_size: int
    phi: str
    activation: str


def run(call: Call, implementation: str | None) -> tuple[Any, Array]:
    """Checks and runs a call: (state, y)."""
    sizes = _check_tokens(call)
    empty = _check_states(call, sizes)
    wrong = _check_reset(call)
    shapes = jax.eval_shape(lambda: chunked(call, empty)[:2])
    unsupported = {
        "pallas_tpu": pallas_tpu.unsupported(*shapes),
        "pallas_gpu": pallas_gpu.unsupported(*shapes),
    }
    forms = CHUNKWISE | {"reference": _token_loop}
    form = implementations.choose("trellis", implementation, forms, unsupported)
    if implementation == "reference":
        after, y = _token_loop(call, empty)
    else:
        after, y = in_chunks(form, call, empty)
    return chunks.mask_with_nan(after, y, wrong)


def chunked(call: Call, empty):
    """Arguments of a chunk implementation: tokens, memories, and empty ones."""
    position = None if call.state is None else call.state.position
    tokens = segment.align(
        call.q,
        call.k,
        call.v,
        call.alpha,
        call.gamma,
        call.g,
        call.reset,
        call.chunk_size,
        position,
    )
    fresh = empty.memories.start
    before = Memories(fresh, fresh) if call.state is None else call.state.memories
    return tokens, before, None if call.reset is None else fresh


def in_chunks(form: Callable, call: Call, empty):
    """Runs a chunk implementation, which `segment` describes."""
    size, time = call.chunk_size, call.q.shape[1]
    arrays = chunked(call, empty)
    memories, y = form(*arrays, phi=call.phi, activation=call.activation)
    position = None if call.state is None else call.state.position
    start = empty.position if position is None else position
    after = type(empty).of(memories, (start + time) % size, size)
    return after, chunks.join(y, time, position)


def _token_loop(call: Call, empty):
    fresh = empty.memories.start
    empty = type(empty).of(Memories(fresh, fresh), empty.position, call.chunk_size)

    def one(state, token):
        q, k, v, alpha, gamma, g = token
        options = {"phi": call.phi, "activation": call.activation}
        return reference.step(q, k, v, alpha, gamma, g, state, **options)

    tokens = (call.q, call.k, call.v, call.alpha, call.gamma, call.g)
    state = empty if call.state is None else call.state
    return reference.scan_tokens(one, tokens, call.reset, state, empty)


def _check_tokens(call: Call) -> dict[str, int]:
    arguments.check_choice("phi", call.phi, functions.PHIS)
    arguments.check_choice("activation", call.activation, functions.ACTIVATIONS)
    if call.chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {call.chunk_size}")
    axes = {"q": "B T H K", "k": "B T H K", "v": "B T H V", "alpha": "B T H M"}
    for name in ("gamma", "g"):
        # A gate for each pass has one axis more.
        gate = getattr(call, name)
        own = gate is not None and gate.ndim == 4
        axes[name] = "B T H P" if own else "B T H"
    sizes = arguments.check_shapes(
        **{name: (getattr(call, name), letters) for name, letters in axes.items()}
    )
    if sizes.get("P", 2) != 2:
        raise ValueError(
            "gamma and g must have shape [B, T, H], or [B, T, H, 2] for a gate of "
            f"each pass, got {sizes['P']} as the last size"
        )
    largest = float(np.finfo(np.float32).max)
    arguments.check_range("gamma", call.gamma, 0.0, largest)
    arguments.check_range("g", call.g, -np.inf, 0.0)
    return sizes


def _check_states(call: Call, sizes: dict[str, int]):
    """Checks the given states; the empty one."""
    b, h, m, key, value = (sizes.get(letter, 0) for letter in "BHMKV")

    def default():
        return empty_state(b, h, m, key, value, call.chunk_size)

    like = jax.eval_shape(default)
    for name, highest in (("state", call.chunk_size - 1.0), ("empty", 0.0)):
        given = getattr(call, name)
        if given is not None:
            _check_state(name, given, like)
            arguments.check_range(f"{name}.position", given.position, 0.0, highest)
    return default() if call.empty is None else call.empty


def _check_state(name, given, like):
    if type(given) is not type(like):
        raise ValueError(
            f"{name} must be a {type(like).__name__}, got {type(given).__name__}"
        )
    if given.chunk_size != like.chunk_size:
        raise ValueError(
            f"{name} is of chunk_size {given.chunk_size}, not {like.chunk_size}: "
            "gradients are taken at a chunk's start, so chunks cannot change inside"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(like):
        field = path[0].name
        got = getattr(given, field)
        if got.shape != leaf.shape or got.dtype != leaf.dtype:
            raise ValueError(
                f"{name}.{field} must be {leaf.dtype}{list(leaf.shape)}, "
                f"got {got.dtype}{list(got.shape)}"
            )


def _check_reset(call: Call) -> Array | None:
    """Where the answer is undefined, [B, T]; refuses what is known to be wrong."""
    arguments.check_reset(call.reset, *call.q.shape[:2])
    if call.reset is None:
        return None
    position = None if call.state is None else call.state.position
    return chunks.misplaced_resets(call.reset, call.chunk_size, position)
