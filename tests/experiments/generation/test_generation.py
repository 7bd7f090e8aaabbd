"""The programs about generation: what they time adds up, and all is read."""

import types
from pathlib import Path

import numpy as np
import pytest

import memjax
from experiments.generation import benchmark, streaming
from experiments.generation.implementations import Prompts
from memjax.models import HMTConfig, MPlusConfig
from tests import tiny


def rounds(first, whole, tokens):
    """Of one implementation: a first round that is not timed, and three more."""
    step = lambda scale: {
        "first_s": scale * first,
        "whole_s": scale * whole,
        "tokens": tokens,
        "digest": "",
    }
    return [(9.0, step(9), 100.0)] + [(1.0, step(s), 200.0) for s in (1, 0.5, 2)]


def test_speedups_are_the_baselines_time_over_ours(monkeypatch):
    config = benchmark.Config(new_tokens=4, cores=(1,), repeats=3)
    prompts = Prompts(np.zeros((2, 3), np.int32), (3, 2))
    found = {
        "memjax": rounds(1.0, 2.0, [[1, 2, 3, 4], [1, 2, 3, 5]]),
        "transformers": rounds(2.0, 8.0, [[1, 2, 3, 4], [1, 2, 3, 4]]),
    }
    monkeypatch.setattr(benchmark, "passages", lambda *_: prompts)
    monkeypatch.setattr(benchmark, "interleaved_timing", lambda *_: found)
    row = benchmark.time_row(config, Path("model.gguf"), 2, 1)["implementations"]
    assert row["memjax"]["whole_speedup"] == {"transformers": 4.0}
    assert row["memjax"]["first_speedup"] == {"transformers": 2.0}
    # Their fastest round over our slowest.
    assert row["memjax"]["whole_least_speedup"] == {"transformers": 1.0}
    assert row["memjax"]["tokens_per_s"] == 2 * 4 / 2.0
    assert row["memjax"]["equal_tokens"] == 7 / 8


@pytest.mark.parametrize(
    ("field", "value"), [("cores", (0,)), ("batches", ()), ("new_tokens", 1)]
)
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        benchmark.Config(**{field: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hmt", "mplus"])
def test_a_long_text_is_read_at_constant_size(name, monkeypatch):
    text = types.SimpleNamespace(tokenizer=tiny.tokenizer())
    pretrained = types.SimpleNamespace(model=tiny.llama(), text=text)
    monkeypatch.setattr(memjax, "load", lambda _: pretrained, raising=False)
    config = streaming.Config(
        model=Path("model.gguf"),
        tokens=24,
        piece=4,
        every=8,
        hmt=HMTConfig(segment_length=4, num_sensory_tokens=1, num_memories=3),
        mplus=MPlusConfig(
            num_memory_tokens=2,
            pool_size=4,
            chunk_size=4,
            min_chunk_size=1,
            num_retrieved=2,
            store_size=8,
            key_dim=2,
        ),
    )
    found = streaming.stream(config, name)
    assert len(found["resident_mebibytes"]) == len(found["seconds"]) == 3
    assert found["finite"] and found["state_bytes"] > 0
