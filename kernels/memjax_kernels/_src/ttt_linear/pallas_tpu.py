"""TTT-linear on a TPU: the layer in training stays in fast memory (VMEM).

`packed` has the equations of a mini-batch, `common.packs` the kernels. The layer before
every mini-batch, saved for gradients, is named "ttt_linear_tpu_chunk_states", and the
reads "ttt_linear_tpu_reads".
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from memjax_kernels._src.common.chunks import Chunks
from memjax_kernels._src.common.packs.chunk_kernels import PackedOp
from memjax_kernels._src.ttt_linear import packed
from memjax_kernels._src.ttt_linear.xla import ttt_linear_xla

F32 = jnp.float32


def ttt_linear_tpu(
    x: Chunks,
    layer: tuple[Float[Array, "B H K V"], Float[Array, "B H V"]],
    empty: tuple[Float[Array, "B H K V"], Float[Array, "B H V"]],
    norm: tuple[Float[Array, "#B H V"], Float[Array, "#B H V"]],
    *,
    interpret: Any = False,
) -> tuple[tuple[Array, Array], Float[Array, "B n C H V"]]:
    """A chunk implementation; see `segment`; `interpret` as in `pallas_call`."""

    # The norm is part of the memory that nothing writes.
    def memory(layer):
        weights, *rows = layer[0], layer[1], *norm
        rows = [jnp.broadcast_to(x, layer[1].shape) for x in rows]
        return packed.Memory(weights, jnp.stack(rows, axis=2))

    after, y = _op.kernels(x, memory(layer), memory(empty), interpret=interpret)
    return (after.weights, after.rows[:, :, 0]), y


def _in_xla(x: Chunks, memory: packed.Memory, empty: packed.Memory, _: None):
    """The function of the kernels."""

    def layer(memory):
        return memory.weights, memory.rows[:, :, 0]

    norm = memory.rows[:, :, 1], memory.rows[:, :, 2]
    (weights, bias), y = ttt_linear_xla(x, layer(memory), layer(empty), norm)
    rows = jnp.stack([bias, *norm], axis=2)
    return packed.Memory(weights, rows), y


_op = PackedOp(
    "ttt_linear",
    packed.equations,
    _in_xla,
    lambda dtype: packed.Memory(dtype, F32),
)
unsupported = _op.unsupported
