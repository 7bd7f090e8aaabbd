"""M+'s layers: what memory is kept of them, and what a text begins with."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.layers import normalize
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.layers import write_layer
from memjax.models.mplus.weights import init_bos
from tests import tiny

B, V, D, L, K, C = 2, 19, 8, 2, 2, 4
SIZES = ModelConfig(
    mechanisms=(AttentionConfig(D, 2, 1, 4, capacity=64),),
    num_layers=L,
    vocab_size=V,
    model_dim=D,
    hidden_dim=12,
    dtype="float32",
    remat=False,
)
BACKBONE = tiny.drawn(lambda: LanguageModel(SIZES, key=jax.random.key(0)))
TOKENS = np.random.default_rng(1).integers(0, V, (B, C), np.int32)


@functools.cache
def build(stored):
    config = MPlusConfig(
        num_memory_tokens=K,
        pool_size=6,
        chunk_size=C,
        min_chunk_size=1,
        num_retrieved=0,
        stored=stored,
        rank=2,
    )
    model = add_mplus(BACKBONE, config, key=jax.random.key(2))
    model.position.set_value(tiny.draw(3, D))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, C])
def test_layer_inputs_are_previous_outputs(count):
    """Beside the position, which is added before every layer."""
    pair, tokens = [build("output"), build("input")], TOKENS[:, :count]
    memory = tiny.draw(4, B, L, K, D)
    made, given = (
        np.asarray(tiny.method(m, "compress", m.init_state(B), tokens, memory))
        for m in pair
    )
    memory, embedded = np.asarray(memory), np.asarray(BACKBONE.embed(tokens))
    new, p = min(count, K), np.asarray(pair[0].position.get_value())[None, None]
    close = functools.partial(chex.assert_trees_all_close, rtol=2e-5, atol=2e-5)
    close(given[:, 1:, -new:], made[:, :-1, -new:] + p[None])
    close(given[:, 0, -new:], embedded[:, -new:] + p)
    # Fewer tokens than K: the last old rows come along.
    close(given[:, :, : K - new], memory[:, :, new:] + p[None])


@pytest.mark.slow
def test_bos_equals_first_position_states():
    bos = nnx.jit(init_bos)(BACKBONE)
    mean = np.asarray(BACKBONE.embedding.get_value()).mean(axis=0)
    np.testing.assert_allclose(bos[0], mean, rtol=1e-6, atol=1e-7)
    _, expected = tiny.method(
        BACKBONE, "read", BACKBONE.init_state(1), mean[None, None]
    )
    last, at = BACKBONE.blocks[-1].parameters(), jnp.zeros((1, 1), jnp.int32)

    @jax.jit
    def after(x):
        y = write_layer(BACKBONE.config, last, x[None, None], None, at, 1)
        return normalize(BACKBONE.norm.get_value(), y, BACKBONE.config.norm_epsilon)

    np.testing.assert_allclose(after(bos[-1]), expected, rtol=1e-4, atol=1e-5)
