"""HMT's search in bfloat16, as the published program computes it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.models import HMTConfig
from memjax.models.hmt.retrieval import search
from memjax.models.hmt.state import Memories
from memjax.models.hmt.weights import RetrievalWeights, Weights
from tests import tiny

B, N, E, D = 3, 4, 16, 8


def rounded(x):
    return np.asarray(x, np.float32).astype(jnp.bfloat16).astype(np.float32)


def test_every_product_of_a_search_in_bfloat16_is_rounded():
    learned = RetrievalWeights(tiny.draw(0, E), tiny.draw(1, E, D), tiny.draw(2, E, D))
    weights = Weights(tiny.llama(), tiny.draw(3, E), learned)
    bank, summary = tiny.draw(4, B, N, E), tiny.draw(5, B, E)
    count = jnp.array([0, 2, N], jnp.int32)
    none = jnp.asarray(np.zeros((B, E), np.float32)), np.zeros((B, 0), np.int32)
    memories = Memories(bank, count, none[0], jnp.asarray(none[1]))
    config = HMTConfig(segment_length=4, num_sensory_tokens=0, num_memories=N)
    low = dataclasses.replace(config, retrieval_dtype="bfloat16")
    find = jax.jit(search, static_argnums=0)
    found, scores = map(np.asarray, find(low, weights, memories, summary))
    bank, count = np.asarray(bank), np.asarray(count)
    assert found.dtype == scores.dtype == jnp.float32
    queries = rounded(rounded(summary) @ rounded(learned.query))
    keys = rounded(rounded(bank) @ rounded(learned.key))
    products = rounded(np.einsum("bd,bnd->bn", queries, keys))
    products = rounded(products * np.float32(D**-0.5))
    for b in range(1, B):
        new = slice(N - int(count[b]), N)
        share = np.exp(products[b, new] - products[b, new].max())
        share = share / share.sum()
        np.testing.assert_allclose(scores[b, new], share, rtol=4e-3, atol=1e-5)
        expected = rounded(rounded(share) @ rounded(bank[b, new]))
        np.testing.assert_allclose(found[b], expected, rtol=1e-2, atol=1e-2)
        np.testing.assert_array_equal(found[b], rounded(found[b]))
    np.testing.assert_array_equal(found[0], weights.initial_memory)
    exact, _ = find(config, weights, memories, summary)
    assert 1e-4 < np.abs(exact - found)[1:].max() < 0.5


@pytest.mark.slow  # Fast tests are also run with all annotations checked.
def test_another_format_is_refused():
    with pytest.raises(ValueError, match="retrieval_dtype must be one of .*float16"):
        HMTConfig(retrieval_dtype="float16")  # pyright: ignore[reportArgumentType]
