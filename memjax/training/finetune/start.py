"""Start of a fine-tuning run: a pretrained backbone, or the previous stage."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import NamedTuple, cast

import jax
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray

from memjax.config_io import AnyPath
from memjax.data import Tokenizer
from memjax.models import LanguageModel
from memjax.models.adapters import merge_lora
from memjax.models.checkpoints.hf.safetensors_folder import CARD
from memjax.models.checkpoints.license import card_entries, described, read_license
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.training import loading
from memjax.training.finetune.run import (
    SHIPPED,
    TOKENIZER_FILE,
    AnyStage,
    FinetuneRun,
    is_finetuned,
    later_stage,
    load,
    read_run,
)
from memjax.training.finetune.stage import Model, Stage


class StoredText(NamedTuple):
    """Tokenizer and text interface, as stored in a run's folder.

    Attributes:
        name: of the tokenizer: "bytes", "bpe4k", or the folder's own "tokenizer.json".
        text: tokenizer, chat template and sampling.
        tokenizer: that of `text`.
        license: see `memjax.Loaded`.
    """

    name: str
    text: TextInterface
    tokenizer: Tokenizer
    license: Mapping[str, str]

    def files(self) -> dict[str, bytes]:
        """Files for the run's folder: a card, and no embedded tokenizer."""
        head = ["---", *card_entries(self.license), "---"] if self.license else []
        line = f"A run of memjax. Licence: {described(self.license)}.\n"
        return ({} if self.name in SHIPPED else self.text.files()) | {
            CARD: "\n".join([*head, line]).encode()
        }


class Backbone(NamedTuple):
    """A pretrained model with its tokenizer and the digest of its parameters."""

    model: LanguageModel
    stored: StoredText
    digest: str
    origin: str

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.stored.tokenizer


def load_backbone(name: AnyPath | str) -> Backbone:
    """Reads a pretrained model.

    Args:
        name: folder of a memjax run, Hugging Face folder, GGUF file or hub id.

    Raises:
        ValueError: if there is no model or no tokenizer, or it has a memory already.
    """
    opened = loading.load(name)
    model = opened.model
    if model.backbone is not model:
        raise ValueError(
            f"backbone={str(name)!r} must be a plain model, but that one has a "
            "memory: give its own backbone, or a run's folder as start"
        )
    tokenizer = opened.text.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"backbone={str(name)!r} has no tokenizer: put its tokenizer.json beside it"
        )
    named = opened.run.data.tokenizer if opened.run else TOKENIZER_FILE
    stored = StoredText(_kept_name(named), opened.text, tokenizer, opened.license)
    model = merge_lora(model.backbone)
    return Backbone(model, stored, digest(model), opened.origin)


def digest(model: nnx.Module) -> str:
    """SHA-256 over names, shapes and values of a model's parameters."""
    # Of values and names, so that equal digests mean equal models.
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found.update(f"{name} {leaf.dtype} {leaf.shape}\n".encode())
        # Without a copy of the bytes: leaves may be gigabytes.
        found.update(np.ascontiguousarray(leaf).data)
    return found.hexdigest()


def _kept_name(tokenizer: str) -> str:
    """Name of a tokenizer in a run's folder; only embedded ones keep their own."""
    return tokenizer if tokenizer in SHIPPED else TOKENIZER_FILE


class Start(NamedTuple):
    """Start of a run.

    Attributes:
        described: the run's record.
        model: before `Stage.prepare`.
        stored: tokenizer, chat template and sampling of the backbone.
        before: the previous stage, if any.
    """

    described: FinetuneRun
    model: Model
    stored: StoredText
    before: Stage | None


def starting_point(
    stage: AnyStage, backbone: AnyPath | str | None, start: AnyPath | None
) -> Start:
    """The run's record and first model, from a backbone or the previous stage.

    Raises:
        ValueError: see `finetune.finetune`.
    """
    key = jax.random.key(stage.seed)
    if start is not None:
        return _after(stage, start, backbone, key)
    if backbone is None:
        raise ValueError("backbone=None must be a path where start is not given")
    model, stored, identity, origin = load_backbone(backbone)
    described = FinetuneRun(
        stage,
        model.config,
        stored.name,
        stored.tokenizer.digest,
        identity,
        origin=origin,
    )
    return Start(described, stage.wrap(model, key), stored, None)


def _after(
    stage: AnyStage, start: AnyPath, backbone: AnyPath | str | None, key: PRNGKeyArray
) -> Start:
    """Start from the previous stage, in the folder `start`."""
    where = f"start={str(start)!r}"
    if not is_finetuned(start):
        raise ValueError(f"{where} must be the folder of a fine-tuning run")
    before = read_run(start)
    stage.check_start(before.config, where)
    _, trained = load(start)
    if backbone is not None:
        _check_same_backbone(before, trained, where, backbone)
    folder = later_stage(start) or start
    text, terms = before.text(folder), read_license(folder)
    name = _kept_name(before.tokenizer)
    stored = StoredText(name, text, cast(Tokenizer, text.tokenizer), terms)
    described = dataclasses.replace(
        # So that a continuation refuses a start that was trained further meanwhile.
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
