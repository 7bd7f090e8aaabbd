"""The benchmark of M+: every part runs, and the report adds up."""

import json
import pathlib

import jax
import pytest

from experiments.hmt.speed.operations import Shape
from experiments.mplus.speed import benchmark, implementations
from memjax.models import LanguageModel
from memjax.models.mplus.build import add_mplus

SHAPE = Shape(1, 16, 2, 1, 24, 40, False, 8)
MEMORY = implementations.Memory(
    tokens=4, chunk=16, pool=8, retrieved=4, store=24, key_dim=8, merge_every=2
)


@pytest.mark.parametrize("part", ["rounds", "growth", "search"])
@pytest.mark.slow
def test_every_part_times_its_acts(part):
    round_ = implementations.make("ours", part, SHAPE, MEMORY, 3, 5)
    acts = {"rounds": {"inject", "read"}, "growth": {"inject"}, "search": {"search"}}
    for _ in range(2):
        seconds = round_()
        assert set(seconds) == acts[part] and min(seconds.values()) > 0


@pytest.mark.slow
def test_a_filled_state_is_full_and_its_store_older_than_its_pool():
    backbone = LanguageModel(
        implementations.backbone_config(SHAPE), key=jax.random.key(0)
    )
    model = add_mplus(backbone, MEMORY.config, key=jax.random.key(1))
    state = implementations.filled(model.init_state(1), 10)
    assert state.store is not None
    assert state.num_valid == 8 and state.store.num_valid == 10
    ages = state.clock[0] - state.store.layers[0].born[0, :10]
    assert ages.tolist() == list(range(17, 7, -1))
    assert state.ages[0, 0].tolist() == list(range(7, -1, -1))


def test_a_report_has_rates_and_speedups(monkeypatch, tmp_path):
    def time_part(config, part, shape, memory, repeats):
        acts = {"rounds": ("inject", "read"), "growth": ("inject",)}
        found = {}
        for name, second in (("official", 8.0), ("official_fused", 4.0), ("ours", 1.0)):
            times = [second, second, 2 * second]
            acts_of = {act: list(times) for act in acts.get(part, ("search",))}
            found[name] = {"seconds": acts_of, "peak_mebibytes": 1.0}
        return found

    monkeypatch.setattr(benchmark, "time_part", time_part)
    output = tmp_path / "speed"
    benchmark.main(benchmark.Config(threads=1, repeats=3, output=output))
    report = json.loads((tmp_path / "speed.json").read_text())
    memories = [row["memory"] for row in report["rounds"]]
    sizes = [(memory["pool"], memory["store"]) for memory in memories]
    assert sizes == [(10_240, 153_600), (2_560, 153_600), (10_240, 38_400)]
    ours = report["rounds"][0]["implementations"]["ours"]
    assert ours["inject"]["tokens_per_s"] == 16 * 512
    assert ours["read"]["tokens_per_s"] == 256
    # Median against median, and the other's fastest against our slowest.
    speedups = {"official": 8.0, "official_fused": 4.0}
    assert ours["read"]["speedup"] == speedups
    assert ours["read"]["least_speedup"] == {"official": 4.0, "official_fused": 2.0}
    assert report["search"]["implementations"]["ours"]["search"]["speedup"] == speedups
    grown = report["growth"]["implementations"]["official_fused"]
    assert (grown["first_tenth_s"], grown["last_tenth_s"]) == (4.0, 8.0)
    assert (grown["sum_s"], grown["max_s"]) == (16.0, 8.0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"threads": 10**6}, r"threads must be in \[1, "),
        ({"pools": ()}, "pools must not be empty"),
        ({"injects": -1}, "injects must be at least 0, got -1"),
        ({"stores": (17_000,)}, r"stores must be at least 17920, got \(17000,\)"),
        ({"searched": 100}, "searched must be at least retrieved=2560, got 100"),
        (
            {"official": pathlib.Path("nowhere")},
            "official must be a folder with .* got",
        ),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        benchmark.Config(**options)
