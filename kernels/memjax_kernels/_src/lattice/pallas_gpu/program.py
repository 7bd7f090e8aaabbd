"""One chunk of Lattice in both GPU kernels; `chunk` has the equations.

`common.mosaic_programs` moves tokens and memories.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from memjax_kernels._src.common import mosaic
from memjax_kernels._src.common.mosaic import F32, ROWS
from memjax_kernels._src.common.mosaic_programs import Program
from memjax_kernels._src.lattice.pallas_gpu.inputs import ChunkInputs


def shared(x: ChunkInputs):
    """Scratch of both kernels."""
    m, width, dtype = x.q.shape[-1], x.v.shape[-1], x.q.dtype
    work = functools.partial(mosaic.tile, ROWS, dtype=dtype)
    return {
        "q": work(m),
        "k": work(m),
        "v": work(width),
        "gamma": mosaic.vectors(ROWS),
        "operand": mosaic.tile(m, width, dtype=dtype),
        "h": work(width),
        "write": work(m),
        "gram": work(ROWS),
        "ones": work(ROWS),
        "high": work(m),
        "low": work(m),
        "query": work(m),
    }


class Chunk(Program):
    """The arithmetic that both kernels share."""

    @property
    def variant(self):
        return self.rule.variant

    def tokens(self):
        return {"q": self.x.q, "k": self.x.k, "v": self.x.v}

    def vectors(self):
        return {"gamma": self.x.gamma}

    def prepare(self):
        """The matrix that sums over tokens."""
        self.store("ones", self.ordered(strictly=False).astype(F32))
        plgpu.commit_smem()

    def ordered(self, *, strictly: bool):
        """Bool[64, 64]: whether j comes before i, or is i."""
        i, j = (self.ops.iota((ROWS, ROWS), axis) for axis in (0, 1))
        return i > j if strictly else i >= j

    def masked(self, square, *, strictly=False):
        return jnp.where(self.ordered(strictly=strictly), square, 0.0)

    def slots(self, vector):
        return mosaic.along_rows(vector, self.scratch["q"].shape[-1])

    def summed(self, x, form):
        """Sums over tokens up to each ("nn"), or from each on ("tn")."""
        # These sums are terms of a difference, in which rounded operands would cancel.
        self.store("high", x)
        # So x is two operands, whose sum keeps the digits that one would drop.
        self.store("low", x - self.matrix("high"))
        plgpu.commit_smem()
        ones, high, low = (self.scratch[name] for name in ("ones", "high", "low"))
        return self.ops.total((ones, high, form), (ones, low, form))

    def residuals(self):
        """Puts h, write, gram in place; returns W, P, before and |h|^2."""
        ops, scratch = self.ops, self.scratch
        operand, h = scratch["operand"], scratch["h"]
        match self.variant:
            case "dec":
                rows = ops.product(scratch["k"], operand, "nn") - self.matrix("v")
            case "enc":
                rows = self.matrix("v")
            case _:
                rows = -self.matrix("v")
        squares = jnp.sum(rows * rows, axis=1)
        self.store("h", rows)
        plgpu.commit_smem()
        along, gram = ops.products((h, operand, "nt"), (h, h, "nt"))
        self.store("gram", self.masked(gram, strictly=True))
        write = self.slots(self.gamma()) * self.target(along)
        self.store("write", write)
        plgpu.commit_smem()
        before = ops.product(scratch["gram"], scratch["write"], "nn")
        return write, along, before, squares

    def gamma(self):
        return self.ops.row_vector(self.scratch["gamma"])

    def target(self, along):
        """c, the write of a slot."""
        k = self.matrix("k")
        return along - k if self.variant == "enc" else k

    def sums(self, write, along, before, squares):
        """cwp and n2 of every token and slot."""
        taken = self.summed(write * along, "nn")
        added = 2.0 * write * before + write * write * self.slots(squares)
        return taken, self.summed(added, "nn") - taken * taken


def inverse_norm(size):
    """rho of n2, a difference that may round below 0."""
    return lax.rsqrt(1.0 + jnp.maximum(size, 0.0))


def l2_normalize(rows):
    """Rows divided by their norms, and one over those; a row of zeros stays."""
    squares = jnp.sum(rows * rows, axis=1)
    # Clamped inside as well: rsqrt(0) is inf even where it is not chosen.
    scale = jnp.where(squares > 0.0, lax.rsqrt(jnp.maximum(squares, 1e-37)), 0.0)
    scale = mosaic.along_rows(scale, rows.shape[1])
    return rows * scale, scale


#: Sums over the width, spread over it.
across_width = functools.partial(mosaic.over_slots, jnp.sum)
