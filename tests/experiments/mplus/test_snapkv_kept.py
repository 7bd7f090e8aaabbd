"""Which tokens SnapKV keeps: the count follows the cache that answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.mplus.retention import kept
from experiments.mplus.retention.samples import Samples
from memjax.data import Question
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.snapkv import SnapKVConfig, with_snapkv

C, B, CHUNKS = 8, 2, 3
ATTENTION = AttentionConfig(16, 4, 2, 4, capacity=64)
CONFIG = ModelConfig(
    mechanisms=(ATTENTION,),
    num_layers=1,
    vocab_size=64,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)
SMALL = SnapKVConfig(keep=10, room=C, window=2, kernel=1)
# No token twice: in the first layer its value says which one it is.
TOKENS = np.stack(
    [np.random.default_rng(i).permutation(64)[: C * (CHUNKS + 1)] for i in range(B)]
).astype(np.int32)
BATCH = Samples(
    facts=[Question("", "", "")] * B,
    context=TOKENS[:, :C],
    answers=np.array([[2, 5], [0, 3]], np.int32),
    chunks=TOKENS[:, C:].reshape(B, CHUNKS, C).swapaxes(0, 1),
    prompts=TOKENS[:, :3],
)


@functools.cache
def backbone():
    return LanguageModel(CONFIG, key=jax.random.key(0))


@pytest.mark.slow
def test_origins_are_of_the_tokens_in_the_cache():
    whole, small = backbone(), with_snapkv(backbone(), SMALL)
    tracked = kept.tracking(backbone(), SMALL, SMALL.keep + SMALL.room)
    states = [model.init_state(B) for model in (whole, small)]
    state = tuple(block.functions.init_state(B) for block in tracked.blocks)
    for i in range(CHUNKS + 1):
        chunk = jnp.asarray(TOKENS[:, i * C : (i + 1) * C])
        states = [
            model.features(old, chunk)[0]
            for model, old in zip((whole, small), states, strict=True)
        ]
        state = tracked.read(state, tracked.embed(chunk))[0]
    full, expected = states[0][0], states[1][0]
    (found,) = state
    np.testing.assert_allclose(found.cache.values, expected.values, atol=1e-6)
    origins = np.asarray(found.origins[:, : SMALL.keep])
    by_heads = (B, -1, origins.shape[2], ATTENTION.head_dim)
    values, compressed = (
        np.asarray(cache.values).reshape(by_heads) for cache in (full, expected)
    )
    np.testing.assert_allclose(
        np.take_along_axis(values, origins[..., None], axis=1),
        compressed[:, : SMALL.keep],
        atol=1e-6,
    )
    # Heads keep different tokens, or this would show little.
    assert np.any(origins[..., 0] != origins[..., 1])


@pytest.mark.slow
def test_shares_are_of_the_sentence_and_the_chunks():
    shares = kept.streamed(backbone(), BATCH, SMALL, (0, 1, 3))
    # The first chunk fits whole.
    np.testing.assert_array_equal(shares[0], 1.0)
    assert np.all((shares >= 0) & (shares <= 1)) and shares[2, 1] < 1
    asked = kept.asked(backbone(), BATCH, SMALL, (0, 3))
    np.testing.assert_array_equal(asked[0], 1.0)
    # The question is kept besides: ten of the 32 tokens before it.
    assert asked.shape == (2, 3) and 0 < asked[1, 1] + asked[1, 2] <= 10 / C


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="after must rise from 0 or more"):
        kept.Config(after=(2, 1))
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        kept.Config(window=0)
