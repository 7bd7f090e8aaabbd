"""Texts of unequal length in one batch leave the memories that each alone would."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from memjax.models import HMTConfig, MPlusConfig, hmt, mplus, rmt
from tests import tiny

T, LENGTHS = 11, (11, 6, 0)
TOKENS = tiny.tokens(1, len(LENGTHS), T)
MEMORY: Any = dict(
    tokens=2, pool=4, chunk=4, least_chunk=1, retrieved=2, store=8, key_dim=2
)


def build(name) -> Any:
    key = jax.random.key(0)
    match name:
        case "hmt":
            config = HMTConfig(segment=4, sensory=1, memories=3)
            return hmt(tiny.llama(), config, key=key)
        case "rmt":
            return rmt(tiny.llama(), 4, key=key)
        case _:
            return mplus(tiny.llama(), MPlusConfig(**MEMORY, rank=2), key=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hmt", "rmt", "mplus"])
def test_a_batch_element_reads_its_own_tokens_alone(name):
    model = build(name)
    element = lambda tree, b: jax.tree.map(lambda leaf: leaf[b], tree)
    empty = model.init_state(len(LENGTHS))
    state, features = model.features(empty, TOKENS, lengths=jnp.array(LENGTHS))
    tiny.assert_equal(element(state, 2), element(empty, 2))
    for b, length in enumerate(LENGTHS[:2]):
        alone, expected = model.features(empty, TOKENS[:, :length])
        tiny.assert_close(element(state, b), element(alone, b), 2e-5)
        tiny.assert_close(features[b, :length], expected[b], 2e-5)
