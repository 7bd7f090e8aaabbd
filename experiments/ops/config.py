"""Settings of the benchmark of the ops."""

import dataclasses
import pathlib

import jax

from experiments.lab.results import RESULTS
from experiments.ops import baselines, cases

# Shapes of the papers' and flash-linear-attention's benchmarks; then one for a CPU.
SHAPES = ((8, 2048, 12, 64), (2, 16384, 16, 128), (1, 65536, 12, 64))
CPU_SHAPES = ((1, 4096, 4, 64),)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that changes the result.

    Attributes:
        ops: which ops.
        beside: ops that are timed beside flash-linear-attention, where it is installed.
            It tunes its kernels when they first run, minutes for each.
        shapes: (batch, tokens, heads, width); empty is `SHAPES`, on a CPU `CPU_SHAPES`.
        lengths: tokens at which growth is timed, batch and heads of the first shape.
        chunk_size: of TTT-linear, Trellis and Lattice.
        dtype: of the inputs; None is bfloat16, on a CPU float32.
        longest_loop: the token loop is timed up to this many tokens.
        longest_attention: attention is timed up to this many tokens; None is 65,536,
            on a CPU 8,192, where it holds all scores.
        repeats: timings of each, at least 1; None is 20, on a CPU 5.
        output: where .json and .png go, without the ending.
    """

    ops: tuple[str, ...] = tuple(cases.ARGUMENTS)
    beside: tuple[str, ...] = tuple(baselines.BASELINES)
    shapes: tuple[tuple[int, int, int, int], ...] = ()
    lengths: tuple[int, ...] = (1024, 4096, 8192, 16384)
    chunk_size: int = 64
    dtype: str | None = None
    longest_loop: int = 4096
    longest_attention: int | None = None
    repeats: int | None = None
    output: pathlib.Path = RESULTS / "ops" / "kernels"

    def __post_init__(self) -> None:
        """Refuses what cannot be timed."""
        unknown = set(self.ops) - set(cases.ARGUMENTS)
        if unknown:
            raise ValueError(f"ops must be of {tuple(cases.ARGUMENTS)}, got {unknown}")
        unknown = set(self.beside) - set(baselines.BASELINES)
        if unknown:
            known = tuple(baselines.BASELINES)
            raise ValueError(f"beside must be of {known}, got {unknown}")
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")


def settle(config: Config) -> Config:
    """Fills in what depends on the device."""
    cpu = jax.default_backend() == "cpu"
    return dataclasses.replace(
        config,
        shapes=config.shapes or (CPU_SHAPES if cpu else SHAPES),
        dtype=config.dtype or ("float32" if cpu else "bfloat16"),
        longest_attention=config.longest_attention or (8192 if cpu else 65536),
        repeats=config.repeats or (5 if cpu else 20),
    )
