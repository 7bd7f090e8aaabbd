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
from jaxtyping import PyTree

from memjax import run
from memjax.config_io import to_record
from memjax.data import Tokenizer, load_tokenizer
from memjax.data.tokenizer import parse_tokenizer
from memjax.finetune_config import FinetuneConfig, TwoStageConfig
from memjax.finetune_run import (
    SECOND_STAGE,
    TOKENIZER_FILE,
    FinetuneRun,
    first_state,
    second_stage,
    structure,
    wrap,
)
from memjax.finetune_run import load as load
from memjax.finetune_run import load_model as load_model
from memjax.models import LanguageModel, interop
from memjax.models.hmt import HMT
from memjax.models.lora import merge_lora
from memjax.run_folder import CHECKPOINTS, claim
from memjax.training import loop, sharding
from memjax.training.integrity import write_atomically
from memjax.training.loop_config import Outcome
from memjax.training.optimizer import optimizer
from memjax.training.resume import FREE_FIELDS
from memjax.training.step import make_train_step

FIRST_STAGE = "stage1"
#: Fields of a `FinetuneRun` that may differ between a run and its continuation.
FREE = frozenset(f"config.{name}" for name in FREE_FIELDS)


class StoredTokenizer(NamedTuple):
    """A tokenizer as a run's folder names it, and keeps it unless it is shipped."""

    name: str
    file: bytes | None

    def parse(self) -> Tokenizer:
        """The tokenizer itself."""
        if self.file is None:
            return load_tokenizer(self.name)
        return parse_tokenizer(self.file, self.name)


class Backbone(NamedTuple):
    """A pretrained model, what its tokens mean, and the digest of its parameters."""

    model: LanguageModel
    tokenizer: StoredTokenizer
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
    described, variables, stored = _starting_point(config, backbone, start)
    tokenizer = stored.parse()
    mesh = sharding.make_mesh(config.mesh)
    data = run.batches(described, run.load_split(described, tokenizer, "train"))
    claim(described, run_dir, FREE)
    if stored.file is not None and jax.process_index() == 0:
        write_atomically(run_dir / TOKENIZER_FILE, stored.file.decode())
    evaluate = None
    if config.loop.evaluate_every:
        evaluate = run.validation(described, tokenizer, structure(described))
    create, step = _programs(_anonymous(described), mesh)
    state = create(variables)
    # The state is a copy, and the loop must be the only one to hold one.
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
    first = run_dir / FIRST_STAGE
    outcome = finetune(config.stage1, backbone, first)
    if outcome.reason != "finished":
        return outcome
    return finetune(config.stage2, backbone, run_dir / SECOND_STAGE, start=first)


def load_backbone(path: Path) -> Backbone:
    """Reads a pretrained model.

    Args:
        path: folder of a memjax run, Hugging Face folder, or GGUF file.

    Raises:
        ValueError: if there is no model or no tokenizer, or it has a memory already.
    """
    if (path / CHECKPOINTS).is_dir() or (path / SECOND_STAGE).is_dir():
        config, model = load_model(path)
        if not isinstance(model, LanguageModel):
            raise ValueError(
                f"backbone={str(path)!r} must be a plain model, but that run has a "
                "memory: give its own backbone, or its folder as start"
            )
        model, tokenizer = merge_lora(model), _stored(config.data.tokenizer)
    elif path.exists():
        model, file = interop.load_pretrained(path)
        if file is None:
            raise ValueError(
                f"backbone={str(path)!r} has no tokenizer: put its tokenizer.json "
                "beside it"
            )
        tokenizer = StoredTokenizer(TOKENIZER_FILE, file)
    else:
        raise ValueError(
            f"backbone={str(path)!r} must be the folder of a run, a Hugging Face "
            "folder or a GGUF file; there is nothing there"
        )
    return Backbone(model, tokenizer, digest(model))


def digest(model: nnx.Module) -> str:
    """SHA-256 over names, shapes and values of a model's parameters."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        found.update(np.ascontiguousarray(leaf).data)
    return found.hexdigest()


def _stored(name: str) -> StoredTokenizer:
    if name in ("bytes", "bpe4k"):
        return StoredTokenizer(name, None)
    return StoredTokenizer(TOKENIZER_FILE, Path(name).expanduser().read_bytes())


def _starting_point(
    config: FinetuneConfig, backbone: Path | None, start: Path | None
) -> tuple[FinetuneRun, PyTree, StoredTokenizer]:
    """The description of the run, its first variables, its tokenizer."""
    key = jax.random.key(config.seed)
    if start is not None:
        before, trained = _first_stage(config, backbone, start)
        stored = _stored(before.tokenizer)
        described = dataclasses.replace(
            before,
            config=config,
            tokenizer=stored.name,
            start_digest=digest(trained),
        )
        return described, nnx.state(second_stage(described, trained, key)), stored
    if backbone is None:
        raise ValueError("backbone=None must be a path where start is not given")
    model, stored, identity = load_backbone(backbone)
    tokenizer = stored.parse()
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"backbone={str(backbone)!r} has a vocabulary of {model.vocab_size}, its "
            f"tokenizer has {tokenizer.vocab_size} ids"
        )
    described = FinetuneRun(
        config, model.config, stored.name, tokenizer.digest, identity
    )
    return described, nnx.state(wrap(config, model, key)), stored


def _first_stage(
    config: FinetuneConfig, backbone: Path | None, start: Path
) -> tuple[FinetuneRun, HMT]:
    """The run that a second stage starts from, if it can."""
    if config.memory != "hmt" or not config.hmt.retrieval:
        raise ValueError(
            f"start={str(start)!r} needs memory='hmt' and hmt.retrieval=True, got "
            f"memory={config.memory!r} and {config.hmt.retrieval}"
        )
    before, model = load(start)
    if not isinstance(model, HMT) or model.config.retrieval:
        found = "retrieval" if isinstance(model, HMT) else "no memory"
        raise ValueError(
            f"start={str(start)!r} must be a run of stage 1, HMT without retrieval; "
            f"that run has {found}"
        )
    for name in ("train", "lora"):
        old, new = getattr(before.config, name), getattr(config, name)
        if old != new:
            raise ValueError(f"{name}={new!r} must be that of the start, {old!r}")
    if backbone is None:
        return before, model
    given = load_backbone(backbone)
    if given.model.width != model.width:
        raise ValueError(
            f"start={str(start)!r} must have the backbone's width of "
            f"{given.model.width}, got {model.width}"
        )
    if given.digest != before.backbone_digest:
        raise ValueError(
            f"start={str(start)!r} must have been trained on "
            f"backbone={str(backbone)!r}; its backbone had other parameters"
        )
    return before, model


@functools.lru_cache(maxsize=8)
def _programs(described: FinetuneRun, mesh: Any) -> tuple[Callable, Callable]:
    """How a state is made of variables, and the update."""
    config, model = described.config, structure(described)
    create = functools.partial(first_state, described)
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
