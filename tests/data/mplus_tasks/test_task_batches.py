"""Training tasks of M+: layout of documents, proportions, positions."""

import dataclasses
import json

import numpy as np
import pytest

from memjax.data import TokenisedDocument
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import UNSCORED, MPlusTaskConfig, lay_out

CONFIG = MPlusTaskConfig(chunks=(1, 3), shortest_chunk=2, target=12, prompt=2)
CHUNK, ROWS = 5, 2
INSTRUCTION = np.array([9001, 9002], np.int32)
# Every token says where it stands.
DOCUMENTS = [
    TokenisedDocument(
        str(i), "prose", np.arange(i * 1000, i * 1000 + 700, dtype=np.int32)
    )
    for i in range(4)
]


def task_batches(config=CONFIG, seed=1, **options):
    return TaskBatches(DOCUMENTS, config, CHUNK, ROWS, seed, INSTRUCTION, **options)


def context(batch, row):
    """The tokens of a row's chunks, one after another."""
    pieces = zip(batch.chunks[row], batch.lengths[row], strict=True)
    return np.concatenate([np.zeros(0, np.int32), *(c[:n] for c, n in pieces)])


def test_document_is_cut_into_chunks_and_a_target():
    config = dataclasses.replace(CONFIG, repeat=0.0)
    seen = set()
    for assignment, _ in zip(task_batches(config), range(60), strict=False):
        batch = assignment.batch
        if assignment.task == "revisit":
            assert batch.chunks.shape == (ROWS, 0, CHUNK)
            continue
        seen.add((assignment.task, batch.chunks.shape[1]))
        for row in range(ROWS):
            whole = np.concatenate([context(batch, row), batch.target.tokens[row]])
            np.testing.assert_array_equal(np.diff(whole), 1)
            np.testing.assert_array_equal(
                batch.target.targets[row], batch.target.tokens[row] + 1
            )
        assert np.all((batch.lengths >= 2) & (batch.lengths <= CHUNK))
        assert np.all(batch.target.mask == 1)
        assert np.all((batch.num_queries >= 1) & (batch.num_queries < CONFIG.target))
    expected = {("two_chunk", 1), ("multi_chunk", 1), ("multi_chunk", 3)}
    assert expected <= seen <= expected | {("full_context", 0)}


def test_chunks_are_padded_with_zero():
    chunks, _ = lay_out(np.arange(1, 40, dtype=np.int32), [2, 4], 5, 6, None, False)
    np.testing.assert_array_equal(chunks, [[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]])


@pytest.mark.parametrize("last", [False, True])
def test_repetition_scores_all_but_its_first_tokens(last):
    text = np.arange(1, 60, dtype=np.int32)
    chunks, target = lay_out(text, [4, 5], 5, 16, INSTRUCTION, last)
    told = text[4:9] if last else text[:9]
    assert len(chunks) == (1 if last else 2)
    whole = np.concatenate([INSTRUCTION, told])
    count = len(whole) - 1
    np.testing.assert_array_equal(target.tokens[:count], whole[:-1])
    np.testing.assert_array_equal(target.targets[:count], whole[1:])
    assert not target.tokens[count:].any() and not target.targets[count:].any()
    scored = target.targets[target.mask == 1]
    np.testing.assert_array_equal(scored, told[UNSCORED:])


def test_repetition_is_cut_at_the_target():
    text = np.arange(1, 60, dtype=np.int32)
    _, target = lay_out(text, [5, 5, 5], 5, 12, INSTRUCTION, False)
    np.testing.assert_array_equal(target.targets, [9002, *range(1, 12)])
    np.testing.assert_array_equal(target.mask, [0] * 6 + [1] * 6)


def near(count, total, share):
    """Within four standard deviations of a binomial."""
    return abs(count - total * share) <= 4 * np.sqrt(total * share * (1 - share)) + 1


@pytest.mark.slow
def test_tasks_come_in_their_proportions_and_revisits_by_their_rules():
    full = multi = two = again = eligible = kept = repeated = 0
    distance, revisited, freed = None, False, True
    steps = 1500
    for assignment, _ in zip(task_batches(), range(steps), strict=False):
        task, batch = assignment
        assert len({*batch.keep.tolist()}) == 1
        full += task == "full_context"
        if task == "revisit":
            assert distance and not revisited
            # Another target may take its place from now on.
            again, freed, revisited = again + 1, True, True
            eligible += 1
            continue
        if task != "full_context" and distance and not revisited:
            eligible += 1
        revisited = False
        if task == "full_context":
            assert not batch.keep[0]
            continue
        multi, two = multi + (task == "multi_chunk"), two + (task == "two_chunk")
        repeated += (batch.target.tokens[:, 0] == INSTRUCTION[0]).sum()
        if batch.keep[0]:
            assert freed
            kept, distance = kept + 1, 0
        else:
            assert distance is not None
            distance += batch.chunks.shape[1]
        freed = False
    assert full + multi + two + again == steps
    assert near(full, steps, CONFIG.full_context)
    assert near(multi, multi + two, CONFIG.multi_chunk)
    assert near(repeated, ROWS * (multi + two), CONFIG.repeat)
    assert near(again, eligible, CONFIG.revisit)
    assert near(kept - 1, again, CONFIG.replace)


def same(a, b):
    assert a.task == b.task
    for x, y in zip(a.batch.target, b.batch.target, strict=True):
        np.testing.assert_array_equal(x, y)
    for name in ("chunks", "lengths", "num_queries", "keep"):
        np.testing.assert_array_equal(getattr(a.batch, name), getattr(b.batch, name))


def test_position_restores_the_random_numbers():
    whole, again = task_batches(), task_batches()
    for _ in range(37):
        next(whole)
    again.set_state(json.loads(json.dumps(whole.get_state())))
    for _ in range(20):
        same(next(whole), next(again))


def test_position_after_a_revisit_restores_it():
    config = dataclasses.replace(CONFIG, full_context=0.0, revisit=1.0, replace=0.0)
    whole, again = task_batches(config), task_batches(config)
    while next(whole).task != "revisit":
        pass
    again.set_state(whole.get_state())
    for _ in range(4):
        same(next(whole), next(again))


def test_hosts_read_their_rows_of_one_batch():
    both = [task_batches(shard_index=i, shard_count=2) for i in range(2)]
    whole = task_batches()
    for _ in range(12):
        parts, expected = [next(host) for host in both], next(whole)
        for row, part in enumerate(parts):
            assert part.task == expected.task

            def pick(x, row=row):
                return x[row : row + 1]

            batch = expected.batch
            target = type(batch.target)(*map(pick, batch.target))
            others = (batch.chunks, batch.lengths, batch.num_queries, batch.keep)
            chunks, lengths, num_queries, keep = map(pick, others)
            rows = type(batch)(chunks, lengths, target, num_queries, keep)
            same(part, expected._replace(batch=rows))
    assert both[0].get_state() == both[1].get_state() == whole.get_state()


def test_seeds_differ():
    first, second = task_batches(seed=1), task_batches(seed=2)
    tasks = [[next(data).task for _ in range(30)] for data in (first, second)]
    assert tasks[0] != tasks[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revisit": 1.5}, r"revisit must be in \[0, 1\], got 1.5"),
        ({"repeat": float("nan")}, "repeat must be in"),
        ({"chunks": ()}, "chunks must be numbers of at least 1"),
        ({"chunks": (2, 0)}, "chunks must be numbers of at least 1"),
        ({"chunks": (2, 2)}, "chunks must differ"),
        ({"shortest_chunk": 0}, "shortest_chunk must be at least 1"),
        ({"target": 1}, "target must be at least 2"),
        ({"prompt": 12}, r"prompt must be in \[1, target=12\), got 12"),
        ({"prompt": 0}, r"prompt must be in \[1, target=12\), got 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_lengths_that_do_not_fit_are_refused():
    for changes, message in (
        ({"shortest_chunk": 6}, "shortest_chunk must be at most chunk=5, got 6"),
        ({"target": 7}, "target must be more than 7 tokens"),
        ({"chunks": (1, 200)}, "no document is longer"),
    ):
        with pytest.raises(ValueError, match=message):
            task_batches(dataclasses.replace(CONFIG, **changes))


def test_positions_of_other_streams_are_refused():
    data = task_batches()
    good = data.get_state()
    for changes, message in (
        ({"step": -1}, r"state\['step'\]=-1 must be an integer"),
        ({"distance": 1.5}, r"state\['distance'\]=1.5 must be an integer"),
        ({"revisited": None}, "must be true or false"),
        ({"buckets": {"1": {}}}, r"must be of chunks=\(1, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            data.set_state(good | changes)
    with pytest.raises(ValueError, match="belongs to another pipeline"):
        task_batches(seed=2).set_state(good)
