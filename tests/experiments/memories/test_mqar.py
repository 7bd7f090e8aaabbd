"""Small models: equal sizes, fair data, rates chosen on validation, runs resumed."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.memories import mqar, recall, small_models
from memjax.training import LoopConfig, OptimizerConfig
from memjax.training import pretrain as run
from memjax.training.distributed import sharding

TASK = mqar.Task(
    small_models.Scale(1, 32, 2, 4, 48, 48 * 4, 2, 1e-3),
    vocab_size=48,
    fillers=12,
    pairs=(2, 6),
    tested=(2, 6, 16),
    lengths=(48, 64),
)


@pytest.fixture(name="tiny")
def _tiny(monkeypatch):
    monkeypatch.setattr(mqar, "SMALL", TASK)


def config_of(folder, *only, **more):
    return recall.Config(
        only=only, test_rows=2, run_dir=folder / "runs", output=folder, **more
    )


def leaves(model):
    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.slow
def test_recall_chooses_a_rate_on_validation_and_resumes(tiny, tmp_path, capsys):
    config = config_of(tmp_path, "DeltaNet")
    recall.main(config)
    report = json.loads((tmp_path / "recall.json").read_text())
    assert [row["seed"] for row in report["rows"]] == [0, 1]
    for row in report["rows"]:
        tests = [(48, 2), (48, 6), (64, 2), (64, 6), (64, 16)]
        assert [(s["length"], s["pairs"]) for s in row["scores"]] == tests
        # Two updates teach next to nothing.
        assert all(0 <= score["tokens"] <= 0.5 for score in row["scores"])
        folder = tmp_path / "runs" / "recall" / "DeltaNet"
        chosen = json.loads((folder / "rate.json").read_text())
        rates = recall.STUDIES["recall"].rates
        files = [folder / "seed0" / f"rate{rate:g}.json" for rate in rates]
        tried = [1 - json.loads(f.read_text())["value"]["validation"] for f in files]
        assert chosen["validation"] == tried
        assert row["learning_rate"] == rates[int(np.argmin(tried))]
    assert set(report["accuracy"]) == {"48", "64"}
    capsys.readouterr()
    recall.main(config)
    assert "seed 1\n" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds the result of other settings"):
        recall.main(dataclasses.replace(config, test_rows=3))


def test_examples_depend_on_seed_and_step_alone():
    first, again, other = (mqar.batch(TASK, 3, step) for step in (1, 1, 2))
    np.testing.assert_array_equal(again.tokens, first.tokens)
    assert not np.array_equal(again.tokens, other.tokens)
    # Rows of 2 and 6 pairs in equal numbers.
    counts, rows = np.unique(np.asarray(again.mask).sum(axis=1), return_counts=True)
    assert counts.tolist() == [2, 6] and set(rows) == {2}
    one, other = (mqar.sequences(TASK, seed, 2, 2, 48) for seed in (1, 2))
    assert not np.array_equal(one.tokens, other.tokens)


@pytest.mark.slow
def test_updates_on_the_device_equal_those_of_the_training_loop():
    model = small_models.equal_parameters(
        {"a": mqar.model(TASK, "deltanet")}, TASK.scale
    )["a"]
    scale = TASK.scale
    settings = run.RunConfig(
        model,
        run.DataConfig("embedded", context_length=48, batch_size=4),
        OptimizerConfig(
            learning_rate=scale.learning_rate,
            warmup_ratio=scale.warmup,
            final_ratio=0.1,
        ),
        loop=LoopConfig(steps=scale.steps),
        seed=3,
    )
    state, step = run.build_step(settings, sharding.make_mesh(settings.mesh))
    for i in range(scale.steps):
        state, _ = step(state, mqar.batch(TASK, 3, i))
    draw = functools.partial(mqar.batch, TASK)
    found, _ = small_models.train(scale, model, 3, draw)
    for a, b in zip(leaves(found), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("study", recall.STUDIES)
def test_models_have_equal_parameters_and_states(study):
    made = recall.models(study)
    counts = [small_models.parameters(model) for model in made.values()]
    # One hidden unit of the feed-forward layers more or less.
    assert max(counts) - min(counts) <= 3 * 32 * 2
    # Rows that keep all tokens, have other numbers of slots, or tokens of an open chunk
    # that fill the state.
    apart = ("Transformer++", "m / 2", "2 m", "C = 64, at most 1/64, l2_silu")
    sizes = [small_models.state_bytes(m) for n, m in made.items() if n not in apart]
    assert len(sizes) >= 7 and max(sizes) / min(sizes) < 1.25
    model = mqar.model(mqar.SMALL, "gsa")
    state = jax.eval_shape(lambda: run.abstract_model(model).init_state(1))
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert small_models.state_bytes(model) == kept
