"""The distribution that is drawn from, against transformers' own processors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.models import Sampling, sampling
from memjax.models.sampling import Seen, Settings, draw

B, V = 3, 50


def rows(seed: int = 0) -> np.ndarray:
    logits = 3 * np.random.default_rng(seed).standard_normal((B, V))
    # Ties, within the kept tokens and at their end.
    logits[1] = np.round(logits[1])
    logits[2] = 0.25
    return logits.astype(np.float32)


def mask(tokens: np.ndarray, size: int = V) -> jax.Array:
    """Whether each token is in a row."""
    return jnp.asarray([np.isin(np.arange(size), row) for row in tokens])


def filtered(settings: Sampling, logits: np.ndarray, read: np.ndarray) -> np.ndarray:
    """The logits that a token is drawn from."""
    arrays = Settings.of(settings)
    seen, scores = Seen.of(settings, mask(read)), jnp.asarray(logits)
    if seen is not None:
        scores = sampling._penalised(scores, arrays, seen)
    return np.asarray(sampling._likeliest(scores / arrays.temperature, arrays))


@pytest.mark.parametrize(
    "options",
    [
        dict(top_k=7),
        dict(top_k=99),
        dict(top_p=0.5),
        dict(top_p=0.97, temperature=0.6),
        dict(top_k=20, top_p=0.95, temperature=0.7),
        dict(min_p=0.1),
        dict(min_p=0.05, top_k=10, top_p=0.9, temperature=1.3),
        dict(repetition_penalty=1.3),
        dict(repetition_penalty=0.8, top_p=0.8),
    ],
)
def test_logits_are_those_of_transformers(options):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    there = pytest.importorskip("transformers.generation.logits_process")
    # In the order of `GenerationMixin._get_logits_processor`.
    kinds = {
        "repetition_penalty": there.RepetitionPenaltyLogitsProcessor,
        "temperature": there.TemperatureLogitsWarper,
        "top_k": there.TopKLogitsWarper,
        "top_p": there.TopPLogitsWarper,
        "min_p": there.MinPLogitsWarper,
    }
    read = np.random.default_rng(1).integers(0, V, (B, 12))
    for seed in range(4):
        logits = rows(seed)
        expected = torch.from_numpy(logits)
        for name, kind in kinds.items():
            if name in options:
                expected = kind(options[name])(torch.from_numpy(read), expected)
        found = filtered(Sampling(**options), logits, read)
        expected = expected.numpy()
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
        # As many of equal logits: which, PyTorch's sort leaves open.
        np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-6)


def test_of_tied_logits_top_p_keeps_the_fewest():
    kept = np.isfinite(
        filtered(Sampling(top_p=0.5), np.zeros((1, V)), np.zeros((1, 0)))
    )
    assert kept[0].tolist() == [False] * 25 + [True] * 25


def test_top_p_of_one_leaves_nothing_out():
    """Not even tokens whose probability is 0 in float32."""
    logits = np.array([[-300.0, -200.0, 0.0, 1.0]])
    left = filtered(Sampling(top_k=4), logits, np.zeros((1, 0)))
    np.testing.assert_array_equal(left, logits)


def test_presence_penalty_counts_the_answer_alone():
    """As OpenAI and vLLM define it: once for each token that was drawn."""
    settings = Sampling(presence_penalty=0.5, repetition_penalty=2.0)
    seen: Any = Seen.of(settings, mask(np.array([[0]]), 4))
    seen = seen.after(jnp.array([2])).after(jnp.array([2]))
    logits = jnp.array([[1.0, 1.0, 1.0, -1.0]])
    found = sampling._penalised(logits, Settings.of(settings), seen)
    assert found.tolist() == [[0.5, 1.0, 0.0, -1.0]]


def test_tokens_that_the_tokenizer_lacks_are_not_drawn():
    logits = jnp.broadcast_to(jnp.array([0.0, 1.0, 9.0]), (200, 3))
    for settings in (Sampling(), Sampling(0.0), Sampling(top_p=0.9)):
        tokens = draw(logits, jax.random.key(0), Settings.of(settings, 2))
        assert tokens.max() == 1
