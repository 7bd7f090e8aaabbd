"""The protocol of studies: stored runs, chosen rates, costs."""

import concurrent.futures
import math
import time

import pytest

from experiments.lab import results, study
from experiments.memories.recall import Config
from memjax.training.config import Outcome


def test_a_value_is_measured_once_and_bound_to_its_settings(tmp_path):
    file = tmp_path / "a" / "part.json"
    assert study.once(file, lambda: {"x": 1}, ("b", 2)) == {"x": 1}
    assert study.once(file, lambda: {"x": 2}, ("b", 2)) == {"x": 1}
    with pytest.raises(ValueError, match="part.json holds the result of other set"):
        study.once(file, lambda: {"x": 2}, ("b", 3))


def test_rates_are_tried_until_the_best_is_inside():
    losses = {1e-3: 4.0, 3e-3: 3.0, 1e-2: 2.0, 3e-2: 1.0, 1e-1: math.nan}
    found = study.climb_rate([*losses], 3e-3, losses.__getitem__)
    assert found["rate"] == 3e-2
    # Upwards first; no rate is tried that is no neighbour of a best one.
    assert [*found["tried"]] == ["0.003", "0.01", "0.03", "0.1"]
    assert study.climb_rate([1e-3, 3e-3], 3e-3, losses.__getitem__)["rate"] == 3e-3


def test_a_plan_counts_the_trainings_that_are_missing(tmp_path):
    rates, left = (1e-3, 3e-3, 1e-2, 3e-2), []
    given = study.Trainings(tmp_path, 1, rates, 1e-2, (0, 1), lambda x: x["loss"])

    def measure(rate, seed):
        left.append(given.left())
        return {"loss": abs(rate - 3e-3)}

    assert given.run(measure)["learning_rate"] == 3e-3
    # Three rates with the first seed are expected, and four tried.
    assert left == [4, 3, 2, 2, 1]
    (tmp_path / "seed2").mkdir()
    assert given.left() == 0 and given._replace(seeds=(0, 2, 3)).left() == 2
    assert given._replace(rates=(1e-2,)).left() == 1
    for text, message in (("[]", "must have the fields"), ("{", "is not JSON")):
        given.file(1e-2, 0).write_text(text)
        with pytest.raises(ValueError, match=f"seed0/rate0.01.json {message}"):
            given.left()


def test_rows_are_added_to_those_of_equal_settings_by_one_process(tmp_path):
    def add(row, config=None):
        given = results.settings(config or Config())
        # A lock is of an open file: threads are as processes.
        with results.rows_before(tmp_path / "a", config or Config()) as before:
            time.sleep(0.1)
            found = {"rows": [*before, row]}
            return results.write_report(tmp_path / "a", "?", given, found)["rows"]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        assert sorted(map(len, pool.map(add, range(3)))) == [1, 2, 3]
    assert add(3, Config(test_rows=3)) == [3]


def test_rows_continue_with_the_missing_runs(tmp_path):
    done, reports = [], []

    def measure(row, seed, folder):
        if (row, seed) == ("b", 1) and len(done) == 3:
            raise KeyboardInterrupt
        done.append((row, seed))
        return {"x": seed}

    def run_all():
        return study.run_all(
            [(row, seed) for row in "ab" for seed in (0, 1)],
            measure,
            run_dir=tmp_path,
            identity=lambda row, seed: row,
            report=lambda rows: reports.append(len(rows)),
        )

    with pytest.raises(KeyboardInterrupt):
        run_all()
    done.append("stopped")
    rows = run_all()
    assert done == [("a", 0), ("a", 1), ("b", 0), "stopped", ("b", 1)]
    assert rows[-1] == {"name": "b", "seed": 1, "x": 1} and reports == [1, 2, 3, 4]
    run_all()
    assert len(done) == 5 and reports[-1] == 4
    assert study.stored(tmp_path, ["b", "a", "c"]) == rows[2:] + rows[:2]


def test_a_training_adds_the_time_of_stopped_processes(tmp_path):
    outcomes = iter([Outcome("preempted", 1, 0), Outcome("finished", 2, 1)])
    with pytest.raises(SystemExit):
        study.train_once(tmp_path, lambda: next(outcomes))
    first = study.spent(tmp_path)
    found = study.train_once(tmp_path, lambda: next(outcomes))
    assert found.finished and found.seconds > first.seconds > 0
    assert found.skipped_updates == 1
    assert study.train_once(tmp_path, lambda: next(outcomes)) == found
