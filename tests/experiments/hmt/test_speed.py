"""The benchmark of HMT's training step: it trains, and its counts add up."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from experiments.common import interleaved_timing
from experiments.hmt.speed import benchmark, implementations
from experiments.hmt.speed.operations import SHAPES, Shape, least_bytes, operations

SMALL = Shape(1, 16, 2, 1, 24, 40, False, 8, segment=8, sensory=2, segments=3)


def test_layers_have_the_parameters_that_are_counted():
    # 135M, of which 28.3M are the embedding, and the norms are left out here.
    total = SHAPES["smollm2"].layer_parameters + 576 * 49_152
    assert total == pytest.approx(134_515_008, rel=1e-3)


def test_operations_against_a_count_by_hand():
    # Texts of 10, 12 and 12 tokens; two summaries that are used, of 6 tokens.
    weights = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24
    pairs = (10 * 11 + 2 * 12 * 13 + 2 * 6 * 7) // 2
    # Two products of heads x width for each pair that attends.
    forward = 2 * weights * (10 + 12 + 12 + 6 + 6) + 4 * pairs * 16
    head = 2 * 16 * 40
    needed = 3 * forward + 3 * head * 8
    assert operations(SMALL, 2, "all")["needed"] == 2 * needed
    assert operations(SMALL, 1, "all")["recompute"] == needed + forward
    first = 2 * weights * 6 + 4 * (6 * 7 // 2) * 16
    more = first + head * (34 + 3 * 6) + 2 * head * 34 - 3 * head * 8
    assert operations(SMALL, 1, "all")["official"] == needed + more
    assert operations(SMALL, 1, "lora")["needed"] == 2 * forward + 2 * head * 8
    assert least_bytes(SMALL, "lora") < least_bytes(SMALL, "all")


@pytest.mark.slow
def test_our_step_trains():
    shape = dataclasses.replace(SMALL, segments=2)
    step = implementations.ours(shape, 2, "all", "recompute")
    losses = [step() for _ in range(3)]
    assert np.isfinite(losses).all() and losses[2] < losses[0]


@pytest.mark.slow
def test_a_report_has_rows_and_shares(monkeypatch, tmp_path):
    times = {"median_s": 2.0, "min_s": 1.0, "max_s": 4.0, "peak_mebibytes": 1.0}
    others = {"official": times | {"median_s": 3.0}}
    time_steps = lambda *_: others | {"keep": times | {"median_s": 0.5}}
    monkeypatch.setattr(benchmark, "time_steps", time_steps)
    monkeypatch.setattr(benchmark, "PRODUCT", 128)
    monkeypatch.setattr(benchmark, "COPY", 2**12)
    output = tmp_path / "speed"
    benchmark.main(
        benchmark.Config(("tiny",), (1,), ("all",), threads=1, output=output)
    )
    report = json.loads((tmp_path / "speed.json").read_text())
    (row,) = report["steps"]
    ours = row["implementations"]["keep"]
    assert ours["speedup"] == {"official": 6.0}
    assert ours["least_speedup"] == {"official": 0.25}
    share = row["operations"]["needed"] / 0.5 / report["peaks"]["flops"]
    assert ours["share_of_peak"] == pytest.approx(share)
    assert ours["times_roofline"] == pytest.approx(0.5 / row["roofline_s"])


def test_only_a_checkout_brings_the_authors_program():
    names = benchmark.Config(threads=1).implementations
    found = interleaved_timing.available(names, pathlib.Path("folder"))
    assert found == ["official", "keep", "recompute"]
    assert interleaved_timing.available(names, None) == ["keep", "recompute"]


def test_authors_program_without_pytorch_is_refused(monkeypatch, tmp_path):
    (tmp_path / "program.py").touch()
    monkeypatch.setattr(interleaved_timing.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="official=.* needs torch: not installed"):
        interleaved_timing.require_official(tmp_path, "program.py")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"threads": 10**6}, r"threads must be in \[1, "),
        ({"sizes": ()}, "sizes must not be empty"),
        (
            {"official": pathlib.Path("nowhere")},
            "official must be a folder with .* got",
        ),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        benchmark.Config(**options)
