"""What the M+ experiments on perplexity share: models, texts, losses, paired gains.

Shapes: B batch, P tokens of the prompt, which is not scored, T tokens.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32, Int32

from experiments.hmt import common
from experiments.mplus.models import load_trained
from experiments.mplus.retention.config import SCALES
from experiments.mplus.retention.variants import with_store
from memjax.data import TokenisedDocument, Tokenizer
from memjax.evaluation.drawing import drawing
from memjax.models import LanguageModel
from memjax.models.loss import target_nll
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.read import ReadOptions, read_closed
from memjax.training.finetune import finetune

#: Sizes that `memjax finetune mplus-smollm2-135m` trains.
MEMORY = SCALES["cpu"].memory


class Models(NamedTuple):
    """Models around one backbone.

    Attributes:
        trained: by name; their backbone is the same object, kept once.
        backbone: as it came.
        tokenizer: of all.
    """

    trained: dict[str, MPlus]
    backbone: LanguageModel
    tokenizer: Tokenizer


class Excerpt(NamedTuple):
    """A part of a document.

    Attributes:
        name: of the document.
        kind: of the document.
        tokens: of the part.
    """

    name: str
    kind: str
    tokens: Int32[np.ndarray, " T"]


def load(folders: Mapping[str, Path], backbone: str, run_dir: Path) -> Models:
    """The trained models of some folders, or a backbone alone where there is none.

    Args:
        folders: of runs of `memjax finetune`, by the name of the option.
        backbone: as in `experiments.hmt.common.Config`; ignored if there are folders.
        run_dir: where a tiny backbone is kept.

    Raises:
        ValueError: if a folder holds no M+ or MemoryLLM, or one of another backbone or
            tokenizer than the first.
    """
    if not folders:
        settings = common.Config(backbone=backbone, run_dir=run_dir)
        return Models({}, *common.load_backbone(settings))
    trained: dict[str, MPlus] = {}
    first: tuple[MPlus, Tokenizer, str] | None = None
    for name, folder in folders.items():
        model, tokenizer = load_trained(name, folder)
        parameters = finetune.digest(model.backbone)
        first = first or (model, tokenizer, parameters)
        ours = (tokenizer.digest, parameters, model.backbone.config)
        if ours != (first[1].digest, first[2], first[0].backbone.config):
            raise ValueError(
                f"{name}={str(folder)!r} must have the backbone and tokenizer of the "
                "others, it has another"
            )
        model = model.replace(backbone=first[0].backbone)
        trained[name] = model
    assert first is not None
    return Models(trained, first[0].backbone, first[1])


def with_room(model: MPlus, tokens: int) -> MPlus:
    """The same model, whose store has no more room than a text of so many tokens needs.

    Nothing leaves it that would have stayed in a larger one. Memory that a checkpoint
    brings keeps its store.
    """
    config = model.config
    if not config.num_retrieved or model.initial is not None:
        return model
    rows = max(
        tokens // config.chunk_size * config.num_memory_tokens - config.pool_size,
        config.min_store_size,
    )
    return with_store(model, min(config.store_size, rows))


def excerpts(
    documents: Sequence[TokenisedDocument], count: int, length: int
) -> list[Excerpt]:
    """Parts of documents in turn, which do not overlap.

    A document is cut into equal stretches, as many as are taken of it; a part is the
    end of one, so that none begins with a title page.

    Args:
        documents: to take from; those with fewer than `length` tokens give none.
        count: how many, at least 1.
        length: tokens of each, at least 1.

    Raises:
        ValueError: if the documents have fewer.
    """
    room = [len(document.tokens) // length for document in documents]
    if sum(room) < count:
        raise ValueError(
            f"texts must be at most {sum(room)} of {length} tokens from these "
            f"documents, got {count}"
        )
    taken, order = [0] * len(room), []
    while len(order) < count:
        for i in range(len(room)):
            if taken[i] < room[i] and len(order) < count:
                order.append((i, taken[i]))
                taken[i] += 1
    parts = []
    for i, turn in order:
        document = documents[i]
        end = (turn + 1) * (len(document.tokens) // taken[i])
        tokens = np.asarray(document.tokens[end - length : end])
        parts.append(Excerpt(document.name, document.kind, tokens))
    return parts


def losses(
    model: LanguageModel | MPlus,
    memory: Any,
    tokens: Int32[np.ndarray, "B T"],
    prompt: int,
    *,
    leaks: bool = False,
) -> Float32[np.ndarray, "B T_P"]:
    """Nats of the tokens after the prompt; the memory is not changed.

    Args:
        model: whose memory it is.
        memory: its state; of M+ without an open chunk.
        tokens: the prompt and what is scored.
        prompt: P in [1, T); of M+ the first P tokens choose what is retrieved.
        leaks: all tokens that are read choose them instead, as in the published
            program: a token's score has then seen the token.
    """
    scored = _losses(
        *nnx.split(model),
        memory,
        jnp.asarray(tokens),
        prompt,
        tokens.shape[1] - 1 if leaks else prompt,
    )
    return np.asarray(scored)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _losses(graph, params, memory, tokens, prompt, choosing):
    model = nnx.merge(graph, params)
    inputs, targets = tokens[:, :-1], tokens[:, prompt:]
    if isinstance(model, MPlus):
        given = ReadOptions(prompt_length=choosing)
        _, features, _ = read_closed(model.weights, memory, inputs, given)
    else:
        _, features = model.features(memory, inputs)
    scored = features[:, prompt - 1 :]
    return target_nll(model.logits, scored, targets, model.vocab_size)


def plot(
    curves: Mapping[str, Sequence[float]],
    saved: Mapping[str, Sequence[Mapping[str, float]]],
    tokens: Sequence[int],
    path: Path,
    *,
    title: str,
    dotted: Sequence[str],
    source: str = "",
) -> None:
    """Perplexity by how much was injected, and below it what injecting saves.

    Args:
        curves: perplexities, one for each of `tokens`, by name.
        saved: intervals of what is saved, as many.
        tokens: numbers of injected tokens.
        path: the PNG to write.
        title: of the plot.
        dotted: names whose lines are dotted.
        source: device and commit, small in a corner.
    """
    positions = np.arange(len(tokens))
    with drawing(
        path, rows=2, size=(9, 7.5), title=title, source=source, sharex=True
    ) as drawn:
        top, bottom = drawn.grid[:, 0]
        for i, (name, values) in enumerate(curves.items()):
            dots: Any = {"linestyle": ":"} if name in dotted else {}
            drawn.line(top, positions, values, name, i, **dots)
            mean, low, high = (
                np.asarray([found[part] for found in saved[name]])
                for part in ("mean", "low", "high")
            )
            # Side by side, so that intervals do not hide each other.
            beside = positions + 0.06 * (i - (len(curves) - 1) / 2)
            errors = [mean - low, high - mean]
            drawn.line(
                bottom, beside, mean, name, i, errors=errors, named=False, **dots
            )
        bottom.axhline(0, color="0.3", linewidth=1)
        bottom.set_xticks(positions, [f"{count:,}" for count in tokens])
        bottom.set(
            xlabel="tokens injected before",
            ylabel="nats saved against\nnothing injected",
        )
        top.set(ylabel="perplexity")
