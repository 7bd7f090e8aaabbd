"""Time and memory of reading a long text, for memories and the backbone alone.

    python -m experiments.speed.memory_curve

HMT, M+, MemoryLLM, and the backbone with full attention and with sliding windows of the
state size of HMT and of M+ read texts of several lengths. Each text has a process of
its own, whose peak memory is measured. Parameters are random, which changes neither.
Full attention, whose state has all keys and values, reads up to `full_up_to` tokens.

What this does not show: a GPU or TPU. A CPU has one memory, so that the store of M+,
which belongs in the host's memory, costs no transfers.
"""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, PyTree

from experiments.lab.baselines import equal_window
from experiments.lab.measure import tree_bytes
from experiments.lab.results import (
    RESULTS,
    Rows,
    number,
    settings,
    show,
    table,
    thousands,
    write_report,
)
from memjax.checks import check_sizes
from memjax.models import HMTConfig, LanguageModel, MPlusConfig, add_hmt, add_mplus
from memjax.models.language_model import presets
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.offload import device_bytes

Kind = Literal[
    "HMT",
    "M+",
    "MemoryLLM",
    "sliding window",
    "sliding window, M+",
    "full attention",
]
#: As in the paper, M+'s widths of rows and keys in proportion to the tiny model.
HMT = HMTConfig(segment_length=64, num_sensory_tokens=8)
MPLUS = MPlusConfig(
    num_memory_tokens=64,
    chunk_size=128,
    pool_size=2_560,
    num_retrieved=640,
    store_size=38_400,
    store_memory="host",
    key_dim=8,
)
#: Without a store, and as many rows on the device.
MEMORYLLM = dataclasses.replace(MPLUS, num_retrieved=0, pool_size=4_288)
VOCABULARY = 4096


@dataclasses.dataclass(frozen=True)
class Config:
    """Lengths and models.

    Attributes:
        lengths: of the texts, in tokens; multiples of `piece`.
        piece: tokens of a call.
        full_up_to: longest text for full attention.
        kinds: of models.
        output: where .json goes, without the ending.
    """

    lengths: tuple[int, ...] = (2048, 4096, 8192, 16_384, 32_768, 65_536, 102_400)
    piece: int = 1024
    full_up_to: int = 32_768
    kinds: tuple[Kind, ...] = get_args(Kind)
    output: Path = RESULTS / "speed" / "memory_curve"

    def __post_init__(self) -> None:
        check_sizes(piece=self.piece)
        if not self.kinds or not self.lengths:
            raise ValueError("kinds and lengths must not be empty")
        # Of the segments of HMT and the chunks of M+.
        least = math.lcm(HMT.segment_length, MPLUS.chunk_size)
        for name, size in (("piece", least), ("lengths", self.piece)):
            given = self.lengths if name == "lengths" else (self.piece,)
            if any(n < 1 or n % size for n in given):
                raise ValueError(f"{name} must be multiples of {size}, got {given}")


def build(kind: Kind, length: int) -> Any:
    """A model with random parameters that can read so many tokens."""
    sizes = presets.TINY.model("attention", vocab_size=VOCABULARY)
    backbone = LanguageModel(sizes, key=jax.random.key(0))
    if kind == "full attention":
        return set_capacity(backbone, length)
    if kind in ("HMT", "sliding window"):
        backbone = set_capacity(backbone, length)
        memory = add_hmt(backbone, HMT, key=jax.random.key(1))
    else:
        memory_config = MEMORYLLM if kind == "MemoryLLM" else MPLUS
        memory = add_mplus(backbone, memory_config, key=jax.random.key(1))
    if "window" not in kind:
        return memory
    state = jax.eval_shape(lambda: memory.init_state(1))
    size = tree_bytes(state)
    if kind == "sliding window, M+":
        # Rows of the store, in the host's memory, do not count.
        size -= tree_bytes([layer.rows for layer in state.store.layers])
    return limit_attention(backbone, equal_window(backbone, size))


def measure(config: Config, kind: Kind, length: int) -> dict[str, Any]:
    """Reads one text, in a process of its own.

    `growth_mebibytes` is the growth of the peak while the text is read, after the
    parameters exist and the first call has compiled and run.
    """
    model = build(kind, length)
    read = _reader(model, injects=kind in ("M+", "MemoryLLM"))
    piece = jnp.asarray(np.zeros((1, config.piece), np.int32))
    jax.block_until_ready(read(model.init_state(1), piece))
    before = _peak()
    state = jax.block_until_ready(model.init_state(1))
    began = time.monotonic()
    for _ in range(length // config.piece):
        state = read(state, piece)
    jax.block_until_ready(state)
    return {
        "seconds": time.monotonic() - began,
        "peak_mebibytes": _peak(),
        "growth_mebibytes": _peak() - before,
        "state_bytes": tree_bytes(state),
        "device_bytes": device_bytes(state)["device"],
    }


def _reader(model: Any, injects: bool) -> Callable[[PyTree, Array], PyTree]:
    """A compiled call that reads tokens into a donated state."""
    graph, params = nnx.split(model)

    def call(params: PyTree, state: PyTree, tokens: Array) -> PyTree:
        merged = nnx.merge(graph, params)
        if injects:
            return merged.inject(state, tokens)
        return merged.features(state, tokens)[0]

    compiled = jax.jit(call, donate_argnums=1)
    return lambda state, tokens: compiled(params, state, tokens)


def _peak() -> float:
    """The most MiB in use so far: on the accelerator, or of this process."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"] / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main(config: Config) -> None:
    """Measures one process after the other, prints and writes."""
    rows: dict[str, list[dict[str, Any]]] = {}
    spawn = multiprocessing.get_context("spawn")
    for kind in config.kinds:
        for length in config.lengths:
            if kind == "full attention" and length > config.full_up_to:
                continue
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
                row = pool.submit(measure, config, kind, length).result()
            show(f"{kind}, {length:,} tokens", list(row), {"": list(row.values())})
            rows.setdefault(kind, []).append({"length": length} | row)
    question = "what do long inputs cost, beside the backbone alone?"
    results = {"jax_platform": jax.default_backend(), "models": rows}
    write_report(config.output, question, settings(config), results)


# Of the measured lengths; the files have more.
SHOWN = (2048, 16_384, 32_768, 102_400)
SHOWN_MPLUS = (2048, 32_768, 131_072)


@table("hmt/cost", "speed/memory_curve")
def memory_curve(result: dict[str, Any]) -> Rows:
    """Time, growth of memory and state by length."""
    for model, found in result["models"].items():
        for row in found:
            if row["length"] in SHOWN:
                yield {
                    "": model,
                    "tokens": thousands(row["length"]),
                    "seconds": number(row["seconds"], 1),
                    "µs a token": number(1e6 * row["seconds"] / row["length"], 0),
                    "MiB more while reading": number(row["growth_mebibytes"], 1),
                    "state, MB": number(row["state_bytes"] / 1e6, 2),
                }


@table("mplus/cost", "speed/memory_curve_mplus")
def memory_curve_mplus(result: dict[str, Any]) -> Rows:
    """M+ by the program of 224480a, `experiments/mplus/speed/cost.py`, with queries."""
    for kind, found in result["models"].items():
        for row in found:
            if row["length"] not in SHOWN_MPLUS:
                continue
            seconds = row.get("seconds", {})
            device = row.get("place_bytes", {}).get("device")
            yield {
                "": kind,
                "tokens": thousands(row["length"]),
                "MB on the device": number(None if device is None else device / 1e6, 1),
                "state, MB": number(row["state_bytes"]["total"] / 1e6, 1),
                "inject, s": number(seconds.get("inject"), 1),
                "query, s": number(seconds.get("query"), 2),
                "inject, GFLOP": number(row["operations"]["inject"] / 1e9, 0),
            }


if __name__ == "__main__":
    main(tyro.cli(Config))
