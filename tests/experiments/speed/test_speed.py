"""Studies of speed: their numbers add up, one small run of each."""

import jax
import numpy as np
import pytest

from experiments.lab.timing import Round
from experiments.speed import (
    generation,
    official_hmt,
    official_mplus,
    official_mplus_programs,
    shapes,
)
from experiments.speed.official_mplus_programs import Memory
from memjax.models import HMTConfig, add_mplus

SHAPE = shapes.Shape(1, 16, 2, 1, 24, 40, False)
MEMORY = Memory(
    tokens=4, chunk=16, pool=8, retrieved=4, store=24, key_dim=8, merge_every=2
)


def generated(first, whole, tokens):
    """Of one implementation: a first round that is not timed, and three more."""

    def step(scale):
        seconds = {"first": scale * first, "whole": scale * whole}
        return seconds | {"tokens": tokens}

    untimed = Round(9.0, step(9), 100.0)
    return [untimed, *(Round(1.0, step(scale), 200.0) for scale in (1, 0.5, 2))]


def test_generation_compares_times_and_tokens(monkeypatch, tmp_path):
    prompts = generation.Prompts(np.zeros((2, 3), np.int32), (3, 2))
    found = {
        "memjax": generated(1.0, 2.0, [[1, 2, 3, 4], [1, 2, 3, 5]]),
        "transformers": generated(2.0, 8.0, [[1, 2, 3, 4], [1, 2, 3, 4]]),
    }
    monkeypatch.setattr(generation, "passages", lambda *_: prompts)
    monkeypatch.setattr(generation, "time_processes", lambda *_: found)
    row = generation.time_row(tmp_path, 2, 1)["implementations"]
    assert row["memjax"]["whole_speedup"] == {"transformers": 4.0}
    assert row["memjax"]["tokens_per_s"] == 2 * generation.NEW_TOKENS / 2.0
    assert row["memjax"]["equal_tokens"] == 7 / 8


def test_speedups_leave_the_first_round_out(monkeypatch, tmp_path):
    def rounds(make, arguments, *_):
        def step(name, scale):
            seconds = scale * {"official": 8.0, "official_fused": 4.0}.get(name, 1.0)
            return Round(seconds, {"inject": seconds, "read": seconds}, 1.0)

        return {n: [step(n, scale) for scale in (9, 1, 1, 2)] for n in arguments}

    monkeypatch.setattr(official_mplus, "time_processes", rounds)
    ours = official_mplus.measure(tmp_path, Memory())["implementations"]["ours"]
    assert ours["inject"]["median_s"] == 1.0
    assert ours["read"]["speedup"] == {"official": 8.0, "official_fused": 4.0}
    monkeypatch.setattr(official_hmt, "time_processes", rounds)
    row = official_hmt.measure(tmp_path, "tiny", 1)["implementations"]
    assert row["keep"]["speedup"] == {"official": 8.0}
    assert row["official"]["median_s"] == 8.0


@pytest.mark.slow
def test_our_step_of_hmt_trains():
    memory = HMTConfig(segment_length=8, num_sensory_tokens=2, retrieval_dim=8)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 16), np.int32)
    step = official_hmt.ours(SHAPE, memory, tokens)
    losses = [step() for _ in range(3)]
    assert np.isfinite(losses).all() and losses[2] < losses[0]


@pytest.mark.slow
def test_mplus_times_both_acts(tmp_path):
    round_ = official_mplus.make("ours", MEMORY, tmp_path)
    for _ in range(2):
        seconds = round_()
        assert set(seconds) == {"inject", "read"} and min(seconds.values()) > 0


@pytest.mark.slow
def test_filled_state_is_full_and_its_store_older_than_its_pool():
    model = add_mplus(shapes.backbone(SHAPE), MEMORY.config, key=jax.random.key(1))
    state = official_mplus_programs.filled(model.init_state(1), 10)
    assert state.store is not None
    assert state.num_valid == 8 and state.store.num_valid == 10
    ages = state.clock[0] - state.store.layers[0].born[0, :10]
    assert ages.tolist() == list(range(17, 7, -1))
    assert state.ages[0, 0].tolist() == list(range(7, -1, -1))


def test_every_merge_of_the_peer_drops_the_oldest_rows():
    first, ages, recalls = official_mplus_programs.merging(MEMORY, 20)
    # Three merges of 8 rows, the last of 4: one recall is left to the oldest.
    assert first == 4 and ages.tolist() == list(range(27, 7, -1))
    assert recalls.tolist() == [1] * 4 + [2] * 8 + [3] * 8
