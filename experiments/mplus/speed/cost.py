"""What does it cost to know a long text: memory, time and operations?

    python -m experiments.mplus.speed.cost

Texts of several lengths are injected into M+ and MemoryLLM, which then answer a query.
The backbone does the same with full attention, and with a window of as much memory as
M+ needs on the device (M+, Table 1, Figure 7 and E.4). Reported are the bytes of the
state, part by part, and of XLA's temporary arrays; the seconds of injecting and of
answering; and the operations by formula (`operations.py`). Compilation is not timed.
Parameters are random, which does not change the cost.

M+ keeps its store's rows in the host's memory, as the paper does. "all on the device"
does not, and "offload" keeps the pool in the host's memory too. A CPU has one memory,
so that times there say nothing about transfers.

Full attention is executed up to `full_up_to` tokens. Beyond, only its bytes and
operations are given.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from experiments.hmt import cost as hmt_cost
from experiments.hmt import scores as hmt_scores
from experiments.hmt.speed.operations import Size
from experiments.lab.measure import tree_bytes
from experiments.lab.results import RESULTS, settings, write_report
from experiments.mplus import models
from experiments.mplus.methods import LatentMemory
from experiments.mplus.speed import cost_report, operations
from experiments.mplus.speed.cost_programs import BACKBONE, MEMORY, compile_programs
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.windowed import limit_attention, set_capacity
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.state import MPlusState
from memjax.models.offload import device_bytes

Kind = Literal[
    "M+",
    "M+, all on the device",
    "M+ (offload)",
    "MemoryLLM",
    "MemoryLLM (offload)",
    "full attention",
    "sliding window",
]

# The kinds that have no memory but keys and values.
BACKBONES: tuple[Kind, ...] = ("full attention", "sliding window")


class Scale(NamedTuple):
    """How a size is measured.

    Attributes:
        memory: sizes of M+; MemoryLLM has the retrieved rows in its pool.
        lengths: of the texts.
        full_up_to: longest text for full attention.
    """

    memory: MPlusConfig
    lengths: tuple[int, ...]
    full_up_to: int


SCALES: dict[Size, Scale] = {
    # A quarter of the paper's rows, and its ratio of the width to that of the keys.
    "tiny": Scale(
        MPlusConfig(
            num_memory_tokens=64,
            chunk_size=128,
            pool_size=2_560,
            num_retrieved=640,
            store_size=38_400,
            key_dim=8,
        ),
        (2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072),
        32_768,
    ),
    "smollm2": Scale(
        MPlusConfig(pool_size=2_560, num_retrieved=640, store_size=38_400, key_dim=36),
        (2_048, 8_192, 32_768),
        8_192,
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured.

    Attributes:
        size: "tiny", or the sizes of "smollm2" (135M).
        lengths: of the texts, in tokens, rising; multiples of `chunk`; none is the
            size's.
        full_up_to: longest text for full attention; 0 is the size's.
        chunk: tokens injected in one call, a multiple of the memory's chunk.
        prompt: tokens of the question.
        answer: tokens that are generated.
        kinds: of models.
        repeats: timed answers, whose median counts.
        output: where .json and .png go, without the ending.
    """

    size: Size = "tiny"
    lengths: tuple[int, ...] = ()
    full_up_to: int = 0
    chunk: int = 512
    prompt: int = 128
    answer: int = 10
    kinds: tuple[Kind, ...] = get_args(Kind)
    repeats: int = 3
    output: Path = RESULTS / "mplus" / "cost"

    def __post_init__(self):
        for name in ("prompt", "answer", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if not self.kinds:
            raise ValueError("kinds must name at least one, got none")
        scale = self.scale
        if self.chunk < 1 or self.chunk % scale.memory.chunk_size:
            raise ValueError(
                f"chunk must be a multiple of the chunk of {scale.memory.chunk_size}, "
                f"got {self.chunk}"
            )
        rising = list(scale.lengths) == sorted(set(scale.lengths))
        if not rising or any(n < 1 or n % self.chunk for n in scale.lengths):
            raise ValueError(
                f"lengths must rise, in multiples of chunk={self.chunk}, "
                f"got {scale.lengths}"
            )

    @property
    def scale(self) -> Scale:
        """The model size with the changes of the options."""
        scale = SCALES[self.size]
        lengths = self.lengths or scale.lengths
        return Scale(scale.memory, lengths, self.full_up_to or scale.full_up_to)

    @property
    def backbone(self) -> ModelConfig:
        """Attention in every layer, in float32."""
        return hmt_cost.Config(size=self.size).backbone


def main(config: Config) -> None:
    """Measures one kind after the other, prints, draws and writes."""
    scale = config.scale
    rows: dict[str, list[dict[str, Any]]] = {}
    for kind in config.kinds:
        found = [describe(config, kind, length) for length in scale.lengths]
        if kind == "full attention":
            # Its state is as large as the text: one program a length.
            for row in found:
                if row["length"] <= scale.full_up_to:
                    row |= measure(config, kind, [row["length"]])[0]
        else:
            timed = measure(config, kind, scale.lengths)
            found = [row | more for row, more in zip(found, timed, strict=True)]
        for row in found:
            print(f"{kind}: {row}", flush=True)
        rows[kind] = found
    report(config, rows)


def describe(config: Config, kind: Kind, length: int) -> dict[str, Any]:
    """What needs no execution: bytes of the state, and operations by formula."""
    sizes, lengths = config.backbone, (config.prompt, config.answer)
    if kind in BACKBONES:
        model = nnx.eval_shape(lambda: build_backbone(config, kind, length))
        window = model.config.window if kind == "sliding window" else None
        inject = operations.text(sizes, 0, length, window)
        query = operations.answer(sizes, length, *lengths, window)
        state = jax.eval_shape(lambda: model.init_state(1))
        parts = {"reading": tree_bytes(state), "total": tree_bytes(state)}
    else:
        model = nnx.eval_shape(lambda: build_memory(config, kind))
        inject = operations.inject(sizes, model.config, length)
        query = operations.read(sizes, model.config, *lengths)
        parts = memory_bytes(jax.eval_shape(lambda: model.init_state(1)))
    return {
        "length": length,
        "parameter_bytes": tree_bytes(nnx.state(model)),
        "state_bytes": parts,
        "operations": {"inject": inject, "query": query},
    }


def measure(config: Config, kind: Kind, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Injects a text up to the longest of the lengths, and queries at each.

    Seconds of injecting are of all tokens up to there.
    """
    if kind in BACKBONES:
        model, calls = build_backbone(config, kind, lengths[-1]), BACKBONE
    else:
        model, calls = build_memory(config, kind), MEMORY
    params = nnx.split(model)[1]
    start = jax.jit(lambda: model.init_state(1))
    sizes = (config.chunk, config.prompt, config.answer)
    programs = compile_programs(model, calls, start(), *sizes)
    tokens = jnp.zeros((1, config.chunk), jnp.int32)
    prompt = jnp.zeros((1, config.prompt), jnp.int32)
    changes = calls.query_changes_state
    copy = lambda state: jax.tree.map(jnp.copy, state) if changes else state
    # What is touched for the first time takes longer.
    jax.block_until_ready(programs.query(params, start(), prompt))
    jax.block_until_ready(programs.inject(params, start(), tokens))
    state, done, spent, rows = start(), 0, 0.0, []
    for length in lengths:
        began = time.perf_counter()
        for _ in range((length - done) // config.chunk):
            state = programs.inject(params, state, tokens)
        jax.block_until_ready(state)
        spent, done = spent + time.perf_counter() - began, length
        answered = []
        for _ in range(config.repeats):
            given = jax.block_until_ready(copy(state))
            began = time.perf_counter()
            jax.block_until_ready(programs.query(params, given, prompt))
            answered.append(time.perf_counter() - began)
        rows.append(
            {
                "seconds": {"inject": spent, "query": float(np.median(answered))},
                "temporary_bytes": programs.temporary,
                "place_bytes": device_bytes(state),
            }
        )
    return rows


def build_memory(config: Config, kind: Kind) -> MPlus:
    """M+ or MemoryLLM with random parameters."""
    backbone = LanguageModel(config.backbone, key=jax.random.key(0))
    sizes = dataclasses.replace(
        config.scale.memory,
        store_memory="device" if kind == "M+, all on the device" else "host",
        pool_memory="host" if kind.endswith("(offload)") else "device",
    )
    memory = add_mplus(backbone, sizes, key=jax.random.key(1))
    return models.without_store(memory) if "MemoryLLM" in kind else memory


def build_backbone(config: Config, kind: Kind, length: int) -> LanguageModel:
    """The backbone with attention over so many tokens, or with a sliding window."""
    backbone = LanguageModel(config.backbone, key=jax.random.key(0))
    if kind == "full attention":
        return set_capacity(backbone, length + config.prompt + config.answer)
    size = LatentMemory(build_memory(config, "M+")).state_bytes().device
    return limit_attention(backbone, hmt_scores.equal_window(backbone, size))


def memory_bytes(state: MPlusState) -> dict[str, int]:
    """Bytes of the memory of one text, part by part."""
    layers = () if state.store is None else state.store.layers
    parts = {
        "pool": tree_bytes((state.pool, state.ages)),
        "store_rows": tree_bytes([layer.rows for layer in layers]),
        "store_keys": tree_bytes([layer.keys for layer in layers]),
        "reading": tree_bytes(state.cache),
    }
    total = tree_bytes(state)
    return parts | {"rest": total - sum(parts.values()), "total": total}


def report(config: Config, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Writes, prints and draws."""
    scale = config.scale
    question = "what does it cost to know a long text: memory, time and operations?"
    results = {
        "jax_platform": jax.default_backend(),
        "memory": dataclasses.asdict(scale.memory),
        "full_attention_run_up_to": scale.full_up_to,
        "models": rows,
    }
    result = write_report(config.output, question, settings(config), results)
    cost_report.plot(result, Path(f"{config.output}.png"))
    cost_report.show(rows, scale.lengths)


if __name__ == "__main__":
    main(tyro.cli(Config))
