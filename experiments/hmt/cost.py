"""What do long inputs cost: memory and time, beside the backbone alone?

    python -m experiments.hmt.cost

HMT, the backbone with a sliding window of equal memory and with full attention read
texts of several lengths, each in a process of its own, whose peak memory is measured.
Values of parameters do not matter here: they are random. Full attention, which keeps
all keys and values, reads lengths up to `full_up_to`.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from experiments.hmt import scores
from experiments.lab.results import RESULTS, settings, show, write_report
from memjax.models import HMTConfig, LanguageModel, ModelConfig, add_hmt
from memjax.models.language_model import presets
from memjax.models.language_model.windowed import limit_attention, set_capacity

Kind = Literal["HMT", "sliding window", "full attention"]
KINDS: tuple[Kind, ...] = ("HMT", "sliding window", "full attention")


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured.

    Attributes:
        size: "tiny", or the sizes of "smollm2" (135M).
        segment: L of HMT; 0 is 64 for the tiny model, 1,024 for the other.
        lengths: of the texts, in tokens; cut to whole segments.
        full_up_to: longest text for full attention.
        kinds: of models.
        output: where .json goes, without the ending.
    """

    size: Literal["tiny", "smollm2"] = "tiny"
    segment: int = 0
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16_384, 32_768, 65_536, 102_400)
    full_up_to: int = 32_768
    kinds: tuple[Kind, ...] = KINDS
    output: Path = RESULTS / "hmt" / "cost"

    def __post_init__(self):
        if self.segment < 0:
            raise ValueError(f"segment must be >= 0, got {self.segment}")
        if not self.lengths or min(self.lengths) < self.memory.segment_length:
            raise ValueError(
                f"lengths must be at least a segment, {self.memory.segment_length}, "
                f"got {self.lengths}"
            )

    @property
    def memory(self) -> HMTConfig:
        """An eighth of a segment is sensory memory, as in the paper's of 256."""
        segment = self.segment or (64 if self.size == "tiny" else 1024)
        return HMTConfig(
            segment_length=segment, num_sensory_tokens=min(32, segment // 8)
        )

    @property
    def backbone(self) -> ModelConfig:
        """Attention in every layer."""
        if self.size == "tiny":
            return presets.TINY.model("attention", vocab_size=4096)
        smollm2 = dataclasses.replace(
            presets.TINY,
            num_layers=30,
            model_dim=576,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            hidden_dim=1536,
            capacity=8192,
        )
        return smollm2.model("attention", vocab_size=49_152)


def main(config: Config) -> None:
    """Measures one process after the other, prints and writes."""
    rows: dict[str, list[dict]] = {}
    spawn = multiprocessing.get_context("spawn")
    for kind in config.kinds:
        for length in config.lengths:
            if kind == "full attention" and length > config.full_up_to:
                continue
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
                row = pool.submit(measure, config, kind, length).result()
            print(f"{kind}, {length:,} tokens: {row}", flush=True)
            rows.setdefault(kind, []).append({"length": length} | row)
    write_report(
        config.output,
        "what do long inputs cost, beside the backbone alone?",
        settings(config),
        {
            "jax_platform": jax.default_backend(),
            "segment": config.memory.segment_length,
            "models": rows,
        },
    )
    for quantity in ("seconds", "peak_mebibytes", "state_bytes"):
        at = {
            kind: {row["length"]: row[quantity] for row in found}
            for kind, found in rows.items()
        }
        show(
            quantity,
            [f"{length:,}" for length in config.lengths],
            {
                kind: [values.get(length, float("nan")) for length in config.lengths]
                for kind, values in at.items()
            },
        )


def measure(config: Config, kind: Kind, length: int) -> dict[str, Any]:
    """Reads one text; run in a process of its own, whose peak it reports.

    `growth_mebibytes` is what the peak grew by while the text was read, after the
    parameters were there and the first call had compiled and run.
    """
    count = length // config.memory.segment_length
    length = count * config.memory.segment_length
    model = build(config, kind, length)
    graph, params = nnx.split(model)
    read = jax.jit(
        lambda params, state, tokens: nnx.merge(graph, params).features(state, tokens)[
            0
        ],
        donate_argnums=1,
    )
    # Calls of one shape, so that nothing compiles while time runs.
    together = max(n for n in range(1, scores.TOGETHER + 1) if count % n == 0)
    step = together * config.memory.segment_length
    tokens = np.zeros((1, length), np.int32)
    state = read(params, model.init_state(1), jnp.asarray(tokens[:, :step]))
    jax.block_until_ready(state)
    before = _peak()
    state = model.init_state(1)
    began = time.monotonic()
    for start in range(0, length, step):
        state = read(params, state, jnp.asarray(tokens[:, start : start + step]))
    jax.block_until_ready(state)
    return {
        "seconds": time.monotonic() - began,
        "peak_mebibytes": _peak(),
        "growth_mebibytes": _peak() - before,
        "state_bytes": scores.state_bytes(model),
    }


def build(config: Config, kind: Kind, length: int) -> Any:
    """A model with random parameters that can read so many tokens."""
    backbone = LanguageModel(config.backbone, key=jax.random.key(0))
    backbone = set_capacity(backbone, length)
    if kind == "full attention":
        return backbone
    memory = add_hmt(backbone, config.memory, key=jax.random.key(1))
    if kind == "HMT":
        return memory
    size = scores.state_bytes(memory)
    return limit_attention(backbone, scores.equal_window(backbone, size))


def _peak() -> float:
    """Most MiB that the process had: the accelerator's, or the host's."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"] / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    main(tyro.cli(Config))
