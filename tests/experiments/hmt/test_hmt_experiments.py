"""Every HMT experiment runs whole at a tiny size, and says how it scored."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.hmt import (
    ablations,
    common,
    cost,
    length,
    rows,
    scores,
    tuned,
)
from experiments.hmt import questions as qa
from experiments.lab.intervals import format_interval, loss_difference, select_kind
from memjax.data import Question, load_tokens
from memjax.evaluation import TokenLosses
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.language_model.windowed import limit_attention
from memjax.training import LoopConfig
from memjax.training.finetune.curricula import HMTStages

L = 8
BACKBONE = ModelConfig(
    mechanisms=(AttentionConfig(16, 2, 1, 8, capacity=64),),
    num_layers=1,
    vocab_size=4096,
    model_dim=16,
    hidden_dim=16,
    dtype="float32",
    remat=False,
)


def _tiny_stages():
    def shrink(stage):
        memory = dataclasses.replace(
            stage.hmt, segment_length=L, num_sensory_tokens=1, num_memories=4
        )
        data = dataclasses.replace(stage.data, batch_size=2)
        loop = LoopConfig(steps=2, save_every=50, keep=1)
        return dataclasses.replace(stage, hmt=memory, depth=2, data=data, loop=loop)

    stages = common.SCALES["cpu"].stages
    return HMTStages(shrink(stages.stage1), shrink(stages.stage2))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    scale = common.Scale("tiny", _tiny_stages(), 64)
    for name in ("cpu", "cpu-short"):
        monkeypatch.setitem(common.SCALES, name, scale)
    monkeypatch.setattr(common, "TINY", BACKBONE)
    monkeypatch.setattr(scores, "TOGETHER", 4)


@pytest.fixture(scope="module", name="run_dir")
def _run_dir(tmp_path_factory):
    """One for all, as the experiments share their models."""
    return tmp_path_factory.mktemp("hmt")


@pytest.fixture(name="untrained")
def _untrained(run_dir, monkeypatch):
    """Models are made, not trained as in `test_length`; the stages that they are of."""
    config = length.Config(run_dir=run_dir, backbone_steps=2)
    backbone, tokenizer = common.load_backbone(config)
    stages = []

    def train_stage(config, stage, start=None):
        if start is not None:
            stage.check_start(stages[int(start.name)], "start")
        # The documents give samples.
        documents = load_tokens(stage.data.source, tokenizer, "train")
        next(stage.batches(documents, tokenizer, tokenizer.vocab_size))
        stages.append(stage)
        return Path(str(len(stages) - 1))

    def load(folder):
        model = stages[int(folder.name)].wrap(backbone, jax.random.key(1))
        graph, params = nnx.split(model)
        # On a device, as a checkpoint's are: programs of `test_length` serve.
        params = jax.device_put(params, jax.devices()[0])
        return common.Trained(nnx.merge(graph, params), 1.0)

    monkeypatch.setattr(common, "train_stage", train_stage)
    monkeypatch.setattr(common, "load", load)
    return stages


def run(program, run_dir, tmp_path, **more):
    options = dict(run_dir=run_dir, output=tmp_path / "result", backbone_steps=2)
    program.main(program.Config(**options | more))
    return json.loads((tmp_path / "result.json").read_text())


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_length(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rows, "TRUNCATED", 16)
    more = dict(lengths=(16, 64), seeds=1, rates=(1e-3, 1e-2))
    trained = rows.TUNED.format(rows.AGAIN)
    some = (rows.SINK_WINDOW, rows.AGAIN, rows.APART, rows.FULL, "3-gram", trained)
    report = run(length, run_dir, tmp_path, only=(*some, rows.HIERARCHICAL), **more)
    assert "training" in capsys.readouterr().out
    assert report["documents_that_reach_it"] == [4, 4]
    assert report["scored_from"] == L // 2 and rows.RMT in report["missing"]
    assert set(report["perplexity"]) == {"all", "code", "manuals", "proofs", "prose"}
    assert set(some) <= set(report["perplexity"]["all"])
    # Two updates teach next to nothing of 4,096 tokens; the n-gram counted them all.
    for name, row in report["perplexity"]["all"].items():
        low, high = (10, 10_000) if "gram" in name else (1000, 8000)
        assert all(low < value < high for value in row), (name, row)
    models = report["models"]
    hmt, window = (models[name] for name in (rows.HIERARCHICAL, rows.SINK_WINDOW))
    # A token of the window is two keys of 8 floats, and a mask.
    assert 0 <= window["state_bytes"] - hmt["state_bytes"] < 2 * 8 * 4 + 1
    again = models[rows.AGAIN]
    assert again["reread"] + again["segment"] <= window["window"] + 8
    assert again["state_bytes"] < window["state_bytes"] / 10 and again["reads"] > 1
    assert set(hmt["validation_perplexity"]) == {"0.001", "0.01"}
    assert hmt["learning_rate"] in (1e-3, 1e-2) and hmt["seeds"] == 1
    gain = next(x for x in report["gains"] if x["model"] == rows.HIERARCHICAL)
    # There is one document of a kind.
    assert gain["documents"] == 4 and gain["low"] is None
    assert report["command"] and report["versions"]
    assert all(model["devices"] == [report["device"]] for model in models.values())
    assert is_png(tmp_path / "result.png")

    # What is there is format_interval, and nothing of it is done again.
    monkeypatch.setattr(scores, "score", None)
    monkeypatch.setattr(tuned, "NGram", None)
    same = run(length, run_dir, tmp_path, only=(rows.APART,), **more)
    assert "training" not in capsys.readouterr().out
    assert same["perplexity"] == report["perplexity"]
    assert same["gains"] == report["gains"]


@pytest.mark.slow
def test_ablations(run_dir, tmp_path, untrained):
    options: dict[str, Any] = dict(
        run_dir=run_dir, backbone_steps=2, output=tmp_path, sensory=(1,), depths=(2,)
    )
    config = ablations.Config(group="sensory", **options)
    ablations.main(config)
    assert [x.hmt.num_sensory_tokens for x in untrained] == [1, 1] * 2
    assert [x.hmt.retrieval for x in untrained] == [False, True] * 2
    assert [x.seed for x in untrained] == [0, 0, 1, 1]
    untrained.clear()
    report = json.loads((tmp_path / "sensory.json").read_text())
    assert list(report["models"]) == ["k = 1", "3-gram"] and report["base"] == "k = 1"
    first, counted = report["models"].values()
    # Two models that are hardly trained, and counts of all training documents.
    assert len(first["gain_by_seed"]) == 2 and not counted["gain_by_seed"]
    assert counted["gain"]["nats"] > 1
    ablations.main(dataclasses.replace(config, group="depth", seeds=1))
    report = json.loads((tmp_path / "depth.json").read_text())
    hmt, rmt, counted = report["models"]
    assert (hmt, rmt) == ("HMT, depth 2 (32 tokens a row)", "RMT, depth 2")
    for row in report["models"].values():
        assert set(row["perplexity"]) == {"causal", "all"}
    assert [x.hmt.num_sensory_tokens for x in untrained] == [1, 1, 0]


@pytest.mark.slow
def test_questions(run_dir, tmp_path, untrained):
    path = tmp_path / "qa.jsonl"
    lines = [
        {
            "context": f"{i} is so.",
            "question": f"And {i} is",
            "answer": "it" if i % 4 else "that",
            "kind": f"kind {i % 2}",
            "subject": str(i),
        }
        for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    more = dict(questions=path, train_contexts=1, test_contexts=(1, 2), test_items=3)
    report = run(qa, run_dir, tmp_path, **more)
    assert report["trained_items"] == 9 and report["test_items"] == 3
    assert report["answers_lie_from"] == L // 2
    for test in report["contexts"].values():
        for row in test["models"].values():
            assert row["all"]["questions"] == 3
            assert row["all"]["perplexity"] > 100 and row["all"]["exact"] == 0
    assert (
        report["contexts"]["2"]["mean_tokens"] > report["contexts"]["1"]["mean_tokens"]
    )


def test_training_and_test_questions_share_no_subject():
    items = [Question(f"c{i}", "q", "a", "", str(i % 9)) for i in range(40)]
    train, test = qa.split(items)
    assert sorted(train + test) == sorted(items)
    assert not {x.subject for x in train} & {x.subject for x in test}


def test_the_most_frequent_answer_of_each_kind_in_training_is_the_baseline():
    item = lambda kind, answer: Question("c", "q", answer, kind)
    train = [item("a", "x"), item("a", "x"), item("a", "y"), item("b", "y")]
    test = [item("a", "x"), item("a", "y"), item("b", "y"), item("c", "z")]
    found = qa.majority_exact(train, test)
    assert found == {"all": 0.5, "a": 0.5, "b": 1.0, "c": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["HMT", "sliding window"])
def test_cost(kind, monkeypatch):
    monkeypatch.setattr(cost.Config, "backbone", BACKBONE)
    config = cost.Config(segment=L, lengths=(64,))
    row = cost.measure(config, kind, 64)
    assert row["seconds"] > 0 and row["peak_mebibytes"] > 10
    assert row["growth_mebibytes"] >= 0
    long = nnx.eval_shape(lambda: cost.build(config, kind, 640))
    assert scores.state_bytes(long) == row["state_bytes"]


def test_a_window_of_equal_memory_is_the_smallest_that_is_no_smaller():
    model = LanguageModel(BACKBONE, key=jax.random.key(0))
    size = lambda window: scores.state_bytes(limit_attention(model, window))
    for wanted in (size(5), size(5) + 1, size(6) - 1):
        window = scores.equal_window(model, wanted)
        assert size(window) >= wanted > size(window - 1)
    with_sinks = lambda w: scores.state_bytes(limit_attention(model, w, 2))
    window = scores.equal_window(model, size(9), sinks=2)
    assert with_sinks(window) >= size(9) > with_sinks(window - 1)


def losses(nll, kinds):
    nll = np.asarray(nll, np.float32)
    names = tuple(str(i) for i in range(len(kinds)))
    return TokenLosses(nll, np.ones_like(nll), tuple(kinds), names)


def test_a_gain_of_few_documents_has_no_interval():
    base, model = losses([[3.0, 3.0]] * 6, "aaaaab"), losses([[2.0, 2.5]] * 6, "aaaaab")
    found = loss_difference(base, model)
    assert found["nats"] == pytest.approx(0.75) and found["low"] is None
    assert format_interval(found) == "+0.750 (too few documents)"
    many = [select_kind(x, "a") for x in (base, model)]
    assert loss_difference(*many)["standard_error"] == pytest.approx(0, abs=1e-6)
    assert format_interval(loss_difference(*many)) == "+0.750 [+0.750, +0.750]"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: length.Config(steps=(0, 2)), "steps must be at least 1"),
        (lambda: length.Config(test_tokens=-1), "test_tokens must be >= 0"),
        (lambda: length.Config(lengths=()), "lengths must be at least 1"),
        (lambda: ablations.Config(sensory=(L + 1,)), r"sensory must be in \[0, 8\]"),
        (lambda: ablations.Config(depths=(1,)), "depths must be at least 2"),
        (lambda: qa.Config(test_contexts=(0,)), "test_contexts and test_items"),
        (lambda: cost.Config(lengths=(8,)), "lengths must be at least a segment"),
        (lambda: cost.Config(segment=-1), "segment must be >= 0"),
    ],
)
def test_bad_configs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
