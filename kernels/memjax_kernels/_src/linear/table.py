"""The table of linear ops, and the code that all of them share.

A row holds an op's gates, the equation of a step, the form in chunks of matrix products
and the TPU kernels. `run` checks the arguments and chooses among the three and `jla`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from memjax_kernels._src.common import arguments, chunks, implementations
from memjax_kernels._src.common.groups import by_copies, by_groups
from memjax_kernels._src.common.packs import recurrence
from memjax_kernels._src.common.token_scan import scan_tokens
from memjax_kernels._src.linear import jla
from memjax_kernels._src.linear.chunks import channel_chunk_size, scan_groups

Implementation = Literal["reference", "xla", "pallas_tpu", "jla"]
F32 = jnp.float32


class LinearOp(NamedTuple):
    """A row.

    Attributes:
        name: of the op.
        gates: axes of each gate, in the order of the arguments.
        step: (*tokens, state) -> (state, y), the equation of one token.
        advance: the chunk form (state, *tokens, reset) -> (state, y) of a group of
            chunks: see `chunks.scan_groups`.
        kernels: the TPU form (*tokens, state, reset) -> (state, y).
        chunk_size: of the chunk form, where the caller does not choose one; None is
            `chunks.channel_chunk_size`.
        init_state: sizes in the order of `sizes` -> the empty memory.
        state: axes of each array of the state.
        unsupported: why the kernels cannot take the tokens; "" if they can.
    """

    name: str
    gates: Mapping[str, str]
    step: Callable[..., Any]
    advance: Callable[..., Any]
    kernels: Callable[..., Any]
    chunk_size: int | None
    init_state: Callable[..., Any]
    state: Mapping[str, str] = {"state": "B H K V"}
    sizes: str = "BHKV"
    unsupported: Callable[..., str] = recurrence.unsupported


class Decay(NamedTuple):
    """Learned numbers of log gates g by their logits z, with which an op takes z for g.

        g = -exp(log_rate) softplus(z + bias)

    Dao & Gu (2024), https://arxiv.org/abs/2405.21060, where log_rate is `A_log` and
    bias `dt_bias`. TPU kernels compute the gates of channels themselves, and return the
    gradients of z in its dtype.

    Attributes:
        log_rate: of each head, in [-87, 87]; inside jit the range is the caller's
            promise.
        bias: of each head, or of each of its channels, as g; finite.
    """

    log_rate: Float[Array, " H"]
    bias: Float[Array, " H"] | Float[Array, "H K"]

    def log_gates(self, z: Float[Array, "..."]) -> Float[Array, "..."]:
        """g of logits [..., H] or [..., H, K], float32.

        Raises:
            ValueError: on shapes that do not fit.
        """
        heads, axes = list(self.log_rate.shape), list(self.bias.shape)
        if heads != axes[:1] or list(z.shape[-len(axes) :]) != axes:
            raise ValueError(
                f"z must end with the axes of bias, and these begin with those of "
                f"log_rate, got {list(z.shape)}, {axes} and {heads}"
            )
        # A file's bfloat16 would round the exponential.
        rate = jnp.exp(self.log_rate.astype(F32))
        rate = rate.reshape(-1, *(1,) * (self.bias.ndim - 1))
        axes = tuple(range(z.ndim - self.bias.ndim))
        bias, rate = (jnp.expand_dims(x, axes) for x in (self.bias.astype(F32), rate))
        return -rate * jax.nn.softplus(z.astype(F32) + bias)


def run(
    op: LinearOp,
    tokens: tuple[Array | None, ...],
    state: PyTree,
    reset: Array | None,
    chunk_size: int | None,
    implementation: str | None,
    decay: Decay | None = None,
) -> tuple[PyTree, Array]:
    """Checks the arguments and runs an op over a segment.

    The docstring of the op has their shapes and the errors.
    """
    memories = (None,) * len(op.state)
    if state is not None:
        memories = (state,) if len(op.state) == 1 else state
    gates = dict(zip(op.gates, tokens[3:], strict=True))
    axes = (
        {"q": "B T G K", "k": "B T G K", "v": "B T H V"}
        | dict(op.gates)
        | {name: f"{a}?" if state is None else a for name, a in op.state.items()}
    )
    check_heads(*tokens[:3])
    arrays = (*tokens, *memories)
    if decay is not None:
        check_decay(decay)
        # g is the last gate.
        axes |= {"log_rate": "H", "bias": f"H{op.gates['g'].removeprefix('B T H')}"}
        arrays += tuple(decay)
        del gates["g"]
        gates |= decay._asdict()
    named = zip(axes.items(), arrays, strict=True)
    sizes = arguments.check_shapes(**{name: (x, a) for (name, a), x in named})
    for name, memory in zip(op.state, memories, strict=True):
        arguments.check_float32(name, memory)
    arguments.check_gates(**{n: x for n, x in gates.items() if n in arguments.RANGES})
    if decay is not None:
        arguments.check_range("g", tokens[-1], -math.inf, math.inf)
    arguments.check_mask("reset", reset, sizes["B"], sizes["T"])
    ways = sizes["H"] // sizes["G"]
    share = by_groups if {*op.gates.values()} <= {"B T H"} else by_copies
    reason, other_chunks = op.unsupported(*tokens), ""
    if chunk_size is not None:
        _check_power_of_two(chunk_size)
        if chunk_size != recurrence.CHUNK_SIZE:
            own = recurrence.CHUNK_SIZE
            other_chunks = f"its chunks have {own} tokens, not {chunk_size}"
    if state is None:
        state = op.init_state(*(sizes[letter] for letter in op.sizes))
    elif reset is not None:
        # A decay of 0 would leave NaN of a memory that is not finite.
        emptied = functools.partial(chunks.where, reset[:, 0], 0.0)
        state = jax.tree.map(emptied, state)
    size = chunk_size or op.chunk_size or channel_chunk_size()
    in_chunks = functools.partial(chunked, op, size)
    forms = {
        "xla": share(in_chunks, ways),
        "reference": share(functools.partial(reference, op), ways),
        "pallas_tpu": op.kernels,
    }
    unsupported = {"pallas_tpu": other_chunks or reason}
    if op.name in jla.KINDS:
        forms["jla"] = functools.partial(jla.run, op.name)
        if implementation == "jla":
            unsupported["jla"] = jla.unsupported(op.name, *tokens) or other_chunks
    given: tuple[Any, ...] = tokens
    if decay is not None:
        forms = _of_logits(forms, op, decay.bias.ndim > 1)
        given = *tokens[:-1], (tokens[-1], decay)
    form = implementations.choose(
        op.name,
        implementation,
        forms,
        unsupported,
        looped=state if chunk_size is None and _loop_is_fast(op, sizes) else None,
    )
    return form(*given, state, reset)


def _of_logits(forms, op, of_channels):
    """The forms with (logits, Decay) in the place of g.

    In each, so that no other's gates are differentiated.
    """

    def of(form):
        def run(*given):
            *tokens, (z, decay), state, reset = given
            return form(*tokens, decay.log_gates(z), state, reset)

        return run

    def kernels(*given):
        *tokens, (z, decay), state, reset = given
        return op.kernels(*tokens, z, state, reset, decay=decay)

    found = {name: of(form) for name, form in forms.items()}
    # Gates of heads stay XLA's: their counted cycles are negligible.
    return found | {"pallas_tpu": kernels} if of_channels else found


def _loop_is_fast(op, sizes):
    """Whether the token loop may be faster than chunks, by measurements on a CPU.

    Not for wide memories, nor for heads that share keys: their chunks are large
    products. Gates of channels make chunks slow.
    """
    if "B T H K" in op.gates.values():
        return True
    return sizes["G"] == sizes["H"] and sizes["K"] * sizes["V"] <= 64 * 64


def reference(op: LinearOp, *given: Any) -> tuple[Any, Any]:
    """A loop of steps over (*tokens, state, reset)."""
    *tokens, state, reset = given
    return scan_tokens(op.step, tuple(tokens), state, reset)


def chunked(op: LinearOp, chunk_size: int, *given: Any) -> tuple[Any, Any]:
    """Chunks of matrix products over (*tokens, state, reset)."""
    *tokens, state, reset = given
    # A gate of heads acts as a channel that all channels share.
    tokens = tuple(x[..., None] if x is not None and x.ndim == 3 else x for x in tokens)
    return scan_groups(op.advance, tokens, state, reset, chunk_size)


def check_decay(decay: Any) -> None:
    """Raises ValueError for anything but a `Decay`."""
    if not isinstance(decay, Decay):
        raise ValueError(f"decay must be a Decay, got {type(decay).__name__}")


def check_heads(q, k, v):
    """Raises ValueError unless the heads of q and k divide those of v."""
    if any(len(getattr(x, "shape", ())) != 4 for x in (q, k, v)):
        return
    groups, heads = q.shape[2], v.shape[2]
    if not groups or heads % groups or not heads:
        raise ValueError(
            f"v must have shape [B, T, H, V], H a multiple of the {groups} heads of q "
            f"and k, got {list(v.shape)}"
        )


def _check_power_of_two(chunk_size):
    integer = hasattr(chunk_size, "__index__") and not isinstance(chunk_size, bool)
    if not integer or chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size!r}")
