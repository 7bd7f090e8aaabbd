"""What the comparisons share: sizes, equal parameters, training, scoring.

A comparison trains models that differ in one thing. They have equal parameters (the
width of the feed-forward layers makes up for what a mixer has more or less), and see
equal tokens in equal order with equal seeds. Every run keeps its score in the run
folder, and the results are written anew after each run, so that a program that was
stopped continues.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.common.results import RESULTS, settings
from memjax import evaluation
from memjax.config_io import to_record
from memjax.data import Split, TokenisedDocument, load_tokenizer, load_tokens
from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.presets import Size
from memjax.training import LoopConfig, OptimizerConfig, loop, run_data, sharding
from memjax.training import pretrain as run
from memjax.training.checkpoints.checksums import write_atomically
from memjax.training.config import DataIterator

Preset = Literal["cpu", "125m", "170m", "350m", "780m"]


class Scale(NamedTuple):
    """One size of model and training."""

    layers: int
    model_dim: int
    heads: int
    slots: int
    context_length: int
    tokens_per_update: int
    steps: int
    learning_rate: float


def _paper(layers, model_dim, heads, learning_rate, billions) -> Scale:
    """Trellis, Table 5; half a million tokens an update, as both papers train."""
    steps = round(billions * 1e9 / 2**19)
    return Scale(layers, model_dim, heads, 64, 2048, 2**19, steps, learning_rate)


SCALES: dict[Preset, Scale] = {
    "cpu": Scale(2, 64, 2, 32, 256, 2048, 200, 5e-3),
    "125m": _paper(12, 768, 12, 3e-3, 2.4),
    "170m": _paper(12, 768, 16, 3e-3, 15),
    "350m": _paper(24, 1024, 16, 1.5e-3, 15),
    "780m": _paper(24, 1536, 16, 1.25e-3, 30),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What every comparison takes.

    Attributes:
        preset: "cpu" takes minutes on two cores; the others are the papers' sizes.
        seeds: of parameters and data order; at least 2, and 3 to claim a difference.
        steps: updates of each model; 0 is the preset's.
        only: names of the models to run; none is all.
        source: documents, as `memjax train` takes them.
        tokenizer: "bytes", "bpe4k", or a tokenizers JSON.
        test_tokens: scored of each held-out document.
        run_dir: where runs and their scores are kept.
        output: where .json and .png go, without the ending.
    """

    preset: Preset = "cpu"
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 0
    only: tuple[str, ...] = ()
    source: str = "embedded"
    tokenizer: str = "bytes"
    test_tokens: int = 16_384
    run_dir: Path = Path("runs/comparison")
    output: Path = RESULTS / "recurrent" / "comparison"

    def __post_init__(self):
        if len(set(self.seeds)) < max(2, len(self.seeds)):
            raise ValueError(f"seeds must be 2 or more, all distinct, got {self.seeds}")
        if self.steps < 0:
            raise ValueError(f"steps must be >= 0, got {self.steps}")
        if self.test_tokens < 1:
            raise ValueError(f"test_tokens must be at least 1, got {self.test_tokens}")

    @property
    def scale(self) -> Scale:
        """The preset, with the steps of the options."""
        scale = SCALES[self.preset]
        return scale._replace(steps=self.steps or scale.steps)


class Case(NamedTuple):
    """One model of a comparison.

    Attributes:
        name: unique within the comparison.
        model: with hidden_dim still to be set by `equal_parameters`.
        fields: what else its rows of the results say, such as the context length.
    """

    name: str
    model: ModelConfig
    fields: dict[str, Any] = {}


def base_model(
    scale: Scale, vocab_size: int, mixer: str, length: int, **options: Any
) -> ModelConfig:
    """A model of this size with one mixer in every layer; attention sees `length`.

    `options` are the mixer's own, such as slots=8.
    """
    small = scale.model_dim < 512
    size = Size(
        num_layers=scale.layers,
        model_dim=scale.model_dim,
        num_heads=scale.heads,
        num_kv_heads=scale.heads,
        head_dim=scale.model_dim // scale.heads,
        hidden_dim=scale.model_dim * 8 // 3,
        window=length,
        capacity=length,
        slots=scale.slots,
        options={mixer: options},
        dtype="float32" if small else "bfloat16",
        remat=not small,
    )
    return size.model(mixer, vocab_size=vocab_size)


def for_length(model: ModelConfig, length: int) -> ModelConfig:
    """The same model for sequences of `length` tokens, all visible to attention."""

    def sized(mixer):
        match mixer:
            case AttentionConfig():
                return dataclasses.replace(mixer, capacity=length)
            case SlidingWindowConfig():
                return dataclasses.replace(mixer, window=length)
        return mixer

    return dataclasses.replace(model, mixers=tuple(map(sized, model.mixers)))


@functools.lru_cache(maxsize=256)
def parameters(model: ModelConfig) -> int:
    """Numbers that are learned."""
    params = nnx.state(run.abstract_model(model), nnx.Param)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def equal_parameters(cases: Sequence[Case], scale: Scale) -> list[Case]:
    """Sets hidden_dim so that all come nearest to Transformer++ of this size.

    Raises:
        ValueError: if a mixer alone has more parameters than that.
    """
    vocab_size = cases[0].model.vocab_size
    goal = parameters(base_model(scale, vocab_size, "sliding_window", 1))
    equal = []
    for case in cases:
        each = 3 * case.model.model_dim * case.model.num_layers
        missing = round((goal - parameters(case.model)) / each)
        width = case.model.hidden_dim + missing
        if width < 1:
            raise ValueError(f"{case.name} has more parameters than {goal} by itself")
        model = dataclasses.replace(case.model, hidden_dim=width)
        equal.append(case._replace(model=model))
    return equal


def run_config(
    config: Config, scale: Scale, model: ModelConfig, seed: int
) -> run.RunConfig:
    """One training; every context length sees the same number of tokens.

    Raises:
        ValueError: if the context length does not divide the tokens of an update.
    """
    rows, rest = divmod(scale.tokens_per_update, scale.context_length)
    if rows < 1 or rest:
        raise ValueError(
            f"context_length={scale.context_length} must divide the "
            f"{scale.tokens_per_update} tokens of an update"
        )
    # Few lines and few checkpoints: short runs save once, at their end.
    often = max(1, min(1000, scale.steps // 2))
    return run.RunConfig(
        model=model,
        data=run.DataConfig(
            source=config.source,
            tokenizer=config.tokenizer,
            context_length=scale.context_length,
            batch_size=rows,
        ),
        optimizer=OptimizerConfig(
            learning_rate=scale.learning_rate, warmup_ratio=0.1, final_ratio=0.1
        ),
        loop=LoopConfig(steps=scale.steps, save_every=1000, log_every=often, keep=1),
        seed=seed,
    )


def train(
    settings: run.RunConfig, data: DataIterator, folder: Path
) -> tuple[LanguageModel, float]:
    """The trained model and the seconds that it took; goes on with what folder holds.

    Seeds of one model share their compilation, and those who score it share theirs.
    """
    began = time.monotonic()
    state, step = run.build_step(settings, sharding.make_mesh(settings.mesh))
    state, outcome = loop.train(
        step,
        state,
        data,
        settings.loop,
        folder,
        config_record=to_record(settings),
        tokens_per_step=settings.data.batch_size * settings.data.context_length,
    )
    if outcome.reason != "finished":
        raise SystemExit(outcome.exit_code)
    model = nnx.merge(structure(settings.model), state.params)
    return model, time.monotonic() - began


def train_and_score(settings: run.RunConfig, test_tokens: int, folder: Path) -> dict:
    """Trains on the documents and scores held-out ones at the same context length."""
    data = run_data.batches(settings, _documents(settings.data, "train"))
    model, seconds = train(settings, data, folder)
    length = settings.data.context_length
    documents = [
        d._replace(tokens=np.asarray(d.tokens[: test_tokens // length * length + 1]))
        for d in _documents(settings.data, "test")
    ]
    losses = evaluation.losses(
        model,
        documents,
        context_length=length,
        segment=length,
        batch_size=settings.data.batch_size,
    )
    return {"perplexity": evaluation.perplexity(losses), "seconds": seconds}


def study(
    config: Config,
    cases: Sequence[Case],
    run_of: Callable[[Case, int], run.RunConfig],
    measure: Callable[[Case, run.RunConfig, Path], dict],
    report: Callable[[list[dict]], None],
) -> list[dict]:
    """Runs every case with every seed, the finished ones excepted.

    Args:
        config: names the run folder, the seeds, and the cases if not all are run.
        cases: what is compared.
        run_of: (case, seed) -> the run.
        measure: (case, run, folder) -> numbers of this run.
        report: called with all rows so far after each run that was not finished
            before, and at the end.

    Raises:
        ValueError: if `config.only` names no case, or the folder holds the score of
            another run under the same name.
    """
    names = list(dict.fromkeys(case.name for case in cases))
    if unknown := set(config.only) - set(names):
        raise ValueError(f"only={sorted(unknown)} must be among {names}")
    # What is trained is in the run; how it is scored is in the fields of the tests.
    fields = settings(config).items()
    shared = {name: value for name, value in fields if name.startswith("test_")}
    rows, reported = [], 0
    for case in cases:
        if config.only and case.name not in config.only:
            continue
        case_name = "-".join([case.name, *map(str, case.fields.values())])
        for seed in config.seeds:
            chosen = run_of(case, seed)
            identity = {"run": to_record(chosen), "config": shared}
            folder = config.run_dir / case_name.replace(" ", "_") / f"seed{seed}"
            row = _stored(folder, identity)
            is_new = row is None
            if row is None:
                print(f"{case_name}, seed {seed}", flush=True)
                row = measure(case, chosen, folder) | _sizes(chosen.model)
                score = json.dumps({"identity": identity, "row": row})
                write_atomically(folder / "score.json", score)
            rows.append({"name": case.name, "seed": seed} | case.fields | row)
            if is_new:
                report(rows)
                reported = len(rows)
    if reported < len(rows):
        report(rows)
    return rows


def _stored(folder: Path, identity: dict) -> dict | None:
    """The row of a finished run, None if there is none yet."""
    file = folder / "score.json"
    if not file.exists():
        return None
    stored = json.loads(file.read_text())
    # As JSON, in which tuples are lists.
    if stored["identity"] != json.loads(json.dumps(identity)):
        raise ValueError(
            f"{folder} holds the score of another run under this name; remove it or "
            "give another --run-dir"
        )
    return stored["row"]


def _sizes(model: ModelConfig) -> dict[str, int]:
    state = jax.eval_shape(lambda: run.abstract_model(model).init_state(1))
    return {
        "parameters": parameters(model),
        "hidden_dim": model.hidden_dim,
        "state_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
    }


@functools.lru_cache(maxsize=8)
def structure(model: ModelConfig):
    """One object for all seeds of a model: programs are compiled once for each."""
    return nnx.graphdef(run.abstract_model(model))


@functools.lru_cache(maxsize=4)
def _documents(data: run.DataConfig, split: Split) -> list[TokenisedDocument]:
    tokenizer = load_tokenizer(data.tokenizer)
    return load_tokens(data.source, tokenizer, split, data.cache_dir)
