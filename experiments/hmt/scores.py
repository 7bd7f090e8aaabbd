"""What the HMT experiments measure: losses of long texts, and bytes of memories."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32

from experiments.lab.measure import tree_bytes
from memjax import evaluation
from memjax.data import Split, TokenisedDocument, Tokenizer, load_tokens
from memjax.evaluation import TokenLosses
from memjax.evaluation.provenance import device_name
from memjax.models import LanguageModel
from memjax.models.base import Model
from memjax.models.language_model.windowed import limit_attention

# Segments that are read in one call.
TOGETHER = 16


def state_bytes(model: Model, tokens: int | None = None) -> int:
    """Bytes of the memory of one text; of `tokens` where they are kept."""
    state = jax.eval_shape(lambda: model.init_state(1, tokens))
    return tree_bytes(state)


def equal_window(backbone: LanguageModel, size: int, sinks: int = 0) -> int:
    """Tokens of the window whose state has as many bytes, not fewer, with its sinks."""
    least = max(1, sinks)
    one, two = (
        state_bytes(limit_attention(backbone, w, sinks)) for w in (least, least + 1)
    )
    return max(least, least - (one - size) // (two - one))


def documents(
    source: str, tokenizer: Tokenizer, split: Split, tokens: int, segment: int
) -> tuple[TokenisedDocument, ...]:
    """Documents cut to whole segments, at most so many tokens, and one to predict."""
    cut = []
    for document in load_tokens(source, tokenizer, split):
        size = min(tokens, len(document.tokens) - 1) // segment * segment
        if size:
            cut.append(
                document._replace(tokens=np.asarray(document.tokens[: size + 1]))
            )
    if not cut:
        raise ValueError(f"no document of {source!r} has a segment of {segment} tokens")
    return tuple(cut)


def score(
    model: Model, texts: Sequence[TokenisedDocument], segment: int
) -> tuple[TokenLosses, float]:
    """Losses of whole texts, and the seconds that reading them took."""
    began = time.monotonic()
    losses = evaluation.token_losses(
        model, texts, segment=TOGETHER * segment, batch_size=min(4, len(texts))
    )
    return losses, time.monotonic() - began


class Scored(NamedTuple):
    """Losses of texts, and how they came about.

    Attributes:
        losses: of all texts.
        seconds: that they took together.
        devices: that they were scored on; calls on several machines may share a folder.
    """

    losses: TokenLosses
    seconds: float
    devices: list[str]


def score_once(
    prepare: Callable[[], Callable[[TokenisedDocument], TokenLosses]],
    texts: Sequence[TokenisedDocument],
    folder: Path,
) -> Scored:
    """Scores texts, each once for all calls.

    Args:
        prepare: gives what scores a text; not called where nothing is left to score.
        texts: of several lengths.
        folder: of this model alone.
    """
    score_text = None
    for text in texts:
        file = _file(folder, text)
        if file.exists():
            continue
        score_text = prepare() if score_text is None else score_text
        began = time.monotonic()
        losses = score_text(text)
        spent = time.monotonic() - began
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        with partial.open("wb") as stream:
            np.savez(stream, nll=losses.nll[0], seconds=spent, device=device_name())
        partial.replace(file)
        print(f"  {text.name}: {spent:.0f} s", flush=True)
    found = [np.load(_file(folder, text)) for text in texts]
    return Scored(
        joined(texts, [x["nll"] for x in found]),
        sum(float(x["seconds"]) for x in found),
        sorted({str(x["device"]) for x in found}),
    )


def scoring(model: Model, segment: int) -> Callable[[TokenisedDocument], TokenLosses]:
    """What scores one text with a model."""
    return lambda text: score(model, [text], segment)[0]


def are_scored(texts: Sequence[TokenisedDocument], folder: Path) -> bool:
    """Whether all texts were scored into a folder."""
    return all(_file(folder, text).exists() for text in texts)


def joined(
    texts: Sequence[TokenisedDocument], nll: Sequence[Float32[np.ndarray, " _"]]
) -> TokenLosses:
    """Losses of texts from those of each; behind a text's end there are none."""
    longest = max(len(text.tokens) - 1 for text in texts)
    found, mask = np.zeros((2, len(texts), longest), np.float32)
    for row, one in enumerate(nll):
        found[row, : len(one)], mask[row, : len(one)] = one, 1
    kinds = tuple(text.kind for text in texts)
    return TokenLosses(found, mask, kinds, tuple(text.name for text in texts))


def _file(folder: Path, text: TokenisedDocument) -> Path:
    tokens = np.ascontiguousarray(text.tokens, np.int32)
    return folder / f"{hashlib.sha256(tokens.tobytes()).hexdigest()[:16]}.npz"


def by_kind(losses: Mapping[str, TokenLosses], lengths: Sequence[int]) -> dict:
    """Perplexity of the positions before each length, by kind of text and model."""
    kinds = ["all", *dict.fromkeys(next(iter(losses.values())).kinds)]
    return {
        kind: {
            name: [
                evaluation.perplexity(
                    up_to(x, length), kind=None if kind == "all" else kind
                )
                for length in lengths
            ]
            for name, x in losses.items()
        }
        for kind in kinds
    }


def up_to(losses: TokenLosses, length: int) -> TokenLosses:
    """The first `length` positions."""
    return losses._replace(nll=losses.nll[:, :length], mask=losses.mask[:, :length])
