"""Recurrences S' = f(S, chunk) on a TPU, by the kernels of `chunkwise`.

An op brings the equations of a chunk and of its gradient. A reset is a gate that
forgets all. Value heads may share the queries and keys of a key head: programs read
them once, and sum their gradients.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common import chunks, partition
from memjax_kernels._src.common.arguments import RANGES
from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.gate_sums import FORGETS_ALL
from memjax_kernels._src.common.groups import by_copies, by_groups
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.common.packs.blocks import LANES, misfit, repeat_heads
from memjax_kernels._src.common.packs.chunk_kernels import kernels_by
from memjax_kernels._src.common.packs.layout import Layout, group_sizes, packings
from memjax_kernels._src.common.packs.recurrence_chunk import (
    Op,
    equations,
    of_logits,
)

F32 = jnp.float32
CHUNK_SIZE = 64


class Packing(NamedTuple):
    """Packs of a program, heads of a pack, and `ways` of `Layout`."""

    group: int
    heads: int
    ways: int


def unsupported(q: Any, k: Any, v: Any, *_: Any) -> str:
    """Why the kernels cannot take these arguments on any TPU; "" if they can."""
    if reason := misfit(q, k, v):
        return reason
    if q.shape[1] < CHUNK_SIZE:
        return f"{q.shape[1]} tokens are less than a chunk of {CHUNK_SIZE}"
    if not packing_of(q, v):
        return (
            f"no number of {v.shape[2]} heads fills {LANES} lanes with keys of "
            f"{q.shape[3]} and values of {v.shape[3]}, and fits in VMEM"
        )
    return ""


def recur(
    op: Op,
    names: Sequence[str],
    q: Float[Array, "B T G K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T H V"],
    *given: Array | None,
    decay: Any = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B T H V"]]:
    """An op over T tokens.

    `names` are of its gates, [B, T, H] or [B, T, H, D]: `g`, without which there is no
    decay, `beta`, `erase` and `write`. `given` are these, the state and `reset`. With
    `decay`, of `bias` [H, K] and `log_rate` [H], `g` are logits, of any dtype.
    """
    *gates, state, reset = given
    named: dict[str, Any] = dict(zip(names, gates, strict=True))
    time, g, beta = q.shape[1], named.get("g"), named.get("beta")
    rates = [_loadable(named[name]) for name in ("erase", "write") if name in named]
    g = jnp.zeros(v.shape[:3], F32) if g is None else g
    g = g.astype(F32) if decay is None else _loadable(g)
    if reset is not None:
        at = reset.reshape(*reset.shape, *(1,) * (g.ndim - 2))
        g = jnp.where(at, FORGETS_ALL if decay is None else jnp.inf, g)
    if decay is not None:
        # Chunks are filled with tokens that forget nothing.
        rest = [(0, 0), (0, -time % CHUNK_SIZE), (0, 0), (0, 0)]
        g = jnp.pad(g, rest, constant_values=-jnp.inf)
        state = state, _rows(decay, len(q))
    # Devices that divide value heads have the key heads of theirs.
    devices = partition.head_ways(v.shape[2], q, k, v, state)
    q, k = (repeat_heads(x, devices // math.gcd(devices, q.shape[2])) for x in (q, k))
    # Gates of channels are as tokens are, those of heads columns.
    of_channels = g.ndim == v.ndim
    channels, columns = ((g, *rates), []) if of_channels else ((), [g])
    columns += [] if beta is None else [beta.astype(F32)]
    columns = (jnp.stack(columns, axis=-1),) if columns else ()
    # Tokens of zeros, gate and rate included, leave the memory as it is.
    x = Chunks((q, k, v, *channels), columns, None, None)
    x = jax.tree.map(lambda x: chunks.split(x, CHUNK_SIZE, None), x)
    form = partition.chunkwise(_kernels(op, decay is not None))
    state, y = form(x, state, None, interpret=interpret)
    return state if decay is None else state[0], chunks.join(y, time, None)


def _loadable(x: Array) -> Array:
    """Kernels load no float16."""
    return x if x.dtype == jnp.bfloat16 else x.astype(F32)


def _rows(decay: Any, batch: int) -> Float[Array, "B H 2 K"]:
    """Bias and log_rate of all channels, in range."""
    # First to float32, so that gradients of channels are summed in it.
    bias, rate = decay.bias.astype(F32), decay.log_rate.astype(F32)[:, None]
    # Traced numbers may be out of range: resets, infinite logits, would be NaN.
    bias, rate = jnp.clip(bias, *RANGES["bias"]), jnp.clip(rate, *RANGES["log_rate"])
    rows = jnp.stack([bias, jnp.broadcast_to(rate, bias.shape)], axis=1)
    return jnp.broadcast_to(rows[None], (batch, *rows.shape))


def _layout(x: Chunks) -> Layout | None:
    packing = packing_of(x.tokens[0], x.tokens[2])
    if packing is None:
        return None
    return Layout(
        rows=1,
        size=CHUNK_SIZE,
        passes=(sum(gate.shape[-1] for gate in x.gates),),
        opens=False,
        resets=False,
        **packing._asdict(),
    )


@functools.cache
def _kernels(op: Op, by_logits: bool) -> Any:
    brought = of_logits(equations(op)) if by_logits else equations(op)

    def residuals(dtype):
        kept = F32 if op.exact else dtype
        return (kept, F32) if by_logits else kept

    form = functools.partial(_in_xla, op)
    return kernels_by(op.name, _layout, lambda *_: brought, form, residuals)


def packing_of(q: Any, v: Any) -> Packing | None:
    """The packing of as few heads as fill the lanes, and of as many packs as fit.

    Of a key head's value heads as many share it as can; the others need copies. Shapes
    alone will do.
    """
    number, widths = v.shape[-2], (q.shape[-1], v.shape[-1])
    sizes = tuned.SIZES.recurrence
    each = sizes.head_bytes(CHUNK_SIZE, *widths)
    fitting = packings(sizes, number, CHUNK_SIZE, widths)
    all_ways = number // q.shape[-2]
    for ways in range(all_ways, 0, -1):
        if all_ways % ways or not fitting:
            continue
        heads = fitting[0]
        for group in group_sizes(sizes, number // heads, heads * each):
            of_program = group * heads
            block = max(1, of_program // ways)
            divides = not (of_program % ways and ways % of_program)
            whole = block * widths[0] % LANES == 0 or block * ways == number
            if divides and whole:
                return Packing(group, heads, ways)
    return None


def _in_xla(op: Op, x: Chunks, state: Any, *_: Any):
    """The function of the forward kernel."""

    def form(*given):
        return op.in_xla(*given[:-1], chunk_size=CHUNK_SIZE)

    tokens, gates = jax.tree.map(
        lambda y: y.reshape(y.shape[0], -1, *y.shape[3:]), x[:2]
    )
    q, k, v, *channels = tokens
    memory, rows = state if isinstance(state, tuple) else (state, None)
    if rows is not None:
        logits, *rates = channels
        bias, log_rate = jnp.unstack(rows[:, None], axis=3)
        z = logits.astype(F32) + bias
        # Of infinite gates the gradient of rates would be NaN.
        forgets = z == jnp.inf
        # The kernels' sum for it would have no second derivative at 0.
        pace = jax.nn.softplus(jnp.where(forgets, 0.0, z))
        g = jnp.where(forgets, FORGETS_ALL, -jnp.exp(log_rate) * pace)
        channels = [g, *rates]
    columns = [y for gate in gates for y in jnp.unstack(gate, axis=-1)]
    g, *rates = channels or [columns.pop(0)]
    beta = columns[0] if columns else None
    share = by_copies if channels else by_groups
    memory, y = share(form, v.shape[2] // q.shape[2])(
        q, k, v, g, beta, *rates, memory, None
    )
    return memory if rows is None else (memory, rows), y.reshape(x.tokens[2].shape)
