"""Bytes of text: small models learn to predict them, and are scored on other documents.

Models of one width, as those of `mqar`, but larger; an n-gram counted on the training
documents is printed beside their perplexities, for models so small hardly beat it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from experiments.lab.baselines import NGram
from experiments.memories import mqar, small_models
from experiments.memories.small_models import Scale
from memjax import evaluation
from memjax.data import Split, TokenisedDocument, load_tokenizer, load_tokens
from memjax.data.batches.batch import Batch
from memjax.models import ModelConfig

SCALE = Scale(2, 64, 2, 32, 256, 2048, 600, 5e-3)
VOCAB_SIZE = 256
#: For `mqar.of_width`, which makes the models.
TASK = mqar.SMALL._replace(scale=SCALE, vocab_size=VOCAB_SIZE)
#: Bytes scored of each validation document.
SCORED = 16_384
ORDERS = (2, 3, 4)


def measure(
    model: ModelConfig, rate: float, seed: int, scale: Scale = SCALE
) -> dict[str, Any]:
    """Trains, then scores the beginnings of the validation documents.

    Raises:
        FloatingPointError: if the training diverges.
        ValueError: if an update, or the shortest document, has no text as long as that.
    """
    least = min(len(x.tokens) - 1 for x in _validation())
    if (length := scale.context_length) > (most := min(scale.tokens_per_update, least)):
        raise ValueError(f"context_length must be at most {most}, got {length}")
    scale = scale._replace(learning_rate=rate)
    trained, seconds = small_models.train(scale, model, seed, draw, length)
    losses = evaluation.token_losses(
        trained,
        _validation(),
        context_length=scale.context_length,
        tokens_per_call=scale.context_length,
    )
    return {"perplexity": evaluation.perplexity(losses), "cpu_seconds": seconds}


def draw(length: int, seed: int | Array, step: int | Array) -> Batch:
    """Excerpts of the training documents, as all models see them."""
    text = jnp.asarray(text_of("train"))
    key = jax.random.fold_in(jax.random.key(seed), step)
    rows = SCALE.tokens_per_update // length
    start = jax.random.randint(key, (rows,), 0, text.shape[0] - length)
    found = text[start[:, None] + jnp.arange(length + 1)[None]].astype(jnp.int32)
    return Batch(
        tokens=found[:, :-1],
        targets=found[:, 1:],
        mask=jnp.ones((rows, length)),
        reset=jnp.ones(rows, bool),
    )


def ngrams() -> dict[str, float]:
    """Perplexity of n-grams, which have counted all of the training documents."""
    training = [TokenisedDocument("train", "text", text_of("train"))]
    length = SCALE.context_length
    scored = [
        document._replace(tokens=document.tokens[start : start + length + 1])
        for document in _validation()
        for start in range(0, len(document.tokens) - 1, length)
    ]
    return {
        f"{n}-gram": evaluation.perplexity(
            NGram(training, n, VOCAB_SIZE).losses(scored)
        )
        for n in ORDERS
    }


@functools.cache
def text_of(split: Split) -> UInt8[np.ndarray, " T"]:
    """The bytes of all embedded documents of a split, one after the other."""
    documents = load_tokens("embedded", load_tokenizer("bytes"), split)
    return np.concatenate([d.tokens for d in documents]).astype(np.uint8)


@functools.cache
def _validation() -> list[TokenisedDocument]:
    """The beginnings of the validation documents."""
    documents = load_tokens("embedded", load_tokenizer("bytes"), "validation")
    return [x._replace(tokens=np.asarray(x.tokens[: SCORED + 1])) for x in documents]
