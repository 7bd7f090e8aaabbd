"""Time and memory of reading a long text, for memories and the backbone alone.

    python -m experiments.speed.memory_curve

HMT, and the backbone with full attention and with a sliding window of the state size of
HMT read texts of several lengths. Each text has a process of
its own, whose peak memory is measured. Parameters are random, which changes neither.
Full attention, whose state has all keys and values, reads shorter ones alone.

What this does not show: a GPU or TPU.
"""

import concurrent.futures
import functools
import itertools
import multiprocessing
import resource
import time
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from experiments.lab.baselines import equal_window
from experiments.lab.measure import tree_bytes
from experiments.lab.results import RESULTS, Rows, number, show, table, write_report
from memjax.models import HMTConfig, LanguageModel, add_hmt
from memjax.models.language_model import presets
from memjax.models.language_model.windowed import limit_attention, set_capacity

Kind = Literal["HMT", "sliding window", "full attention"]
SEGMENT = 64
#: Tokens of the texts, of the longest for full attention, and of a call.
LENGTHS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 102_400)
FULL_UP_TO, PIECE = 32_768, 1024


def build(kind: Kind, length: int) -> Any:
    """A model with random parameters that can read so many tokens."""
    sizes = presets.TINY.model("attention", vocab_size=4096)
    backbone = LanguageModel(sizes, key=jax.random.key(0))
    backbone = set_capacity(backbone, length)
    if kind == "full attention":
        return backbone
    config = HMTConfig(segment_length=SEGMENT, num_sensory_tokens=8)
    memory = add_hmt(backbone, config, key=jax.random.key(1))
    if kind == "HMT":
        return memory
    size = tree_bytes(jax.eval_shape(lambda: memory.init_state(1)))
    return limit_attention(backbone, equal_window(backbone, size))


def measure(kind: Kind, length: int) -> dict[str, Any]:
    """Reads one text, in a process of its own.

    `growth_mebibytes` is the growth of the peak while the text is read, after the
    parameters exist and the first call has compiled and run.
    """
    model = build(kind, length)
    graph, params = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=0)
    def read(state: PyTree, params: PyTree, tokens: Array) -> PyTree:
        return nnx.merge(graph, params).features(state, tokens)[0]

    piece = jnp.zeros((1, PIECE), jnp.int32)
    jax.block_until_ready(read(model.init_state(1), params, piece))
    before = _peak()
    state = jax.block_until_ready(model.init_state(1))
    began = time.monotonic()
    for _ in range(length // PIECE):
        state = read(state, params, piece)
    jax.block_until_ready(state)
    return {
        "seconds": time.monotonic() - began,
        "peak_mebibytes": _peak(),
        "growth_mebibytes": _peak() - before,
        "state_bytes": tree_bytes(state),
    }


def _peak() -> float:
    """The most MiB of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Measures one process after the other, prints and writes."""
    rows: dict[str, list[dict[str, Any]]] = {}
    spawn = multiprocessing.get_context("spawn")
    for kind, length in itertools.product(get_args(Kind), LENGTHS):
        if kind == "full attention" and length > FULL_UP_TO:
            continue
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
            row = pool.submit(measure, kind, length).result()
        show(f"{kind}, {length:,} tokens", list(row), {"": list(row.values())})
        rows.setdefault(kind, []).append({"length": length} | row)
    question = "what do long inputs cost, beside the backbone alone?"
    used = {"segment": SEGMENT, "piece": PIECE}
    write_report(RESULTS / "speed" / "memory_curve", question, used, {"models": rows})


# Of the measured lengths; the file has more.
SHOWN = (2048, 16_384, 32_768, 102_400)


@table("hmt/cost", "speed/memory_curve")
def memory_curve(result: dict[str, Any]) -> Rows:
    """Time, growth of memory and state by length."""
    for model, found in result["models"].items():
        for row in found:
            if row["length"] in SHOWN:
                yield {
                    "": model,
                    "tokens": number(row["length"], 0),
                    "seconds": number(row["seconds"], 1),
                    "µs a token": number(1e6 * row["seconds"] / row["length"], 0),
                    "MiB more while reading": number(row["growth_mebibytes"], 1),
                    "state, MB": number(row["state_bytes"] / 1e6, 2),
                }


if __name__ == "__main__":
    main()
