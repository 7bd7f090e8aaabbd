"""The store's capacity is what its eviction by frequency needs, neither less nor more.

Against a simulation of the published program's lists, row by row.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from memjax.models.mplus.checkpoints.checkpoint import load_official
from memjax.models.mplus.checkpoints.hf_config import mplus_config_from_hf
from memjax.models.mplus.config import MPlusConfig, survived_evictions

SIZES: dict[str, Any] = dict(
    num_memory_tokens=4, pool_size=16, num_retrieved=4, chunk_size=4, min_chunk_size=1
)


def most_held(batch, retrieved, recalls, decay, start, merges=150):
    """The most rows that the program's lists have, in so many merges."""
    decay, least = np.float32(decay), np.float32(0.01)
    rows = np.array(start, np.float32)
    most = len(rows)
    for _ in range(merges):
        rows = np.append(rows, np.full(batch, recalls, np.float32))
        most = max(most, len(rows))
        left = rows - decay
        if (left > least).sum() > retrieved:
            rows = left[left > least]
    return most


@settings(deadline=None, max_examples=300)
@given(
    tokens=st.integers(1, 4),
    every=st.integers(1, 3),
    retrieved=st.integers(1, 12),
    rates=st.sampled_from(
        [(1.2, 1.0), (3.0, 1.0), (5.0, 1.0), (0.9, 0.3), (2.0, 0.7), (10.0, 0.9)]
    ),
    start=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 7.0]), max_size=9),
)
def test_min_store_size_is_the_largest_occupancy(
    tokens, every, retrieved, rates, start
):
    recalls, decay = rates
    config = MPlusConfig(
        num_memory_tokens=tokens, pool_size=tokens, chunk_size=4, min_chunk_size=1,
        num_retrieved=retrieved, store_size=10_000, eviction="frequency",
        merge_every=every, recalls=recalls, decay=decay,
    )  # fmt: skip
    most = most_held(tokens * every, retrieved, recalls, decay, start)
    assert config.min_store_size_from(start) == max(most, retrieved, tokens)


def test_store_below_the_minimum_is_refused():
    rates: dict[str, Any] = dict(legacy=True, merge_every=1, recalls=3.0, decay=1.0)
    with pytest.raises(ValueError, match="store_size must be at least 16"):
        MPlusConfig(**SIZES, **rates, store_size=12)
    assert MPlusConfig(**SIZES, **rates, store_size=16).min_store_size == 16
    # In float32 a frequency of 0.9 survives three decays of 0.3 and no more.
    assert survived_evictions(1.0, 0.3) == 3 and survived_evictions(0.91, 0.3) == 2


@pytest.mark.parametrize("recalls", [1.0, 1.005, 0.5])
def test_unbounded_store_is_refused(recalls):
    with pytest.raises(ValueError, match=r"recalls must be above decay \+ 0.01, or"):
        MPlusConfig(**SIZES, legacy=True, store_size=1000, recalls=recalls, decay=1.0)
    with pytest.raises(ValueError, match=r"recalls must be at most 100000 \* decay"):
        MPlusConfig(**SIZES, legacy=True, store_size=1000, recalls=1.0, decay=1e-9)


def test_published_sizes_fit_the_programs_store():
    published: dict[str, Any] = dict(
        num_tokens=256, num_blocks=50, num_ltm_blocks=10, ltm_initial_size=5120,
        lora_config={"r": 16, "lora_alpha": 32}, selector_hidden_dim=256,
        initial_rf_when_moving_stm_to_ltm=10, decay_frequency=1,
    )  # fmt: skip

    def stores_of(every, **changes):
        return mplus_config_from_hf(
            published | changes | {"update_ltm_frequency": every}
        ).store_size

    assert (stores_of(60), stores_of(5)) == (153_600, 15_360)
    batch, start = 5 * 256, [0.0] * 5120
    assert stores_of(5) == most_held(batch, 2560, 10, 1, start)
    # Rows that a checkpoint begins with take part.
    assert stores_of(1, initial_rf_when_moving_stm_to_ltm=3) == most_held(
        256, 2560, 3, 1, start
    )
    with pytest.raises(ValueError, match="decay_frequency are recalls and decay: "):
        stores_of(5, initial_rf_when_moving_stm_to_ltm=1)


@pytest.mark.slow
def test_initial_rows_count_in_the_store_size(tmp_path):
    """Recalled often, they are still there when the first merged rows leave."""
    golden = Path(__file__).parents[1] / "golden" / "mplus"
    described = json.loads((golden / "config.json").read_text())
    tensors = load_file(golden / "tiny_model.safetensors")
    often = {f"ltm_recall_frequencies.{i}": np.full(20, 7.0, "f4") for i in range(3)}
    save_file(tensors | often, tmp_path / "often.safetensors")

    def load(config):
        return load_official(tmp_path / "often.safetensors", described, config)

    most = most_held(24, 16, 3.0, 1.0, [7.0] * 20)
    assert load(None).config.store_size == most == 92
    config = dataclasses.replace(
        mplus_config_from_hf(described), eviction="frequency", store_size=91
    )
    with pytest.raises(ValueError, match="store_size must be at least 92, with the"):
        load(config)
