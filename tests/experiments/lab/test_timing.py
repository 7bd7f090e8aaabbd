"""Interleaved timing: order of the rounds, what is timed, ratios, checks."""

import os
import time

import pytest

from experiments.lab import timing


def test_functions_are_called_in_turn_and_timed_at_the_second_call(monkeypatch):
    called, clock = [], [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def function(name, seconds):
        def call():
            called.append(name)
            # The first call of each pair is not timed.
            clock[0] += seconds if len(called) % 2 == 0 else 100.0

        return call

    functions = {"a": function("a", 1.0), "b": function("b", 3.0)}
    found = timing.time_functions(functions, 2)
    assert called == ["a", "a", "b", "b"] * 2
    assert found["a"] == {"median_s": 1.0, "min_s": 1.0, "max_s": 1.0, "repeats": 2}
    assert found["b"]["median_s"] == 3.0


def make(name, file):
    """A step that notes when it began and ended."""

    def step():
        begin = time.time()
        time.sleep(0.01)
        with open(file, "a") as lines:
            lines.write(f"{name} {begin} {time.time()}\n")
        return os.environ.get("GLIBC_TUNABLES"), len(os.sched_getaffinity(0))

    return step


@pytest.mark.slow
def test_processes_take_turns_on_their_cores(tmp_path):
    file = tmp_path / "steps"
    before = os.environ.get("GLIBC_TUNABLES")
    arguments = {name: (name, str(file)) for name in "ab"}
    found = timing.time_processes(make, arguments, threads=1, repeats=2)
    assert os.environ.get("GLIBC_TUNABLES") == before
    steps = [line.split() for line in file.read_text().splitlines()]
    assert [name for name, *_ in steps] == ["a", "b"] * 3
    ends = [float(end) for *_, end in steps]
    assert all(
        float(begin) >= end for (_, begin, _), end in zip(steps[1:], ends, strict=False)
    )
    for rounds in found.values():
        assert [step.value for step in rounds] == [("glibc.malloc.hugetlb=1", 1)] * 3
        assert all(step.seconds >= 0.01 and step.peak_mebibytes > 1 for step in rounds)
