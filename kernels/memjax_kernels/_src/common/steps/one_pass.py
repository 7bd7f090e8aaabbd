"""A decoding step on a TPU as one kernel, which reads and writes the memory once.

A step is bound by the bandwidth of its memory, and XLA makes a pass over it for each
product with a vector. A kernel holds the memories of
some heads of a batch element in registers, and runs the step's own code on one head
after the other. Products with a vector are sums over rows or columns there, in float32:
the matrix unit would have to be loaded with a memory for every one of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from memjax_kernels._src.common import (
    arguments,
    gradients,
    implementations,
    jaxprs,
    partition,
    varying,
)
from memjax_kernels._src.common.packs import tuned
from memjax_kernels._src.common.packs.blocks import heads_of_rows

F32 = jnp.float32
SUBLANES = 8
# Gates of all heads, which are stored in scalar memory.
MOST_GATES = 2**14


def on_tpu(step: Callable[..., Any]) -> Callable[..., Any]:
    """The same step, in one kernel where it is lowered for a TPU.

    Args:
        step: (q, *tokens, state, **options) -> (state, y), for arrays [B, H, M, V] and
            [B, H, D], and numbers [B, H]. Batch elements and heads are independent. y
            is [B, H, V], in the dtype of a token; the state's arrays are float32.
            Options are hashable.

    Returns:
        The step; what it wraps is in `__wrapped__`. It raises ValueError on arrays that
        do not fit each other.
    """

    # Equal layers have one trace of the kernel.
    @functools.partial(jax.jit, static_argnums=0)
    def in_kernel(options, *given):
        plain = functools.partial(step, **dict(options))
        return gradients.like(plain, functools.partial(step_tpu, plain))(*given)

    axes = arguments.token_axes(step)

    @functools.wraps(step)
    def chosen(*given, **options):
        arguments.check_step(axes, given)
        form = implementations.choose(
            getattr(step, "__name__", "step"),
            None,
            {
                "xla": functools.partial(step, **options),
                "pallas_tpu": functools.partial(in_kernel, tuple(options.items())),
            },
            {"pallas_tpu": unsupported(*given)},
        )
        return form(*given)

    def at_slots(options, slots, *given):
        plain = functools.partial(step, **options)
        kernel = functools.partial(step_tpu, plain, slotted=True)
        by_xla = functools.partial(gathered, plain)
        return gradients.like(by_xla, kernel)(*given, slots)

    _AT_SLOTS[chosen] = at_slots
    return chosen


# Of a step: (options, slots, *tokens, pool) -> (pool, y), by the kernel.
_AT_SLOTS: dict[Callable[..., Any], Callable[..., Any]] = {}


def at_slots(step: Callable[..., Any]) -> Callable[..., Any] | None:
    """The kernel of a step (options, slots, *tokens, pool); None if it has none.

    Every slot must be there, and no other sequence's.
    """
    return _AT_SLOTS.get(step)


def gathered(step: Callable[..., Any], *given: Any) -> Any:
    """(*tokens, pool, slots) by XLA; a slot below 0 is not read or written."""
    *tokens, pool, slots = given
    at = jnp.maximum(slots, 0)
    state, y = step(*tokens, jax.tree.map(lambda x: x[at], pool))

    # Writes out of range are dropped.
    def put(x, new):
        place = jnp.where(slots < 0, x.shape[0], slots)
        return x.at[place].set(new, mode="drop")

    there = (slots >= 0).reshape(-1, *[1] * (y.ndim - 1))
    return jax.tree.map(put, pool, state), jnp.where(there, y, jnp.nan)


def unsupported(*given: Any) -> str:
    """Why the kernel cannot take these arguments on any TPU; "" if it can."""
    leaves = jax.tree.leaves(given)
    batch, heads = leaves[0].shape[:2]
    memories = [x for x in leaves if x.ndim == 4]
    if batch * heads > MOST_GATES:
        return f"{batch} x {heads} heads are more than {MOST_GATES}"
    if any(x.dtype != F32 for x in memories):
        return "a memory is not float32"
    if any(n % SUBLANES for x in memories for n in x.shape[2:]):
        return f"a memory's rows or columns are not a multiple of {SUBLANES}"
    if not _heads_of_a_block(heads, memories):
        return f"no number of {heads} heads fits {tuned.SIZES.step.bytes} bytes"
    return ""


def step_tpu(
    step: Callable[..., Any],
    *given: Any,
    slotted: bool = False,
    interpret: Any = False,
) -> Any:
    """As `step(*given)`, by the kernel; `interpret` runs where there is no TPU.

    `slotted`: the last argument has the places of the state's batch elements, which
    then has more of them than there are tokens.
    """
    slots = given[-1] if slotted else None
    given = given[:-1] if slotted else given
    leaves, tree = jax.tree.flatten(given)
    # Numbers of the next state take a few operations, and XLA leaves out all others.
    state, y = gathered(step, *given, slots) if slotted else step(*given)
    kinds = [_KINDS[x.ndim] for x in leaves]
    # Tokens as [B, 1, 1, H, ...], which `partition` divides.
    tokens = [x[:, None, None] for x in leaves if x.ndim < 4]
    memories = [x for x in leaves if x.ndim == 4]
    form = functools.partial(
        _on_device, step=step, tree=tree, kinds=kinds, slots=slots, interpret=interpret
    )
    # A pool is not divided.
    share = form if slotted else partition.chunkwise(form)
    memories, (read, *rows) = share(tokens, memories)
    found = {4: iter(memories), 3: (row[:, 0, 0] for row in rows)}
    after = jax.tree.map(lambda x: next(found[x.ndim]) if x.ndim > 2 else x, state)
    return after, read[:, 0, 0].astype(y.dtype)


# Arguments of a step by the number of their axes.
_KINDS = {4: "memory", 3: "row", 2: "gate"}


def _on_device(tokens, memories, *, step, tree, kinds, slots, interpret):
    """On a device's share: memories, and [y, *rows of the state], [B, 1, 1, H, V]."""
    batch, _, _, heads, _ = tokens[0].shape
    together = _heads_of_a_block(heads, memories)
    rest, stored = iter(tokens), iter(memories)

    def as_given(kind):
        return next(stored) if kind == "memory" else next(rest)[:, 0, 0]

    given = [as_given(kind) for kind in kinds]
    if not together:
        # Some of all heads fit a block, but no part of this device's share of them.
        state, y = step(*jax.tree.unflatten(tree, given))
        return _apart([*jax.tree.leaves(state), y])
    placed = [_placed(kind, x, together) for kind, x in zip(kinds, given, strict=True)]
    arguments, specs, units = zip(*placed, strict=True)
    closed = jax.make_jaxpr(lambda *x: step(*jax.tree.unflatten(tree, x)))(*units)
    *after, y = closed.out_avals
    written = [i for i, x in enumerate(after) if x.ndim > 2]
    # The state comes last, and is written where it was read.
    read = [len(kinds) - len(after) + i for i in written]
    row = pl.BlockSpec((1, together, y.shape[-1]), lambda b, h, *_: (b, h, 0))
    # Before the blocks of a program are known, where there are slots.
    first = () if slots is None else (slots,)
    shapes = [(batch, heads, y.shape[-1]), *(arguments[i].shape for i in read)]
    y, *after = pl.pallas_call(
        functools.partial(
            _kernel,
            closed=closed,
            kinds=kinds,
            written=written,
            heads=heads,
            slotted=bool(first),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(first),
            grid=(batch, heads // together),
            in_specs=specs,
            out_specs=[row, *(specs[i] for i in read)],
        ),
        out_shape=[varying.like(tokens[0], shape, F32) for shape in shapes],
        input_output_aliases={len(first) + i: 1 + n for n, i in enumerate(read)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel")
        ),
        interpret=interpret,
        name="step_in_one_pass",
    )(*first, *varying.vary_alike(arguments))
    return _apart([*after, y])


def _apart(results):
    """Of leaves of a state and y: the memories, and [y, *rows] as tokens."""
    *after, y = results
    rows = [y, *(x for x in after if x.ndim == 3)]
    return [x for x in after if x.ndim == 4], [x[:, None, None] for x in rows]


def _placed(kind, x, together):
    """An argument, its block, and the step's view of one head of it."""
    shape, x = x.shape[2:], x.astype(F32)
    unit = jax.ShapeDtypeStruct((1, 1, *shape), F32)
    if kind == "gate":
        # One number after the other: more axes would be padded. In a row, of which
        # `vmap` makes blocks that Mosaic takes.
        return x.reshape(1, -1), pl.BlockSpec(memory_space=pltpu.SMEM), unit
    rest = (0,) * len(shape)

    def at(b, h, *slots):
        return slots[0][b] if slots and kind == "memory" else b, h, *rest

    return x, pl.BlockSpec((1, together, *shape), at), unit


def _kernel(*refs, closed, kinds, written, heads, slotted):
    """The step of a block of heads of a batch element."""
    refs = refs[slotted:]
    given, read, *outputs = refs[: len(kinds)], *refs[len(kinds) :]
    together = read.shape[1]
    first = pl.program_id(0) * heads + pl.program_id(1) * together

    def of_head(h, i):
        ref = given[i]
        if kinds[i] == "gate":
            return jnp.full((1, 1), ref[0, first + h])
        return ref[:, pl.ds(h, 1)]

    def one_head(h, _):
        units = [of_head(h, i) for i in range(len(kinds))]
        *after, y = jaxprs.evaluate(closed, units, _REPLACED)
        for output, i in zip(outputs, written, strict=True):
            output[:, pl.ds(h, 1)] = after[i]
        read[:, pl.ds(h, 1)] = y.astype(F32)
        return _

    # Traced once, and written out for each head when it is lowered.
    jax.lax.fori_loop(0, together, one_head, None, unroll=True)


def _product(given, operands):
    """A product of a memory with a vector, or of two vectors, by the vector unit."""
    x, y = operands
    (of_x, of_y), (batch, _) = given["dimension_numbers"]
    if y.ndim > x.ndim:
        x, y, of_x = y, x, of_y
    if not of_x:
        return x[..., :, None] * y[..., None, :]
    (axis,) = of_x
    wide = jax.lax.broadcast_in_dim(y, x.shape, (*batch, axis))
    return (x * wide).sum(axis=axis)


_REPLACED: dict[str, jaxprs.Replacement] = {"dot_general": _product}


def _heads_of_a_block(heads, memories):
    return heads_of_rows(heads, memories, tuned.SIZES.step)
