"""What a fine-tuning starts from: a pretrained backbone, or the stage before."""

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from memjax.data import Tokenizer, load_tokenizer
from memjax.data.documents.tokenizer import parse_tokenizer
from memjax.models import LanguageModel
from memjax.models.checkpoints import pretrained as interop
from memjax.models.hmt.model import HMT
from memjax.models.lora import merge_lora
from memjax.models.mplus.model import MPlus
from memjax.training.finetune.config import FinetuneConfig
from memjax.training.finetune.mplus_config import MPlusStage
from memjax.training.finetune.run import (
    TOKENIZER_FILE,
    FinetuneRun,
    Model,
    later_stage,
    load,
    load_model,
    next_stage,
    wrap,
)
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
    if (path / CHECKPOINTS).is_dir() or later_stage(path):
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


def starting_point(
    config: FinetuneConfig | MPlusStage, backbone: Path | None, start: Path | None
) -> tuple[FinetuneRun, PyTree, StoredTokenizer]:
    """The description of a run, its first variables, its tokenizer.

    Raises:
        ValueError: see `finetune.finetune`.
    """
    key = jax.random.key(config.seed)
    if start is not None:
        before, trained = _stage_before(config, backbone, start)
        stored = _stored(before.tokenizer)
        described = dataclasses.replace(
            before,
            config=config,
            tokenizer=stored.name,
            start_digest=digest(trained),
        )
        return described, nnx.state(next_stage(described, trained, key)), stored
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


def _stage_before(
    config: FinetuneConfig | MPlusStage, backbone: Path | None, start: Path
) -> tuple[FinetuneRun, HMT | MPlus]:
    """The run that a stage starts from, if it can."""
    if isinstance(config, MPlusStage):
        before, model = _mplus_before(config, start)
    else:
        before, model = _hmt_before(config, start)
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


def _hmt_before(config: FinetuneConfig, start: Path) -> tuple[FinetuneRun, HMT]:
    if config.memory != "hmt" or not config.hmt.retrieval:
        raise ValueError(
            f"start={str(start)!r} needs memory='hmt' and hmt.retrieval=True, got "
            f"memory={config.memory!r} and {config.hmt.retrieval}"
        )
    before, model = load(start)
    if not isinstance(model, HMT) or model.config.retrieval:
        found = "retrieval" if isinstance(model, HMT) else _kind(model)
        raise ValueError(
            f"start={str(start)!r} must be a run of stage 1, HMT without retrieval; "
            f"that run has {found}"
        )
    for name in ("train", "lora"):
        old, new = getattr(before.config, name), getattr(config, name)
        if old != new:
            raise ValueError(f"{name}={new!r} must be that of the start, {old!r}")
    return before, model


def _mplus_before(config: MPlusStage, start: Path) -> tuple[FinetuneRun, MPlus]:
    before, model = load(start)
    if not isinstance(model, MPlus):
        raise ValueError(
            f"start={str(start)!r} must be a run of M+ or MemoryLLM; that run has "
            f"{_kind(model)}"
        )
    fixed = ["tokens", "stored", "rank", "alpha"]
    if model.config.has_retriever and config.memory.has_retriever:
        fixed.append("key_dim")
    for name in fixed:
        old, new = getattr(model.config, name), getattr(config.memory, name)
        if old != new:
            raise ValueError(f"memory.{name}={new} must be that of the start, {old}")
    return before, model


def _kind(model: Model) -> str:
    """What a run has for a memory."""
    return {HMT: "HMT", MPlus: "M+"}.get(type(model), "no memory")
