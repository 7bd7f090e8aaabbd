"""What does it cost to know a long text: memory, time and operations?

    python experiments/mplus_cost.py

M+ and MemoryLLM are told texts of several lengths and asked a question; the backbone
does the same with full attention, and with a window of as much memory as M+ needs on
the device (M+, Table 1, Figure 7 and E.4). Given are the bytes of what is remembered,
part by part, and of XLA's temporary arrays; the seconds of telling and of answering;
and the operations by formula (`mplus_operations`). Programs are compiled before time
runs. Parameters are random: they do not change the cost.

Full attention is run up to `full_up_to`; beyond, its bytes and operations are given.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

import hmt_common as common
import hmt_cost
import hmt_scores
import mplus_operations as operations
import retention_methods as methods
from hmt_common import RESULTS
from hmt_operations import Size
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model import with_config
from memjax.models.mplus import MPlus, mplus
from memjax.models.mplus_state import MPlusConfig
from memjax.models.windowed import with_window

Kind = Literal["M+", "MemoryLLM", "full attention", "sliding window"]
KINDS: tuple[Kind, ...] = ("M+", "MemoryLLM", "full attention", "sliding window")


class Scale(NamedTuple):
    """How a size is measured.

    Attributes:
        memory: sizes of M+; MemoryLLM has the retrieved rows in its pool.
        lengths: of the texts.
        full_up_to: longest text that full attention is told.
    """

    memory: MPlusConfig
    lengths: tuple[int, ...]
    full_up_to: int


SCALES: dict[Size, Scale] = {
    # A quarter of the paper's rows, and its ratio of the width to that of the keys.
    "tiny": Scale(
        MPlusConfig(
            tokens=64, chunk=128, pool=2_560, retrieved=640, store=38_400, key_dim=8
        ),
        (2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072),
        32_768,
    ),
    "smollm2": Scale(
        MPlusConfig(pool=2_560, retrieved=640, store=38_400, key_dim=64),
        (2_048, 8_192, 32_768),
        8_192,
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured.

    Attributes:
        size: "tiny", or the sizes of "smollm2" (135M).
        lengths: of the texts, in tokens, rising; multiples of `piece`; none is the
            size's.
        full_up_to: longest text for full attention; 0 is the size's.
        piece: tokens that are told in one call, a multiple of the memory's chunk.
        prompt: tokens of the question.
        answer: tokens that are generated.
        kinds: of models.
        repeats: timed answers, whose median counts.
        output: where .json and .png go, without the ending.
    """

    size: Size = "tiny"
    lengths: tuple[int, ...] = ()
    full_up_to: int = 0
    piece: int = 2_048
    prompt: int = 128
    answer: int = 10
    kinds: tuple[Kind, ...] = KINDS
    repeats: int = 3
    output: Path = RESULTS / "mplus_cost"

    def __post_init__(self):
        for name in ("prompt", "answer", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if not self.kinds:
            raise ValueError("kinds must name at least one, got none")
        scale = self.scale
        if self.piece < 1 or self.piece % scale.memory.chunk:
            raise ValueError(
                f"piece must be a multiple of the chunk of {scale.memory.chunk}, "
                f"got {self.piece}"
            )
        rising = list(scale.lengths) == sorted(set(scale.lengths))
        if not rising or any(n < 1 or n % self.piece for n in scale.lengths):
            raise ValueError(
                f"lengths must rise, in multiples of piece={self.piece}, "
                f"got {scale.lengths}"
            )

    @property
    def scale(self) -> Scale:
        """The size's, with the changes that were asked for."""
        scale = SCALES[self.size]
        lengths = self.lengths or scale.lengths
        return Scale(scale.memory, lengths, self.full_up_to or scale.full_up_to)

    @property
    def backbone(self) -> ModelConfig:
        """Attention in every layer, in float32."""
        return hmt_cost.Config(size=self.size).backbone


class Programs(NamedTuple):
    """Compiled, the state that they are given is gone.

    Attributes:
        tell: (parameters, state, tokens [1, T]) -> state
        ask: (parameters, state, prompt [1, P]) -> (state, tokens [1, N])
        temporary: bytes that each takes beside what it is given and gives.
    """

    tell: Callable[..., Any]
    ask: Callable[..., Any]
    temporary: dict[str, int]


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
    """What needs no run: bytes remembered, and operations by formula."""
    model = nnx.eval_shape(lambda: build(config, kind, length))
    sizes = config.backbone
    if isinstance(model, MPlus):
        told = operations.inject(sizes, model.config, length)
        asked = operations.read(sizes, model.config, config.prompt, config.answer)
    else:
        window = model.config.window if kind == "sliding window" else None
        told = operations.text(sizes, 0, length, window)
        asked = operations.answer(sizes, length, config.prompt, config.answer, window)
    return {
        "length": length,
        "parameter_bytes": _bytes(nnx.state(model)),
        "state_bytes": state_bytes(model),
        "operations": {"tell": told, "ask": asked},
    }


def measure(config: Config, kind: Kind, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Tells a text up to the longest of the lengths, and asks at each.

    Seconds of telling are of all tokens up to there.
    """
    model = build(config, kind, lengths[-1])
    params = nnx.split(model)[1]
    start = jax.jit(lambda: model.init_state(1))
    programs = compile_programs(config, model)
    tokens = jnp.zeros((1, config.piece), jnp.int32)
    prompt = jnp.zeros((1, config.prompt), jnp.int32)
    copy = lambda state: jax.tree.map(jnp.copy, state)
    # What is touched for the first time takes longer.
    jax.block_until_ready(programs.ask(params, start(), prompt))
    jax.block_until_ready(programs.tell(params, start(), tokens))
    state, told, spent, rows = start(), 0, 0.0, []
    for length in lengths:
        began = time.perf_counter()
        for _ in range((length - told) // config.piece):
            state = programs.tell(params, state, tokens)
        jax.block_until_ready(state)
        spent, told = spent + time.perf_counter() - began, length
        asked = []
        for _ in range(config.repeats):
            given = jax.block_until_ready(copy(state))
            began = time.perf_counter()
            jax.block_until_ready(programs.ask(params, given, prompt))
            asked.append(time.perf_counter() - began)
        rows.append(
            {
                "seconds": {"tell": spent, "ask": float(np.median(asked))},
                "temporary_bytes": programs.temporary,
            }
        )
    return rows


def build(config: Config, kind: Kind, length: int) -> LanguageModel | MPlus:
    """A model with random parameters that can be told so many tokens and asked."""
    backbone = LanguageModel(config.backbone, key=jax.random.key(0))
    if kind == "full attention":
        return with_config(backbone, capacity=length + config.prompt + config.answer)
    memory = mplus(backbone, config.scale.memory, key=jax.random.key(1))
    match kind:
        case "M+":
            return memory
        case "MemoryLLM":
            return methods.without_store(memory)
        case "sliding window":
            size = methods.device_bytes(memory)
            return with_window(backbone, hmt_scores.equal_window(backbone, size))


def compile_programs(config: Config, model: LanguageModel | MPlus) -> Programs:
    """Telling and asking, ahead of time."""
    graph, params = nnx.split(model)
    merged: Callable[[Any], Any] = lambda params: nnx.merge(graph, params)

    def tell(params, state, tokens):
        model = merged(params)
        if isinstance(model, MPlus):
            return model.inject(state, tokens)
        return model.features(state, tokens)[0]

    def ask(params, state, prompt):
        model = merged(params)
        if isinstance(model, MPlus):
            key = jax.random.key(0)
            drawn = model.generate(
                state, prompt, config.answer, key=key, sampling=methods.GREEDY
            )
            return state, drawn
        return _greedy(model, state, prompt, config.answer)

    state = jax.eval_shape(lambda: model.init_state(1))
    compiled, temporary = {}, {}
    for name, program, length in (
        ("tell", tell, config.piece),
        ("ask", ask, config.prompt),
    ):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        lowered = jax.jit(program, donate_argnums=1).lower(params, state, tokens)
        compiled[name] = lowered.compile()
        analysis: Any = compiled[name].memory_analysis()
        temporary[name] = analysis.temp_size_in_bytes
    return Programs(**compiled, temporary=temporary)


def _greedy(model, state, prompt, count):
    """The likeliest tokens behind a prompt, in one program; the last is not read."""
    best = lambda features: model.logits(features).argmax(axis=-1).astype(jnp.int32)
    state, features = model.features(state, prompt)

    def body(carry, _):
        state, token = carry
        state, features = model.features(state, token[:, None])
        return (state, best(features[:, 0])), token

    first = (state, best(features[:, -1]))
    (state, last), tokens = jax.lax.scan(body, first, length=count - 1)
    return state, jnp.concatenate([tokens, last[None]]).T


def state_bytes(model: LanguageModel | MPlus) -> dict[str, int]:
    """Bytes of the memory of one text, part by part."""
    state = jax.eval_shape(lambda: model.init_state(1))
    total = _bytes(state)
    if not isinstance(model, MPlus):
        return {"reading": total, "total": total}
    layers = () if state.store is None else state.store.layers
    parts = {
        "pool": _bytes((state.pool, state.ages)),
        "store_rows": _bytes([layer.rows for layer in layers]),
        "store_keys": _bytes([layer.keys for layer in layers]),
        "reading": _bytes(state.reading),
    }
    return parts | {"rest": total - sum(parts.values()), "total": total}


def _bytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def report(config: Config, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Writes, draws and prints."""
    scale = config.scale
    common.write_results(
        config,
        "what does it cost to know a long text: memory, time and operations?",
        jax_platform=jax.default_backend(),
        memory=dataclasses.asdict(scale.memory),
        full_attention_run_up_to=scale.full_up_to,
        models=rows,
    )
    tables = {name: _table(rows, *value) for name, value in QUANTITIES.items()}
    for name, table in tables.items():
        common.show(name, [f"{length:,}" for length in scale.lengths], table)
    plot(tables, scale.lengths, Path(f"{config.output}.png"), config.size)


def _get(*path: str) -> Callable[[dict[str, Any]], float]:
    """Follows a path in a row; NaN where it ends early."""

    def get(row):
        for name in path:
            row = row.get(name, {})
        return float("nan") if isinstance(row, dict) else row

    return get


# What is shown: its value in a row, and the unit.
QUANTITIES: dict[str, tuple[Callable[[dict[str, Any]], float], float]] = {
    "remembered (MiB)": (_get("state_bytes", "total"), 2**20),
    "of that, rows of the store (MiB)": (_get("state_bytes", "store_rows"), 2**20),
    "temporary, telling (MiB)": (_get("temporary_bytes", "tell"), 2**20),
    "temporary, asking (MiB)": (_get("temporary_bytes", "ask"), 2**20),
    "telling (s)": (_get("seconds", "tell"), 1),
    "asking (s)": (_get("seconds", "ask"), 1),
    "operations of telling (10^9)": (_get("operations", "tell"), 1e9),
    "operations of asking (10^9)": (_get("operations", "ask"), 1e9),
}


def _table(rows, get, unit):
    return {kind: [get(row) / unit for row in found] for kind, found in rows.items()}


def plot(
    tables: dict[str, dict[str, list[float]]],
    lengths: Sequence[int],
    path: Path,
    size: Size,
) -> None:
    """One panel a quantity, both axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 11), layout="constrained")
    grid = figure.subplots(4, 2, sharex=True).flat
    for axes, (name, table) in zip(grid, tables.items(), strict=True):
        for kind, values in table.items():
            # Nothing, and what was not run, has no place on a logarithmic axis.
            shown = [value if value > 0 else float("nan") for value in values]
            axes.plot(lengths, shown, marker="o", markersize=3, label=kind)
        axes.set_title(name, fontsize="medium")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.suptitle(f"M+ and its backbone ({size}) against tokens told")
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    main(tyro.cli(Config))
