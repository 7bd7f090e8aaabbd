"""Generation against transformers: the numbers add up."""

import numpy as np

from experiments.lab.timing import Round
from experiments.speed import generation


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
        "memjax_stored": generated(1.0, 2.0, [[1, 2, 3, 4], [1, 2, 3, 5]]),
        "transformers": generated(2.0, 8.0, [[1, 2, 3, 4], [1, 2, 3, 4]]),
    }
    monkeypatch.setattr(generation, "passages", lambda *_: prompts)
    monkeypatch.setattr(generation.timing, "time_processes", lambda *_: found)
    row = generation.time_row(tmp_path, "Q4_1", 2, 1)["implementations"]
    assert row["memjax_stored"]["whole_speedup"] == {"transformers": 4.0}
    assert row["memjax_stored"]["tokens_per_s"] == 2 * generation.NEW_TOKENS / 2.0
    assert row["transformers"]["equal_tokens"] == 7 / 8
