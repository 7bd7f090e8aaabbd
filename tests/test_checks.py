"""Sizes that no computer has are refused, and messages have an end."""

import jax
import pytest

from memjax.checks import check_sizes, listed, require_known, short
from memjax.mechanisms import (
    AttentionConfig,
    ElasticMemoryConfig,
    SlidingWindowConfig,
    TrellisConfig,
)
from memjax.models import ModelConfig


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ElasticMemoryConfig(16, 2, 1, 8, order=30_000),
            "order must be at most",
        ),
        (
            lambda: ElasticMemoryConfig(16, 2, 1, 8, bank_blocks=10**7),
            "bank_blocks must be at most 65,536, got 10000000",
        ),
        (
            lambda: ElasticMemoryConfig(16, 2, 1, 8, order=4096, bank_blocks=60_000),
            "bank_blocks=60000 makes matrices of",
        ),
        (lambda: SlidingWindowConfig(16, 2, 1, 8, window=10**9), "window must be at"),
        (lambda: TrellisConfig(16, 2, 8, 8, chunk_size=10**6), "chunk_size must be at"),
        (lambda: AttentionConfig(16, 2, 1, 8, capacity=10**9), "capacity must be at"),
        (lambda: ModelConfig(num_layers=20_000), "num_layers must be at most 1,024"),
        (lambda: check_sizes(anything=2**31), "anything must be at most 2,147,483,647"),
    ],
)
def test_absurd_sizes_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_values_and_lists_of_names_are_cut():
    assert short("x" * 50) == repr("x" * 50)
    assert short("x" * 10**6) == "'" + "x" * 199 + "... (1,000,002 characters)"
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert short(deep) == "a value of type list"
    assert listed(range(100)).endswith("8, 9 and 90 more")
    with pytest.raises(ValueError) as refused:
        require_known("name", "x" * 10**6, ("a",))
    assert len(str(refused.value)) < 300


def test_the_largest_memory_of_elastic_memory_is_no_absurd_size():
    """Its table 3 has 16x, order 8,640."""
    state = jax.eval_shape(
        lambda: ElasticMemoryConfig(16, 2, 1, 8, order=8640).build().init_state(1)
    )
    assert state.keys.shape == (1, 1, 8640, 8)
