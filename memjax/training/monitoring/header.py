"""Header of a run: model, devices, documents, epochs, held-out texts."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from memjax.data import Split, TokenisedDocument, Tokenizer
from memjax.data.documents.sources import check_source
from memjax.data.documents.tokenizer import first_tokens
from memjax.models.base import Model
from memjax.status import say, size
from memjax.training.config import DataConfig, LoopConfig
from memjax.training.run_data import load_sources
from memjax.training.step import TrainState


def show(
    data: DataConfig,
    loop: LoopConfig,
    model: Model,
    mesh: Mesh,
    sources: Sequence[Sequence[TokenisedDocument]],
    tokenizer: Tokenizer,
    *,
    tokens_per_step: int,
    shortest: int,
) -> None:
    """Prints the header, in the first process.

    Args:
        data: sources of the run's documents.
        loop: its steps and evaluations.
        model: its structure, with shapes for parameters.
        mesh: its devices.
        sources: documents of the training split, source by source.
        tokenizer: of the run.
        tokens_per_step: over all devices.
        shortest: minimum tokens of a document that is read.
    """
    if jax.process_index() != 0:
        return
    lines = {"model": _model(model), "devices": _devices(mesh)}
    if routers := trained_routers(model):
        lines["experts"] = (
            f"{routers} routers are trained without a loss that balances the experts' "
            "load (router_aux_loss_coef, e_score_correction_bias)"
        )
    documents = [document for part in sources for document in part]
    read = loop.steps * tokens_per_step
    steps = f"{loop.steps:,} steps of {tokens_per_step:,} tokens"
    if data.mixture:
        lines["training"] = steps
        total = sum(weight for _, weight in data.mixture)
        for (name, weight), part in zip(data.mixture, sources, strict=True):
            said = _training(part, shortest, read * weight / total, "its tokens")
            lines[f"{weight / total:.1%}"] = f"{name}: {said}"
    else:
        lines["training"] = _training(documents, shortest, read, steps)
    read_from = {name: check_source(name, data.rows) for name in data.sources}
    if notes := [f"{n}: {'; '.join(said)}" for n, said in read_from.items() if said]:
        lines["files"] = "; ".join(notes)
    if left_out := _left_out(documents, shortest):
        others = "; modes 'packed' and 'streamed' read them"
        lines["left out"] = left_out + others * (data.mode == "chunked")
    lines["a text"] = f"begins with {beginning(tokenizer)}"
    # Tokenised here once, and cached for `memjax eval`.
    lines["validation"] = held_out(data, tokenizer, "validation")
    if loop.evaluate_every:
        lines["validation"] += (
            f"; about {data.validation_texts:,} texts of "
            f"{data.context_length:,}, every {loop.evaluate_every:,} steps"
        )
    lines["test"] = f"{held_out(data, tokenizer, 'test')}; not used in training"
    for name, said in lines.items():
        say_line(name, said)


def trained_routers(model: Model) -> int:
    """Layers whose mixture of experts has a router that training changes."""
    leaves = jax.tree.leaves_with_path(nnx.state(model, nnx.Param))
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    return sum("['router']" in path for path in paths)


def show_cost(state: TrainState, flops_per_step: float | None = None) -> None:
    """Prints memory and operations of a step per device, in the first process.

    Args:
        state: before the first step, laid out on the devices: arrays, or shapes with
            their shardings.
        flops_per_step: of the model, over all devices; None if unknown.
    """
    if jax.process_index() != 0:
        return
    params = (state.params, state.frozen)
    count = sum(map(_held, jax.tree.leaves(params)))
    said = f"{count:,} parameters, {size(bytes_held(params))}"
    said += f"; moments {size(bytes_held(state.optimizer))}"
    if state.memory:
        said += f"; memory {size(bytes_held(state.memory))}"
    if flops_per_step is not None:
        said += f"; {flops_per_step / jax.device_count():.3g} FLOPs a step"
    say_line("a device", said)


def say_line(name: str, text: str) -> None:
    """Prints a line of the header."""
    say(f"{name:<11} {text}", 12)


def bytes_held(tree: PyTree) -> int:
    """Bytes of a laid-out tree on each device: the largest part of every array."""
    return sum(_held(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _held(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _model(model: Model) -> str:
    """Trained and frozen parameters, and layers."""

    def count(tree):
        return sum(x.size for x in jax.tree.leaves(tree))

    _, trained, fixed = nnx.split(model, nnx.Param, ...)
    said = f"{count(trained):,} parameters"
    if frozen := count(fixed):
        said += f" trained, {frozen:,} frozen"
    config = model.backbone.config
    return f"{said}; {config.num_layers} layers of width {config.model_dim:,}"


def _devices(mesh: Mesh) -> str:
    device = jax.devices()[0]
    axes = ", ".join(f"{n} {name}" for name, n in mesh.shape.items() if n > 1)
    hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return f"{mesh.size} x {device.device_kind}{hosts}" + (f" ({axes})" if axes else "")


def _training(
    documents: Sequence[TokenisedDocument], shortest: int, read: int | float, steps: str
) -> str:
    """Documents, tokens, and epochs."""
    used = [len(d.tokens) for d in documents if len(d.tokens) >= shortest]
    epochs = read / max(sum(used), 1)
    return f"{_counted(len(used), sum(used))}; {steps} are {epochs:.3g} epochs"


def _left_out(documents: Sequence[TokenisedDocument], shortest: int) -> str:
    short = [len(d.tokens) for d in documents if len(d.tokens) < shortest]
    if not short:
        return ""
    return f"{_counted(len(short), sum(short))}: shorter than {shortest:,} tokens"


def beginning(tokenizer: Tokenizer) -> str:
    """The tokens that are put before each document, for people."""
    first = np.asarray(first_tokens(tokenizer), np.int32)
    if not first.size:
        return "no added token"
    return f"{tokenizer.decode(first)}, which the tokenizer puts there"


def held_out(data: DataConfig, tokenizer: Tokenizer, split: Split) -> str:
    """Documents and tokens of a split; "no documents" if a source lacks it."""
    try:
        sources = load_sources(data, tokenizer, split)
    except ValueError:
        return "no documents"
    found = [len(d.tokens) for documents in sources for d in documents]
    return _counted(len(found), sum(found))


def _counted(documents: int, tokens: int) -> str:
    return f"{documents:,} document{'s' * (documents != 1)}, {tokens:,} tokens"
