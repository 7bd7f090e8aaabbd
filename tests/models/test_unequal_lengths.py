"""Texts of unequal length in one batch leave the memories that each alone would."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memjax.models import (
    HMTConfig,
    MPlusConfig,
    ReReadWindow,
    add_hmt,
    add_mplus,
    add_rmt,
)
from tests import tiny

T, LENGTHS = 11, (10, 5, 0)
TOKENS = tiny.tokens(1, len(LENGTHS), T)
MEMORY: Any = dict(
    num_memory_tokens=2,
    pool_size=4,
    chunk_size=4,
    min_chunk_size=1,
    num_retrieved=2,
    store_size=8,
    key_dim=2,
)


def build(name) -> Any:
    key = jax.random.key(0)
    match name:
        case "hmt":
            config = HMTConfig(segment_length=4, num_sensory_tokens=1, num_memories=3)
            return add_hmt(tiny.make_llama(num_layers=1), config, key=key)
        case "rmt":
            return add_rmt(tiny.make_llama(num_layers=1), 4, key=key)
        case "reread":
            return ReReadWindow(tiny.make_llama(num_layers=1), reread=5, segment=4)
        case _:
            return add_mplus(
                tiny.make_llama(num_layers=1), MPlusConfig(**MEMORY, rank=2), key=key
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hmt", "rmt", "mplus", "reread"])
def test_ragged_features_equal_single_rows(name):
    model = tiny.drawn(lambda: build(name))

    def element(tree, b):
        return jax.tree.map(lambda leaf: leaf[b], tree)

    empty = model.init_state(len(LENGTHS))
    state, features = model.features(empty, TOKENS, lengths=jnp.array(LENGTHS))
    tiny.assert_equal(element(state, 2), element(empty, 2))
    # The longer text in two calls, so that one program reads both.
    alone, found = empty, []
    for b in (1, 0):
        piece = TOKENS[:, 5 * len(found) :][:, :5]
        alone, part = model.features(alone, piece)
        found.append(part)
        expected = jnp.concatenate(found, axis=1)[b]
        tiny.assert_close(element(state, b), element(alone, b), 2e-5)
        tiny.assert_close(features[b, : LENGTHS[b]], expected, 2e-5)
