"""Whole runs: bit-exact resuming with carried memory, reading a run back."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from memjax import evaluation
from memjax.config_io import to_record
from memjax.data import TokenisedDocument, load_tokenizer
from memjax.evaluation import TokenLosses
from memjax.mechanisms import ElasticMemoryConfig
from memjax.models import ModelConfig
from memjax.training import LoopConfig, MeshConfig, StepConfig, run_data
from memjax.training import pretrain as run
from memjax.training.distributed import sharding
from memjax.training.optimizer import schedule
from memjax.training.resume import (
    FREE_FIELDS,
    require_same_config,
    schedule_change,
)
from memjax.training.run_data import check_epochs, validation
from tests import tiny

MODEL = ModelConfig(
    mechanisms=(ElasticMemoryConfig(16, 2, 1, 8, block=8, order=4),),
    num_layers=1,
    vocab_size=256,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)


@pytest.fixture(name="config", scope="module")
def _config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for i in range(6):
        words = rng.choice(["memory", "window", "block", "state"], size=60)
        (folder / f"{i}.txt").write_text(" ".join(words))
    return run.RunConfig(
        model=MODEL,
        data=run.DataConfig(
            source=f"folder:{folder}",
            tokenizer="bytes",
            mode="streamed",
            context_length=16,
            batch_size=2,
            validation_texts=2,
            cache_dir=folder / "cache",
        ),
        step=StepConfig(bptt_blocks=1, carry_memory=True),
        loop=LoopConfig(steps=6, save_every=3, log_every=1, evaluate_every=3),
    )


@pytest.fixture(name="whole", scope="module")
def _whole(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run.train(config, folder).reason == "finished"
    return folder


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    keep = {"loss", "gradient_norm", "validation_perplexity"}
    return [
        (r["step"], r["kind"], {k: v for k, v in r["values"].items() if k in keep})
        for r in records
    ]


@pytest.mark.slow
def test_a_stream_with_carried_memory_resumes_bit_for_bit(config, whole, tmp_path):
    # Stopping at 3 must not shape the schedule: only the loop's budget differs.
    interrupted = tmp_path / "run"
    calls = []

    def stop_after_three(state, batch, step):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(state, batch)

    programs = run._programs

    def broken(config, mesh):
        create, step = programs(config, mesh)
        return create, lambda state, batch: stop_after_three(state, batch, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_programs", broken)
        with pytest.raises(KeyboardInterrupt):
            run.train(config, interrupted)
    outcome = run.train(config, interrupted)
    assert (outcome.reason, outcome.step) == ("finished", 6)
    assert losses(interrupted) == losses(whole)
    for a, b in zip(params(interrupted), params(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_memory_is_carried_from_batch_to_batch(config, whole):
    # The update of `whole`, from an empty memory each time.
    state, step = run.build_step(config, sharding.make_mesh(config.mesh))
    empty = jax.tree.map(np.asarray, state.memory)
    documents = run_data.load_split(config, load_tokenizer("bytes"), "train")
    data, found = run_data.batches(config, [documents]), []
    for _ in range(config.loop.steps):
        memory = jax.tree.map(
            lambda x, old: jax.device_put(x, old.sharding), empty, state.memory
        )
        state, metrics = step(state._replace(memory=memory), next(data))
        found.append(float(metrics["loss"]))
    carried = [v["loss"] for _, kind, v in losses(whole) if kind == "train"]
    assert found[0] == carried[0] and not set(found[1:]) & set(carried[1:])


def test_layers_of_a_loop_are_drawn_as_by_one_program(config):
    looped = dataclasses.replace(MODEL, num_layers=2, scan_layers=True)
    config = dataclasses.replace(config, model=looped)
    drawn, _ = run.build_step(config, sharding.make_mesh(config.mesh))
    at_once = jax.jit(config.create_state)(jax.random.key(config.seed))
    chex.assert_trees_all_close(drawn.params, at_once.params, rtol=1e-5, atol=1e-7)
    one, other = (jax.tree.leaves(block) for block in drawn.params["blocks"].values())
    assert not np.array_equal(one[0], other[0])


@pytest.mark.slow
def test_runs_of_other_texts_share_the_programs_and_of_other_sizes_do_not(config):
    mesh = sharding.make_mesh(config.mesh)
    state, step = run.build_step(config, mesh)

    def changed(**data):
        return dataclasses.replace(config.data, **data)

    other = dataclasses.replace(
        config,
        seed=1,
        data=changed(source="embedded", cache_dir=None),
        loop=dataclasses.replace(config.loop, save_every=1, evaluate_every=0),
    )
    drawn, same = run.build_step(other, mesh)
    assert same is step
    assert not np.array_equal(*(jax.tree.leaves(s.params)[0] for s in (state, drawn)))
    larger, _ = run.build_step(
        dataclasses.replace(config, data=changed(batch_size=3)), mesh
    )
    assert {len(leaf) for leaf in jax.tree.leaves(larger.memory)} == {3}


@pytest.mark.slow
def test_another_model_is_refused_by_field(config, whole):
    other = dataclasses.replace(config, model=dataclasses.replace(MODEL, hidden_dim=4))
    with pytest.raises(ValueError, match=r"model\.hidden_dim"):
        run.train(other, whole)


def test_any_mesh_may_resume_a_run(config):
    mesh = dataclasses.replace(config.mesh, **{n: 7 for n in vars(config.mesh)})
    records = (to_record(config), to_record(dataclasses.replace(config, mesh=mesh)))
    require_same_config(*records, FREE_FIELDS, "runs/a")


@pytest.mark.slow
def test_run_loads_and_changes_its_sampling(config, whole):
    found, model = run.load_model(whole)
    assert found == config
    changed = run.with_sampling(model, sampling="exponential", decay=0.5)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 32), np.int32)

    def read(m):
        return tiny.method(m, "__call__", m.init_state(1), jnp.asarray(tokens))[1]

    plain, sampled = np.asarray(read(model)), np.asarray(read(changed))
    # Nothing is remembered in the first block, so nothing is sampled.
    np.testing.assert_allclose(plain[:, :8], sampled[:, :8], atol=1e-5)
    assert not np.allclose(plain[:, 8:], sampled[:, 8:], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": dataclasses.replace(MODEL, vocab_size=99)}, "vocab_size=99"),
        ({"mesh": MeshConfig(fsdp=3)}, "fsdp=3"),
    ],
)
def test_bad_runs_are_refused(config, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run.train(dataclasses.replace(config, **change), tmp_path)


def test_streams_and_carried_memory_go_together():
    with pytest.raises(ValueError, match="carry_memory=False"):
        run.RunConfig(data=run.DataConfig(mode="streamed"))


def test_no_run_and_no_checkpoint_are_told_apart(config, tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        run.load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(run.to_record(config)))
    with pytest.raises(ValueError, match="no checkpoint"):
        run.load_model(tmp_path)


def params(folder):
    return jax.tree.leaves(run.load_model(folder)[1])


def test_a_folder_of_another_run_is_left_alone(config, tmp_path):
    other = json.dumps(run.to_record(run.RunConfig()))
    (tmp_path / "config.json").write_text(other)
    with pytest.raises(
        ValueError,
        match=r"mechanisms\.0\.type was 'SlidingWindowConfig' and is now 'El",
    ):
        run.train(config, tmp_path)
    assert (tmp_path / "config.json").read_text() == other


def test_every_preset_has_documents_and_a_tokenizer_in_a_fresh_installation():
    tokenizers = {}
    for name, config in run.presets().items():
        data, vocab = config.data, config.model.vocab_size
        if data.tokenizer not in tokenizers:
            tokenizers[data.tokenizer] = load_tokenizer(data.tokenizer)
        assert tokenizers[data.tokenizer].vocab_size == vocab, name
        # Each embedded document has more than 32,768 tokens (see test_corpus.py).
        assert data.source == "embedded" and data.context_length <= 32_768, name
        capacity = config.model.capacity
        assert capacity is None or capacity >= data.context_length, name


@pytest.mark.slow
def test_presets_of_every_size_read_tokens():
    """Shapes alone, of one layer and a short text; mechanisms are tested elsewhere."""
    presets = run.presets()
    for name in filter(lambda name: name.startswith("transformer"), presets):
        config = presets[name]
        model = dataclasses.replace(
            config.model, num_layers=len(config.model.mechanisms)
        )
        language_model = run.abstract_model(model)
        tokens = jax.ShapeDtypeStruct((2, 64), "int32")

        def read(m, t):
            return m(m.init_state(2), t)[1]

        logits = nnx.eval_shape(read, language_model, tokens)
        assert logits.shape == (2, 64, config.model.vocab_size), name


def test_another_tokenizer_brings_its_vocabulary():
    presets = run.presets()["trellis-125m"]
    own = load_tokenizer("bytes")
    assert run.with_vocabulary(presets, own).model.vocab_size == 256
    given = dataclasses.replace(
        presets, model=dataclasses.replace(presets.model, vocab_size=99)
    )
    assert run.with_vocabulary(given, own) == given


@pytest.mark.slow
def test_the_learning_rate_is_logged(config, whole):
    lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
    values = [line["values"] for line in lines if line["kind"] == "train"]
    rates = jax.jit(schedule(config.optimizer, 6))(np.arange(6))
    np.testing.assert_allclose([v["learning_rate"] for v in values], rates, rtol=1e-6)


@pytest.mark.parametrize("beyond", [0, 3])
def test_no_perplexity_beyond_the_window_where_no_text_is_longer(
    config, beyond, monkeypatch
):
    model = run.abstract_model(MODEL)
    mask = np.ones((1, model.window + beyond), np.float32)
    scored = TokenLosses(mask, mask, ("text",), ("0.txt",))
    monkeypatch.setattr(evaluation, "token_losses", lambda *_, **__: scored)
    evaluate = validation(config, load_tokenizer("bytes"), model)
    found = evaluate(config.state_shapes(), lambda: False)
    assert ("validation_perplexity_beyond_window" in found) == bool(beyond)
    assert found["validation_perplexity"] == pytest.approx(np.e)


def test_a_schedule_that_ends_elsewhere_is_reported(config):
    def changed(steps, schedule_steps=None):
        loop = dataclasses.replace(config.loop, steps=steps)
        rate = dataclasses.replace(config.optimizer, schedule_steps=schedule_steps)
        return to_record(dataclasses.replace(config, loop=loop, optimizer=rate))

    longer, kept = changed(12), changed(12, 6)
    require_same_config(changed(6), kept, FREE_FIELDS, "runs/a")
    (line,) = schedule_change(changed(6), longer)
    assert "ended at step 6 and now ends at 12; optimizer.schedule_steps=6" in line
    finetuned = [{"config": record} for record in (changed(6), longer)]
    assert schedule_change(*finetuned) == [line]
    assert schedule_change(changed(6), kept) == []


@pytest.mark.parametrize("name", ["elastic-100m", "trellis-125m"])
def test_presets_of_papers_do_not_read_the_sample_for_ever(name):
    preset = run.presets()[name]
    sample = [[TokenisedDocument("d", "text", np.zeros(990_000, np.int32))]]
    read = preset.loop.steps * preset.data.batch_size * preset.data.context_length
    with pytest.raises(ValueError, match="name documents .*tfds:pg19.*sample-epochs"):
        check_epochs(preset.data, sample, read)
    allowed = dataclasses.replace(preset.data, sample_epochs=10**6)
    check_epochs(allowed, sample, read)
    check_epochs(dataclasses.replace(preset.data, source="mine"), sample, read)
    tiny_run = run.presets()["elastic-tiny"]
    check_epochs(tiny_run.data, sample, 1000 * 8 * 2048)
