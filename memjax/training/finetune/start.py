"""What a fine-tuning starts from: a pretrained backbone, or the stage before."""

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple, cast

import jax
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray

from memjax.data import Tokenizer, load_tokenizer
from memjax.data.documents.tokenizer import parse_tokenizer
from memjax.models import LanguageModel
from memjax.models.checkpoints import pretrained as interop
from memjax.models.lora import merge_lora
from memjax.training import pretrain
from memjax.training.finetune.run import (
    TOKENIZER_FILE,
    AnyStage,
    FinetuneRun,
    is_finetuned,
    later_stage,
    load,
    read_run,
)
from memjax.training.finetune.stage import NO_MEMORY, Model, Stage
from memjax.training.run_folder import CHECKPOINTS


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


def load_backbone(path: Path) -> Backbone:
    """Reads a pretrained model.

    Args:
        path: folder of a memjax run, Hugging Face folder, or GGUF file.

    Raises:
        ValueError: if there is no model or no tokenizer, or it has a memory already.
    """
    # Runs first: their folders may hold a tokenizer.json as Hugging Face's do.
    if (path / CHECKPOINTS).is_dir() or later_stage(path):
        model, name = _trained_backbone(path)
        tokenizer = _stored(name)
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


def _trained_backbone(path: Path) -> tuple[LanguageModel, str]:
    """The plain model that a run trained, and the name of its tokenizer."""
    if not is_finetuned(path):
        config, model = pretrain.load_model(path)
        return merge_lora(model), config.data.tokenizer
    described = read_run(path)
    if described.config.memory_name != NO_MEMORY:
        raise ValueError(
            f"backbone={str(path)!r} must be a plain model, but that run has a "
            "memory: give its own backbone, or its folder as start"
        )
    # A stage without a memory trains the backbone itself.
    model = cast(LanguageModel, load(path)[1])
    return merge_lora(model), described.tokenizer


def digest(model: nnx.Module) -> str:
    """SHA-256 over names, shapes and values of a model's parameters."""
    # Values and names, so that two folders with one digest hold one model.
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        # Without a copy of the bytes: leaves may be gigabytes.
        found.update(np.ascontiguousarray(leaf).data)
    return found.hexdigest()


def _stored(name: str) -> StoredTokenizer:
    if name in ("bytes", "bpe4k"):
        return StoredTokenizer(name, None)
    return StoredTokenizer(TOKENIZER_FILE, Path(name).expanduser().read_bytes())


class Start(NamedTuple):
    """Where a run begins.

    Attributes:
        described: the run's record.
        model: before `Stage.prepare`.
        tokenizer: of the backbone.
        before: the stage before, if any.
    """

    described: FinetuneRun
    model: Model
    tokenizer: StoredTokenizer
    before: Stage | None


def starting_point(stage: AnyStage, backbone: Path | None, start: Path | None) -> Start:
    """The run's record and its first model, made from a backbone or the stage before.

    Raises:
        ValueError: see `finetune.finetune`.
    """
    key = jax.random.key(stage.seed)
    if start is not None:
        return _after(stage, start, backbone, key)
    if backbone is None:
        raise ValueError("backbone=None must be a path where start is not given")
    model, stored, identity = load_backbone(backbone)
    tokenizer = stored.parse()
    # Checkpoints pad their vocabulary, so that a model may have more ids, not fewer.
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"backbone={str(backbone)!r} has a vocabulary of {model.vocab_size}, its "
            f"tokenizer has {tokenizer.vocab_size} ids"
        )
    described = FinetuneRun(
        stage, model.config, stored.name, tokenizer.digest, identity
    )
    return Start(described, stage.wrap(model, key), stored, None)


def _after(
    stage: AnyStage, start: Path, backbone: Path | None, key: PRNGKeyArray
) -> Start:
    """Where the stage before, whose folder is `start`, ended."""
    where = f"start={str(start)!r}"
    before = read_run(start)
    stage.check_start(before.config, where)
    _, trained = load(start)
    if backbone is not None:
        _check_same_backbone(before, trained, where, backbone)
    stored = _stored(before.tokenizer)
    described = dataclasses.replace(
        # The digest lets a continuation refuse a start that was trained on meanwhile.
        before,
        config=stage,
        tokenizer=stored.name,
        start_digest=digest(trained),
    )
    model = stage.wrap_trained(trained, before.model, key)
    return Start(described, model, stored, before.config)


def _check_same_backbone(before, trained, where, backbone):
    given = load_backbone(backbone)
    if given.model.width != trained.width:
        raise ValueError(
            f"{where} must have the backbone's width of {given.model.width}, "
            f"got {trained.width}"
        )
    if given.digest != before.backbone_digest:
        raise ValueError(
            f"{where} must have been trained on backbone={str(backbone)!r}; its "
            "backbone had other parameters"
        )
