"""Fine-tuning a pretrained backbone, with HMT or RMT memory or with a window.

    finetune(config, backbone, run_dir)                one stage
    finetune_two_stages(config, backbone, run_dir)     both stages of HMT

A run's folder is whole: its checkpoints hold the backbone too, frozen or not, and
`load(run_dir)` needs no other file. The same call again goes on bit for bit; with a
backbone or a first stage of other parameters it is refused, by their digests.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray, PyTree

from memjax import run
from memjax.config_io import to_record
from memjax.data import Tokenizer, load_tokenizer
from memjax.data.tokenizer import JsonTokenizer, parse_tokenizer
from memjax.finetune_config import FinetuneConfig, TwoStageConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt import HMT, hmt
from memjax.models.language_model import with_config
from memjax.models.lora import add_lora, merge_lora
from memjax.models.windowed import with_window
from memjax.run import DataConfig
from memjax.run_folder import CHECKPOINTS, CONFIG_FILE, claim, newest_state, read_config
from memjax.training import loop, sharding
from memjax.training.integrity import write_atomically
from memjax.training.loop_config import Outcome
from memjax.training.optimizer import optimizer
from memjax.training.resume import FREE_FIELDS
from memjax.training.step import (
    TrainState,
    init_train_state,
    make_train_step,
    model_of,
)

#: Fields of a `FinetuneRun` that may differ between a run and its continuation.
FREE = frozenset(f"config.{name}" for name in FREE_FIELDS)
TOKENIZER_FILE = "tokenizer.json"
SHIPPED_TOKENIZERS = ("bytes", "bpe4k")


@dataclasses.dataclass(frozen=True)
class FinetuneRun:
    """What a run's folder says about it.

    Attributes:
        config: of the stage.
        model: of the backbone, as it came.
        tokenizer: "bytes", "bpe4k", or the path of a `tokenizers` JSON, which is the
            folder's own `tokenizer.json` where the backbone brought one.
        backbone_digest: of the parameters of the backbone as it came.
        start_digest: of the parameters that stage 1 ended with; empty without one.
    """

    config: FinetuneConfig
    model: ModelConfig
    tokenizer: str
    tokenizer_digest: str
    backbone_digest: str
    start_digest: str = ""

    @property
    def data(self) -> DataConfig:
        """Documents and samples, as of a training run."""
        return DataConfig(
            **vars(self.config.data),
            tokenizer=self.tokenizer,
            context_length=self.config.context_length,
        )

    @property
    def seed(self) -> int:
        """Of the data order."""
        return self.config.seed


class Backbone(NamedTuple):
    """A pretrained model, and the tokenizer that goes with it."""

    model: LanguageModel
    tokenizer: Tokenizer
    shipped: str
    digest: str


def finetune(
    config: FinetuneConfig,
    backbone: Path | None,
    run_dir: Path,
    start: Path | None = None,
) -> Outcome:
    """Trains one stage, or goes on with what `run_dir` holds.

    Args:
        config: of the stage.
        backbone: a run's folder, a Hugging Face folder or a GGUF file; may be None
            where `start` is given, whose run holds it.
        run_dir: the run's folder.
        start: folder of a run without retrieval (stage 1), whose backbone and first
            memory this one starts from; the parameters of the retrieval are new.

    Raises:
        ValueError: on a backbone or a start that cannot be, a run of another
            configuration or backbone in `run_dir`; see `memjax.training.loop.train`.
    """
    described, variables, tokenizer = _starting_point(config, backbone, start)
    mesh = sharding.make_mesh(config.mesh)
    data = run.batches(described, run.load_split(described, tokenizer, "train"))
    claim(described, run_dir, FREE)
    if described.tokenizer == TOKENIZER_FILE:
        _write_tokenizer(tokenizer, run_dir)
    evaluate = None
    if config.loop.evaluate_every:
        evaluate = run.validation(described, tokenizer, structure(described))
    create, step = _programs(_anonymous(described), mesh)
    state = create(variables)
    # The state is a copy: the loop must be the only one to hold one.
    del variables
    _, outcome = loop.train(
        step,
        state,
        data,
        config.loop,
        run_dir,
        config_record=to_record(described),
        tokens_per_step=config.data.batch_size * config.context_length,
        evaluate=evaluate,
        may_change=FREE,
    )
    return outcome


def finetune_two_stages(
    config: TwoStageConfig, backbone: Path, run_dir: Path
) -> Outcome:
    """Stage 1 in `run_dir/stage1`, then stage 2 in `run_dir/stage2`.

    Interrupted anywhere, the same call goes on there.
    """
    first = run_dir / "stage1"
    outcome = finetune(config.stage1, backbone, first)
    if outcome.reason != "finished":
        return outcome
    return finetune(config.stage2, backbone, run_dir / "stage2", start=first)


def load(run_dir: Path) -> tuple[FinetuneRun, HMT | LanguageModel]:
    """A fine-tuned run and its newest good checkpoint's model.

    Of `finetune_two_stages`, its last stage. Adapters are still apart: `merge_lora`
    joins them.

    Raises:
        ValueError: if the folder is no such run, or its checkpoint is unreadable.
    """
    if (run_dir / "stage2").is_dir():
        run_dir = run_dir / "stage2"
    described: FinetuneRun = read_config(FinetuneRun, run_dir)
    if described.tokenizer not in SHIPPED_TOKENIZERS:
        here = str(run_dir / TOKENIZER_FILE)
        described = dataclasses.replace(described, tokenizer=here)
    model = structure(described)
    state = jax.eval_shape(functools.partial(_first_state, described), nnx.state(model))
    return described, model_of(nnx.graphdef(model), newest_state(run_dir, state))


def load_model(
    run_dir: Path,
) -> tuple[run.RunConfig | FinetuneRun, HMT | LanguageModel]:
    """The newest model of any run, trained from scratch or fine-tuned."""
    return load(run_dir) if is_finetuned(run_dir) else run.load_model(run_dir)


def is_finetuned(run_dir: Path) -> bool:
    """Whether `load` reads the folder, and not `run.load_model`."""
    if (run_dir / "stage2").is_dir():
        return True
    file = run_dir / CONFIG_FILE
    return file.is_file() and '"backbone_digest"' in file.read_text()


def structure(described: FinetuneRun) -> HMT | LanguageModel:
    """The run's model with shapes for parameters."""
    key = jax.random.key(0)
    return nnx.eval_shape(
        lambda: _wrap(described.config, LanguageModel(described.model, key=key), key)
    )


def load_backbone(path: Path) -> Backbone:
    """Reads a pretrained model.

    Args:
        path: folder of a memjax run, Hugging Face folder, or GGUF file.

    Raises:
        ValueError: if there is no model, or it has a memory already.
    """
    if (path / CHECKPOINTS).is_dir() or (path / "stage2").is_dir():
        config, model = load_model(path)
        if not isinstance(model, LanguageModel):
            raise ValueError(
                f"backbone={str(path)!r} must be a plain model, but that run has a "
                "memory: give its own backbone, or its folder as start"
            )
        name, model = config.data.tokenizer, merge_lora(model)
        tokenizer = load_tokenizer(name)
    elif path.exists():
        from memjax.models.interop import load_pretrained

        model, tokenizer = load_pretrained(path)
        name = ""
    else:
        raise ValueError(
            f"backbone={str(path)!r} must be the folder of a run, a Hugging Face "
            "folder or a GGUF file; there is nothing there"
        )
    shipped = name if name in SHIPPED_TOKENIZERS else ""
    return Backbone(model, tokenizer, shipped, digest(model))


def digest(model: nnx.Module) -> str:
    """SHA-256 over names, shapes and values of a model's parameters."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        found.update(np.ascontiguousarray(leaf).data)
    return found.hexdigest()


def _starting_point(
    config: FinetuneConfig, backbone: Path | None, start: Path | None
) -> tuple[FinetuneRun, PyTree, Tokenizer]:
    """The description of the run, its first variables, its tokenizer."""
    key = jax.random.key(config.seed)
    if start is None:
        if backbone is None:
            raise ValueError("backbone=None must be a path where start is not given")
        found = load_backbone(backbone)
        tokenizer, name = _storable(found.tokenizer, found.shipped)
        described = FinetuneRun(
            config, found.model.config, name, tokenizer.digest, found.digest
        )
        model = _wrap(config, found.model, key)
    else:
        before, trained = _first_stage(config, backbone, start)
        shipped = before.tokenizer if before.tokenizer in SHIPPED_TOKENIZERS else ""
        tokenizer, name = _storable(load_tokenizer(before.tokenizer), shipped)
        described = dataclasses.replace(
            before, config=config, tokenizer=name, start_digest=digest(trained)
        )
        model = _second_stage(described, trained, key)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the backbone's vocabulary "
            f"{model.vocab_size}"
        )
    return described, nnx.state(model), tokenizer


def _wrap(
    config: FinetuneConfig, backbone: LanguageModel, key: PRNGKeyArray
) -> HMT | LanguageModel:
    """The model that a stage trains, from a plain backbone."""
    lora_key, memory_key = jax.random.split(key)
    if config.dtype is not None:
        backbone = with_config(backbone, dtype=config.dtype)
    if config.memory == "window":
        backbone = _limited(backbone, config.window)
    if config.train == "lora":
        backbone = add_lora(backbone, config.lora, lora_key)
    if config.memory == "window":
        return backbone
    return hmt(backbone, config.hmt, key=memory_key)


def _limited(backbone: LanguageModel, window: int) -> LanguageModel:
    """Attention in windows; in a backbone without attention they are a unit only."""
    attending = {"attention", "sliding_window", "elastic_memory"}
    if attending & set(backbone.config.mixers):
        return with_window(backbone, window)
    return with_config(backbone, window=window)


def _first_stage(
    config: FinetuneConfig, backbone: Path | None, start: Path
) -> tuple[FinetuneRun, HMT]:
    """The run that a second stage starts from, if it can."""
    if not config.hmt.retrieval or config.memory != "hmt":
        raise ValueError(
            f"start={str(start)!r} needs memory='hmt' and hmt.retrieval=True, got "
            f"memory={config.memory!r} and {config.hmt.retrieval}"
        )
    before, model = load(start)
    if not isinstance(model, HMT) or model.config.retrieval:
        kind = "a window" if not isinstance(model, HMT) else "retrieval already"
        raise ValueError(
            f"start={str(start)!r} must be a run of stage 1: HMT without retrieval; "
            f"that run has {kind}"
        )
    for name in ("train", "lora"):
        old, new = getattr(before.config, name), getattr(config, name)
        if old != new:
            raise ValueError(f"{name}={new!r} must be that of the start, {old!r}")
    if backbone is not None:
        given = load_backbone(backbone)
        if given.model.width != model.width:
            raise ValueError(
                f"start={str(start)!r} has width {model.width}, backbone="
                f"{str(backbone)!r} has {given.model.width}"
            )
        if given.digest != before.backbone_digest:
            raise ValueError(
                f"start={str(start)!r} was trained on another backbone than "
                f"{str(backbone)!r}"
            )
    return before, model


def _second_stage(described: FinetuneRun, trained: HMT, key: PRNGKeyArray) -> HMT:
    """A new memory on the backbone and with the first memory of stage 1."""
    # The backbone as it came: stage 1's has caches of its segments' length.
    backbone = with_config(
        trained.backbone,
        mixers=described.model.mixers,
        capacity=described.model.capacity,
        dtype=described.config.dtype or described.model.dtype,
    )
    model = hmt(backbone, described.config.hmt, key=jax.random.split(key)[1])
    model.initial_memory = trained.initial_memory
    return model


def _storable(tokenizer: Tokenizer, shipped: str) -> tuple[Tokenizer, str]:
    """The tokenizer as it will be read from the run's folder, and its name."""
    if shipped:
        return tokenizer, shipped
    if not isinstance(tokenizer, JsonTokenizer):
        raise ValueError(
            f"the backbone's tokenizer must be a tokenizers JSON, got {tokenizer!r}"
        )
    text = tokenizer.backend.to_str()
    return parse_tokenizer(text.encode(), TOKENIZER_FILE), TOKENIZER_FILE


def _write_tokenizer(tokenizer: Tokenizer, run_dir: Path) -> None:
    if isinstance(tokenizer, JsonTokenizer) and jax.process_index() == 0:
        write_atomically(run_dir / TOKENIZER_FILE, tokenizer.backend.to_str())


def _first_state(described: FinetuneRun, variables: PyTree) -> TrainState:
    """The state that a run starts from, of its model's variables."""
    config = described.config
    return init_train_state(
        nnx.merge(nnx.graphdef(structure(described)), variables),
        optimizer(config.optimizer, config.loop.steps),
        config.step,
        config.data.batch_size,
    )


@functools.lru_cache(maxsize=8)
def _programs(described: FinetuneRun, mesh: Any) -> tuple[Callable, Callable]:
    """How a state is made of variables, and the update."""
    config, model = described.config, structure(described)
    create = functools.partial(_first_state, described)
    layout = sharding.shardings(mesh, jax.eval_shape(create, nnx.state(model)))
    transform = optimizer(config.optimizer, config.loop.steps)
    update = make_train_step(model, transform, config.step)
    return jax.jit(create, out_shardings=layout), run.on_mesh(update, layout, mesh)


def _anonymous(described: FinetuneRun) -> FinetuneRun:
    """Without what its programs do not depend on, so that they are compiled once."""
    config = dataclasses.replace(described.config, seed=0)
    return dataclasses.replace(
        described, config=config, backbone_digest="", start_digest=""
    )
