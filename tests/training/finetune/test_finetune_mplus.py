"""Training M+: three stages, resuming in the last, what a folder holds."""

import dataclasses
import gc
import json
import math
import weakref
from typing import Any, cast

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from memjax.cli import main as cli
from memjax.data import TokenisedDocument, load_facts, load_tokenizer
from memjax.data.mplus_tasks.fact_tasks import FACTS_SEED, split_facts
from memjax.data.mplus_tasks.task_batches import TaskBatches
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig
from memjax.models.hmt.config import HMTConfig
from memjax.models.mplus.checkpoints.checkpoint import load_mplus
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.nnx import as_arrays
from memjax.training import LoopConfig, pretrain, run_data
from memjax.training.distributed import sharding
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.finetune import finetune, mplus_stage
from memjax.training.finetune import run as finetune_run
from memjax.training.finetune.curricula import MPlusStages
from memjax.training.finetune.mplus_presets import presets
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import SampleConfig
from memjax.training.finetune.start import starting_point
from memjax.training.mplus.retriever_fit import similarity
from memjax.training.run_folder import newest_state
from tests.training.idle import idle_updates

BYTES = load_tokenizer("bytes")
MEMORY = MPlusConfig(
    num_memory_tokens=4,
    pool_size=8,
    chunk_size=8,
    min_chunk_size=2,
    num_retrieved=4,
    store_size=16,
    key_dim=4,
    rank=2,
)
# Everything that can be revisited is.
TASKS = MPlusTaskConfig(
    full_context=0.0,
    revisit=1.0,
    multi_chunk=0.0,
    replace=0.0,
    chunks=(1,),
    shortest_chunk=3,
    target=16,
    prompt=3,
)


def stages(samples):
    third = MPlusStage(
        memory=MEMORY,
        tasks=TASKS,
        data=samples,
        loop=LoopConfig(steps=5, save_every=2, log_every=1),
        seed=0,
    )
    alone = dataclasses.replace(MEMORY, num_retrieved=0, pool_size=12)
    loop = dataclasses.replace(third.loop, steps=2)
    # The task that compiles fastest.
    tasks = dataclasses.replace(TASKS, full_context=1.0)
    early = dataclasses.replace(third, memory=alone, tasks=tasks, loop=loop)
    return MPlusStages(early, early, third)


TIMES = ("tokens_per_second", "step_seconds", "goodput")


def metrics(folder):
    """What was logged of each step, without the times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [
        {k: v for k, v in r["values"].items() if k not in TIMES}
        for r in records
        if r["kind"] == "train"
    ]


def newest(folder):
    """The newest checkpoint of stage 3: parameters, optimizer, memory."""
    shapes = finetune_run.read_run(folder).state_shapes()
    return newest_state(folder / "stage3", shapes)


@pytest.fixture(name="whole", scope="module")
def _whole(base, tmp_path_factory, interrupted):
    """All stages; the last was interrupted in the middle, and resumed."""
    folder = tmp_path_factory.mktemp("whole")

    def train():
        return finetune.finetune_stages(stages(base[1]).stages(), base[0], folder)

    with interrupted(7) as given:
        train()
    # What was kept before the interruption is what is revisited after it.
    *before, last = (assigned.task for assigned in given)
    assert last == "revisit" and {*before[4:]} == {"two_chunk"}
    finished = [metrics(folder / name) for name in ("stage1", "stage2")]
    outcome = train()
    assert (outcome.reason, outcome.step) == ("finished", 5)
    assert [metrics(folder / name) for name in ("stage1", "stage2")] == finished
    assert [len(steps) for steps in finished] == [2, 2]
    return folder


@pytest.mark.slow
def test_the_last_stage_resumed_in_its_middle_bit_for_bit(base, whole, tmp_path):
    third = stages(base[1]).stage3
    finetune.finetune(third, base[0], tmp_path / "stage3", whole / "stage2")
    assert metrics(tmp_path / "stage3") == metrics(whole / "stage3")
    pairs = map(jax.tree.leaves, (newest(tmp_path), newest(whole)))
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_programs_of_the_previous_stage_are_freed(whole):
    def made(stage):
        described, _ = finetune.load(whole / stage)
        return finetune._programs(described, sharding.make_mesh(MeshConfig()))[1]

    # Young objects alone: what other tests left behind takes seconds to look through.
    gc.collect(1)
    first = weakref.ref(made("stage1"))
    gc.collect(1)
    assert first() is made("stage1")
    made("stage3")
    gc.collect(1)
    assert first() is None


@pytest.mark.slow
def test_the_backbone_stays_and_the_memory_is_kept(base, whole):
    described, model = finetune.load_model(whole)
    assert isinstance(described, finetune_run.FinetuneRun)
    assert described.config == stages(base[1]).stage3 and isinstance(model, MPlus)
    original = jax.tree.leaves(nnx.state(pretrain.load_model(base[0])[1]))
    kept = jax.tree.leaves(nnx.state(model.backbone))
    for a, b in zip(original, kept, strict=True):
        np.testing.assert_array_equal(a, b)
    state, cached = newest(whole).memory
    wrote = sum("revisit_loss" not in values for values in metrics(whole / "stage3"))
    np.testing.assert_array_equal(state.clock, [MEMORY.num_memory_tokens * wrote] * 2)
    np.testing.assert_array_equal(cached.last, [MEMORY.num_memory_tokens] * 2)
    assert cached.target.mask.any(axis=1).all()
    moved = jax.tree.map(
        lambda a, b: not np.array_equal(a, b),
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        nnx.to_pure_dict(nnx.state(first_of(base, whole), nnx.Param)),
    )
    assert {name for name, tree in moved.items() if any(jax.tree.leaves(tree))} == {
        *moved
    }


def first_of(base, whole):
    """The model that stage 3 started from."""
    third = stages(base[1]).stage3
    return starting_point(third, None, whole / "stage2").model


@pytest.mark.slow
def test_stage_3_starts_from_all_that_stage_2_learned(base, whole):
    _, trained = finetune.load(whole / "stage2")
    state = nnx.to_pure_dict(nnx.state(first_of(base, whole)))
    kept = nnx.to_pure_dict(nnx.state(trained))
    assert all(
        jax.tree.leaves(jax.tree.map(np.array_equal, kept, {k: state[k] for k in kept}))
    )
    assert {*state} - {*kept} == {"query", "key", "encoder_query"}


@pytest.mark.slow
def test_a_new_retriever_starts_by_similarity(base, tmp_path, monkeypatch):
    third = dataclasses.replace(
        stages(base[1]).stage3,
        retriever_documents=3,
        retriever_rate=0.0,
        loop=LoopConfig(steps=1, save_every=1, log_every=1),
    )
    found, start = [], mplus_stage.start_by_similarity

    def counted(model, bank):
        found.append((bank, start(model, bank)))
        return found[-1][1]

    monkeypatch.setattr(mplus_stage, "start_by_similarity", counted)
    with idle_updates():
        finetune.finetune(third, base[0], tmp_path / "run")
    model = finetune.load(tmp_path / "run")[1]
    drawn: Any = starting_point(third, base[0], None).model
    [(bank, started)] = found
    for name in ("query", "key"):
        trained, first, new = (
            as_arrays(getattr(m, name)) for m in (model, started, drawn)
        )
        chex.assert_trees_all_equal(trained, first)
        assert not np.array_equal(trained.down, new.down)
    # Two whole batches of documents, each of which makes two chunks of rows.
    chex.assert_shape(bank.rows, (4, 1, 2 * MEMORY.num_memory_tokens, 8))
    query, key = similarity(bank, MEMORY.key_dim)
    chex.assert_trees_all_equal(query, as_arrays(started.query))
    chex.assert_trees_all_equal(key, as_arrays(started.key))
    # Neither a run that goes on nor one whose start has a retriever makes another.
    with idle_updates():
        finetune.finetune(third, base[0], tmp_path / "run")
        finetune.finetune(third, None, tmp_path / "next", tmp_path / "run")
    assert len(found) == 1
    # Unless asked to: one that is fitted to the trained model, and nothing else.
    again = dataclasses.replace(third.refitted(), seed=1)
    with idle_updates():
        finetune.finetune(again, None, tmp_path / "run" / "refit", tmp_path / "run")
    # The last stage of the folder.
    refitted = finetune.load(tmp_path / "run")[1]
    before, after = (nnx.to_pure_dict(nnx.state(x)) for x in (model, refitted))
    chex.assert_trees_all_equal(
        after["query"], nnx.to_pure_dict(nnx.state(found[1][1]))["query"]
    )
    assert not np.array_equal(after["key"]["down"], before["key"]["down"])
    names = {"query", "key"}
    rest = ({k: x[k] for k in x.keys() - names} for x in (before, after))
    chex.assert_trees_all_equal(*rest)
    # At a rate of 0 it stays so.
    params, transform = nnx.to_pure_dict(nnx.state(model, nnx.Param)), third.transform()
    ones = jax.tree.map(np.ones_like, params)
    updates, _ = jax.jit(transform.update)(ones, transform.init(params), params)
    still = {
        name
        for name, tree in updates.items()
        if not any(np.any(leaf) for leaf in jax.tree.leaves(tree))
    }
    assert still == {"query", "key", "encoder_query"}


@pytest.mark.slow
def test_a_trained_model_is_exported_under_the_official_names(whole, tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", str(whole), str(tmp_path / "out")])
    assert not stop.value.code
    loaded, (_, trained) = load_mplus(tmp_path / "out"), finetune.load(whole)
    pairs = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (loaded, trained))
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("shipped", [True, False])
def test_facts_are_told_and_asked_for(shipped, base, tmp_path):
    backbone, samples = base
    chosen = load_facts()[:40]
    told = {fact.subject for fact in split_facts(chosen, seed=FACTS_SEED)[0]}
    (tmp_path / "facts.jsonl").write_text(
        "\n".join(json.dumps(fact._asdict()) for fact in chosen)
    )
    config = MPlusStage(
        memory=dataclasses.replace(MEMORY, chunk_size=180),
        tasks=dataclasses.replace(
            TASKS, ask=1.0, target=200, revisit=0.0, shortest_chunk=160, repeat=0.0
        ),
        facts=None if shipped else tmp_path / "facts.jsonl",
        data=samples,
    )
    described, _, stored, _ = starting_point(config, backbone, None)
    documents = run_data.load_split(described, BYTES, "train")
    lessons = config.batches(documents, stored.tokenizer, 256)
    text = BYTES.decode(np.asarray(next(lessons).batch.target.tokens[0]))
    assert text.startswith("\n\nQuestion: ")
    assert shipped or any(subject in text for subject in told)


@pytest.mark.slow
def test_the_command_line_scores_a_run(whole, capsys):
    """As the model does token by token, chunks and all."""
    described, model = finetune.load(whole)

    @jax.jit
    def step(state, token):
        state, logits = model(state, token[None, None])
        return state, jax.nn.log_softmax(logits[0, 0])

    with pytest.raises(SystemExit) as stop:
        cli.main(["eval", str(whole), "--split", "test"])
    assert not stop.value.code and "perplexity" in capsys.readouterr().out
    report = json.loads((whole / "eval-test.json").read_text())
    nats = []
    for document in run_data.load_split(described, load_tokenizer("bytes"), "test"):
        state, targets = model.init_state(1), document.tokens[1:]
        for token, target in zip(document.tokens[:-1], targets, strict=True):
            state, row = step(state, token)
            nats.append(-np.asarray(row)[target])
    expected = pytest.approx(np.exp(np.mean(nats)), rel=1e-4)
    assert report["perplexity"]["all"]["perplexity"] == expected


@pytest.mark.slow
def test_invalid_starts_are_refused(base, whole, tmp_path):
    third = stages(base[1]).stage3

    def memory(**changes):
        return dataclasses.replace(third, memory=dataclasses.replace(MEMORY, **changes))

    hmt = SegmentStage(
        hmt=HMTConfig(segment_length=8, num_sensory_tokens=2), data=base[1]
    )
    for config, start, message in (
        (
            memory(rank=3),
            whole / "stage2",
            "memory.rank=3 must be that of the start, 2",
        ),
        (
            memory(num_memory_tokens=2),
            whole,
            "memory.num_memory_tokens=2 must be that of the start, 4",
        ),
        (memory(key_dim=8), whole, "memory.key_dim=8 must be that of the start, 4"),
        (hmt, whole / "stage2", r"HMT without retrieval; that run has M\+"),
    ):
        with pytest.raises(ValueError, match=message):
            finetune.finetune(config, None, tmp_path / "new", start)
    with pytest.raises(
        ValueError, match="must be a plain model, but that one has a mem"
    ):
        finetune.finetune(third, whole, tmp_path / "new")
    with pytest.raises(ValueError, match="stages must be at least one"):
        finetune.finetune_stages([], base[0], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_settings_that_contradict_themselves_are_refused():
    three = stages(SampleConfig())
    for changes, message in (
        ({"data": SampleConfig(mode="streamed")}, "data.mode='streamed' contradicts"),
        (
            {"memory": dataclasses.replace(MEMORY, legacy=True, store_size=3000)},
            "legacy must",
        ),
        (
            {"tasks": dataclasses.replace(TASKS, shortest_chunk=9)},
            "memory.chunk_size=8, got 9",
        ),
        ({"depth": 0}, "depth must be at least 1"),
        ({"retriever_rate": -1.0}, "retriever_rate must be finite and >= 0, got -1.0"),
        ({"retriever_documents": -1}, "retriever_documents must be at least 0"),
        (
            {"retriever_documents": 1, "memory": three.stage1.memory},
            "0 without a retriever, got 1",
        ),
        ({"refit_retriever": True}, "refit_retriever=True needs retriever_documents"),
        ({"position_rate": math.inf}, "position_rate must be finite and >= 0, got inf"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(three.stage3, **changes)
    with pytest.raises(
        ValueError, match="stage2 must have memory.num_retrieved = 0, got 4"
    ):
        MPlusStages(three.stage1, three.stage3, three.stage3)


def test_a_retriever_is_refitted_behind_all_stages_at_a_vanishing_rate():
    three = presets()["mplus-smollm2-135m"]
    assert isinstance(three, MPlusStages)
    *trained, (name, last) = three.stages()
    assert trained == [*dataclasses.replace(three, refit=False).stages()]
    assert name == finetune_run.LATER_STAGES[0] and last.refit_retriever
    assert last.memory == three.stage3.memory and last.loop.steps == 1
    # Adam's first update is the rate: below half an ulp of any parameter that counts.
    params: Any = {"bos": np.array([1e-4], np.float32)}
    transform = last.transform()
    update: Any = transform.update(params, transform.init(params), params)[0]
    assert 0 < np.abs(update["bos"]) < np.spacing(params["bos"]) / 2
    with pytest.raises(ValueError, match="refit_retriever=True needs retriever_docum"):
        dataclasses.replace(presets()["mplus"], refit=True)


def test_presets_follow_the_papers_curriculum():
    paper = presets()["mplus-paper"]
    assert isinstance(paper, MPlusStages)
    for _, stage in paper.stages():
        memory = stage.memory
        assert memory.pool_size + memory.num_retrieved == 12_800
        assert (stage.tasks.full_context, stage.tasks.revisit) == (0.05, 0.2)
    assert [s.tasks.multi_chunk for _, s in paper.stages()] == [0.9, 0.9, 0.8]
    assert paper.stage3.memory.num_retrieved == 2560
    assert paper.stage3.tasks == MPlusTaskConfig()
    longest = max(paper.stage2.tasks.chunks)
    assert longest * paper.stage2.memory.chunk_size + paper.stage2.tasks.target == 2**16


@pytest.mark.parametrize(
    ("stage", "distance", "steps"),
    [("stage1", 60, 1000), ("stage2", 60, 1000), ("stage3", 200, 2000)],
)
def test_revisits_of_the_papers_stages_are_as_far_as_its_appendix_says(
    stage, distance, steps
):
    """Counted over the chunks that are written, each here of one token."""
    tasks = dict(cast(MPlusStages, presets()["mplus-paper"]).stages())[stage].tasks
    tasks = dataclasses.replace(tasks, shortest_chunk=1, target=8, prompt=1)
    texts = [TokenisedDocument("d", "text", np.zeros(400_000, np.int32))]
    batches = TaskBatches(texts, tasks, 1, 1, 0, np.zeros(1, np.int32))
    since, distances = 0, []
    for assignment, _ in zip(batches, range(steps), strict=False):
        if assignment.task == "revisit":
            distances.append(since)
        elif assignment.batch.keep[0]:
            since = 0
        else:
            since += assignment.batch.chunks.shape[1]
    assert np.mean(distances) == pytest.approx(distance, rel=0.2)
