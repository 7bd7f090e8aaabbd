"""What the HMT experiments measure: losses of long texts, baselines, paired gains."""

import math
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memjax import evaluation
from memjax.data import Split, TokenisedDocument, Tokenizer, load_tokens
from memjax.evaluation import Losses
from memjax.evaluation.statistics import standard_error
from memjax.models import LanguageModel
from memjax.models.base import Model
from memjax.models.language_model.windowed import with_window

# Segments that are read in one call.
TOGETHER = 16
# Tokens of a block, whose mean gain is one observation.
BLOCK = 1024


class Disjoint(nnx.Module):
    """The backbone on segments that know nothing of each other: no memory at all.

    What the official program compares HMT with; calls take whole segments.
    """

    def __init__(self, backbone: LanguageModel, segment: int):
        self.backbone = backbone
        self.window = segment
        self.vocab_size = backbone.vocab_size
        self.width = backbone.width
        self.first_scored = 0
        self.can_pad = False

    def init_state(self, batch: int, capacity: int | None = None):
        """A memory without content, whatever the capacity: only the batch size."""
        return (jnp.zeros(batch),)

    def features(self, state, tokens, *, lengths=None):
        """Reads every segment as a text of its own.

        Raises:
            ValueError: on lengths: calls take whole segments.
        """
        if lengths is not None:
            raise ValueError("lengths must be None, got some")
        batch, length = tokens.shape
        x = self.backbone.embed(tokens.reshape(-1, self.window))
        return state, self.backbone.encode(x).reshape(batch, length, -1)

    def logits(self, features):
        """As the backbone's."""
        return self.backbone.logits(features)

    def __call__(self, state, tokens):
        """Next-token logits, each segment's from its own tokens."""
        state, features = self.features(state, tokens)
        return state, self.logits(features)

    def reset(self, state, mask):
        """The state itself: there is nothing to clear."""
        return state

    def remaining(self, state):
        """None: every segment starts afresh."""
        return None

    def reserve(self, state, tokens):
        """The state itself: it holds nothing."""
        return state


def state_bytes(model: Model) -> int:
    """Bytes of the memory of one text."""
    state = jax.eval_shape(lambda: model.init_state(1))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def equal_window(backbone: LanguageModel, size: int) -> int:
    """Tokens of the window whose state has as many bytes, not fewer."""
    one, two = (state_bytes(with_window(backbone, w)) for w in (1, 2))
    return max(1, -(-(size - (2 * one - two)) // (two - one)))


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
) -> tuple[Losses, float]:
    """Losses of whole texts, and the seconds that reading them took."""
    began = time.monotonic()
    losses = evaluation.losses(
        model, texts, segment=TOGETHER * segment, batch_size=min(4, len(texts))
    )
    return losses, time.monotonic() - began


def by_kind(losses: Mapping[str, Losses], lengths: Sequence[int]) -> dict:
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


def up_to(losses: Losses, length: int) -> Losses:
    """The first `length` positions."""
    return losses._replace(nll=losses.nll[:, :length], mask=losses.mask[:, :length])


def gain(base: Losses, model: Losses, length: int) -> dict[str, float]:
    """Nats a token that a model saves up to a length, paired over blocks of text."""
    base, model = up_to(base, length), up_to(model, length)
    starts = np.arange(0, base.nll.shape[1], BLOCK)
    saved = np.add.reduceat(base.nll - model.nll, starts, axis=1)
    tokens = np.add.reduceat(base.mask, starts, axis=1)
    values = saved[tokens > 0] / tokens[tokens > 0]
    return {
        "nats": float(saved.sum() / tokens.sum()),
        "standard_error": standard_error(values),
        "perplexity_change": float(math.expm1(-saved.sum() / tokens.sum())),
        "blocks": len(values),
    }
