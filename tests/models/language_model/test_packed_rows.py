"""A model reads rows of several documents as it reads each alone."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.mechanisms import (
    AttentionConfig,
    ElasticMemoryConfig,
    GatedDeltaNetConfig,
    HybridConfig,
    SlidingWindowConfig,
    TrellisConfig,
)
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.config import Architecture
from memjax.models.language_model.inputs import start_multiple
from tests import tiny

T, V, D = 12, 19, 16
HYBRID = ModelConfig(
    mechanisms=(
        AttentionConfig(D, 4, 2, 4, capacity=T),
        SlidingWindowConfig(D, 4, 2, 4, window=3),
        TrellisConfig(D, 2, 4, 4, slots=5, chunk_size=4),
    ),
    num_layers=3,
    vocab_size=V,
    model_dim=D,
    hidden_dim=24,
    dtype="float32",
    remat=False,
)
LEARNED = dataclasses.replace(
    HYBRID,
    mechanisms=(AttentionConfig(D, 4, 2, 4, capacity=T, rope_theta=None),),
    num_layers=2,
    architecture=Architecture(
        norm="layer", feed_forward="relu", learned_positions=T + 2, embedding_dim=12
    ),
)
CONFIGS = {"hybrid": HYBRID, "learned": LEARNED}
STARTS = np.zeros((2, T), bool)
STARTS[0, [0, 8]] = STARTS[1, [4]] = True
# Row, begin and end; a row's first token begins a document whatever is said there.
DOCUMENTS = ((0, 0, 8), (0, 8, 12), (1, 0, 4), (1, 4, 12))


@functools.cache
def build(name):
    return tiny.drawn(lambda: LanguageModel(CONFIGS[name], key=jax.random.key(0)))


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_equal_single_documents(name):
    model = build(name)
    tokens = np.random.default_rng(0).integers(0, V, (2, T), np.int32)
    x = np.asarray(tiny.method(model, "embed", tokens))
    packed = np.asarray(tiny.method(model, "encode_packed", x, jnp.asarray(STARTS)))
    rows = [np.roll(x[row], -begin, axis=0) for row, begin, _ in DOCUMENTS]
    # Nothing reads ahead: what stands behind a document changes nothing in it.
    alone = np.asarray(tiny.method(model, "encode", np.stack(rows)))
    for (row, begin, end), own in zip(DOCUMENTS, alone, strict=True):
        chex.assert_trees_all_close(
            packed[row, begin:end], own[: end - begin], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (STARTS[:, :8], r"starts must be bool\[2, 12\], as x is, got bool\[2, 8\]"),
        (STARTS.astype(np.int32), r"starts must be bool\[2, 12\].* got int32\[2, 12\]"),
        (np.roll(STARTS, 1, 1), r"multiples of 4 tokens.* got one in row 0 at token 1"),
    ],
)
def test_invalid_starts_are_refused(starts, message):
    with pytest.raises(ValueError, match=message):
        build("hybrid").encode_packed(jnp.ones((2, T, D)), jnp.asarray(starts))


def test_start_multiple():
    memory = TrellisConfig(D, 2, 4, 4, slots=5, chunk_size=6)
    assert start_multiple((*HYBRID.mechanisms, memory)) == 12
    assert start_multiple((GatedDeltaNetConfig(D, 2, 4, 4),)) == 1


SINKS = SlidingWindowConfig(D, 4, 2, 4, window=3, sinks=1)


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (ElasticMemoryConfig(D, 4, 2, 4, block=4, order=4), "got ElasticMemoryConfig;"),
        (SINKS, "got SlidingWindowConfig with sinks=1;"),
        (
            HybridConfig(SINKS, GatedDeltaNetConfig(D, 4, 4, 4)),
            "cleared inside a row, got HybridConfig",
        ),
    ],
)
def test_mechanisms_without_packing_are_refused(mechanism, message):
    with pytest.raises(ValueError, match=message):
        start_multiple((HYBRID.mechanisms[0], mechanism))
