"""Measurements of a model: losses by document, needles, facts, bytes of its state."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float32, PyTree

from memjax import evaluation
from memjax.buckets.writing import replaced
from memjax.data import Split, TokenisedDocument, Tokenizer, load_tokens
from memjax.evaluation import TokenLosses
from memjax.evaluation.provenance import device_name
from memjax.models.base import Model
from memjax.status import Status, say

#: Kinds of documents that are scored; the corpus has manuals for training alone.
KINDS = ("proofs", "code", "prose")


def tree_bytes(tree: PyTree) -> int:
    """Bytes of all arrays, or shapes of arrays, in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def num_parameters(model: nnx.Module) -> int:
    """Learned numbers of a model, or of its shapes."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def state_bytes(model: Model, tokens: int | None = None) -> int:
    """Bytes of the state of one text, after `tokens` where it grows with the text."""
    return tree_bytes(jax.eval_shape(lambda: model.init_state(1, tokens)))


class Scored(NamedTuple):
    """Losses of texts, and their cost.

    Attributes:
        losses: of all texts.
        seconds: wall time of all texts.
        devices: that they were scored on; calls on several machines may share a folder.
    """

    losses: TokenLosses
    seconds: float
    devices: list[str]


def score_text(
    model: Model, segment: int
) -> Callable[[TokenisedDocument], TokenLosses]:
    """The function that scores one text with a model, a segment at a time."""

    def score(text: TokenisedDocument) -> TokenLosses:
        return evaluation.token_losses(
            model, [text], tokens_per_call=segment, batch_size=1
        )

    return score


def score_once(
    prepare: Callable[[], Callable[[TokenisedDocument], TokenLosses]],
    texts: Sequence[TokenisedDocument],
    folder: Path,
) -> Scored:
    """Scores texts, each once for all calls; `folder` is of this model alone.

    `prepare` gives the function that scores a text, and is not called where no text is
    left to score.
    """
    score, files = None, []
    for text in texts:
        tokens = np.ascontiguousarray(text.tokens, np.int32)
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        files.append(file := folder / f"{digest}.npz")
        if file.exists():
            continue
        score = score or prepare()
        began = time.monotonic()
        with Status(f"scoring {text.name}"):
            losses = score(text)
        seconds = time.monotonic() - began
        folder.mkdir(parents=True, exist_ok=True)
        with replaced(file) as stream:
            cost: Any = {"seconds": seconds, "device": device_name()}
            np.savez(stream, nll=losses.nll[0], **cost)
        say(f"  {text.name}: {seconds:.0f} s")
    found = [np.load(file) for file in files]
    return Scored(
        join_losses(texts, [x["nll"] for x in found]),
        sum(float(x["seconds"]) for x in found),
        sorted({str(x["device"]) for x in found}),
    )


def join_losses(
    texts: Sequence[TokenisedDocument], nll: Sequence[Float32[np.ndarray, " _"]]
) -> TokenLosses:
    """Losses of texts from those of each; behind a text's end there are none."""
    longest = max(len(text.tokens) - 1 for text in texts)
    found, mask = np.zeros((2, len(texts), longest), np.float32)
    for row, one in enumerate(nll):
        found[row, : len(one)], mask[row, : len(one)] = one, 1
    kinds = tuple(text.kind for text in texts)
    return TokenLosses(found, mask, kinds, tuple(text.name for text in texts))


def bin_losses(losses: TokenLosses, edges: Sequence[int]) -> list[dict[str, Any]]:
    """Sums of nats and numbers of targets by document and bin of positions, as JSON.

    Any two models are compared in pairs by them, without the texts being read again.
    """
    short = ((0, 0), (0, edges[-1] - losses.nll.shape[1]))
    # In float64, as the sums are of thousands of terms.
    nll = np.pad(losses.nll.astype(np.float64), short)
    nats = np.add.reduceat(nll, edges[:-1], axis=1)
    targets = np.add.reduceat(np.pad(losses.mask, short), edges[:-1], axis=1)
    return [
        {
            "name": losses.documents[row],
            "kind": losses.kinds[row],
            "nats": nats[row].tolist(),
            "targets": targets[row].astype(int).tolist(),
        }
        for row in range(len(nats))
    ]


def binned_losses(
    documents: Sequence[Mapping[str, Any]], bins: tuple[int, int]
) -> TokenLosses:
    """The losses of `bin_losses`, with a bin in the place of a position.

    Perplexities and paired differences are those of the positions. `bins` has the first
    that counts, and the one behind the last.
    """

    def part(name: str) -> Float32[np.ndarray, "D B"]:
        return np.asarray([d[name] for d in documents], np.float32)

    mask = part("targets")
    mask[:, : bins[0]] = mask[:, bins[1] :] = 0
    nll = np.where(mask > 0, part("nats"), 0).astype(np.float32)
    kinds = tuple(d["kind"] for d in documents)
    return TokenLosses(nll, mask, kinds, tuple(d["name"] for d in documents))


def documents_of_kinds(
    source: str, tokenizer: Tokenizer, split: Split, tokens: int, least: int
) -> list[TokenisedDocument]:
    """Documents of all kinds, in order of kind, cut to `tokens` targets each.

    Shorter documents are left out; each kind must have `least`.
    """
    read, found = load_tokens(source, tokenizer, split), []
    for kind in KINDS:
        some = [x for x in read if x.kind == kind and len(x.tokens) > tokens]
        if len(some) < least:
            raise ValueError(
                f"corpus={source!r} must have at least {least} documents of {kind!r} "
                f"with more than {tokens} tokens in its {split} split, got {len(some)}"
            )
        found += [x._replace(tokens=np.asarray(x.tokens[: tokens + 1])) for x in some]
    return found
