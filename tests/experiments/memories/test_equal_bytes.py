"""The comparison at equal bytes, tiny: rows, rates, resumption, refused settings."""

import dataclasses
import functools
import json
import math

import jax
import pytest

from experiments.lab.measure import state_bytes
from experiments.memories import equal_bytes, equal_bytes_report
from experiments.memories import equal_bytes_stages as stages
from experiments.memories.equal_bytes import ScoreConfig, TrainConfig
from experiments.memories.equal_bytes_rows import ROWS
from experiments.memories.equal_bytes_stages import Sizes, Tuning
from memjax.models.language_model.windowed import limit_attention
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.retrofit_stage import RetrofitStage
from tests import tiny
from tests.training.idle import idle_updates

SIZES = Sizes(window=4, sinks=1, layers=(1,), more=3, context=8, tokens=64)
SCORES = ScoreConfig(
    tokens=20,
    long=0,
    longest=20,
    first=5,
    needle_lengths=(160,),
    needle_depths=(0, 100),
    facts=1,
    distances=(0, 30),
    segment=20,
)


@pytest.fixture(scope="module")
def model():
    return tiny.drawn(lambda: tiny.make_llama(num_layers=2))


def test_equal_bytes(model):
    kept = functools.partial(state_bytes, tokens=64)
    wide = ROWS["wide"].scored(model, model, SIZES)
    assert [mechanism.window for mechanism in wide.config.layers] == [4, 7]
    window = ROWS["window"].scored(model, model, SIZES)
    # Keys and values of two heads of 4 in float32, and whether they are seen.
    assert kept(wide) - kept(window) == 3 * (2 * 2 * 4 * 4 + 1)
    # Two query heads share keys and values: half of the three tokens, rounded up.
    shared = ROWS["wide-shared"].scored(model, model, SIZES)
    assert [mechanism.window for mechanism in shared.config.layers] == [4, 6]
    assert kept(ROWS["reread"].scored(model, model, SIZES)) < kept(window)
    full = ROWS["full"].scored(window, model, SIZES)
    assert full.config.capacity == 64 and kept(full) > kept(wide)


# Sizes of the preset of M+ do not fit a tiny window.
@pytest.mark.parametrize(
    "name",
    [n for n, row in ROWS.items() if row.stages and n not in ("mplus", "memoryllm")],
)
def test_rows_are_trained_on_as_many_tokens(name, model):
    tuning = Tuning("embedded", updates=16, rate=1e-3, seed=3)
    sizes = dataclasses.replace(SIZES, window=32, context=64)
    make = ROWS[name].stages
    assert make is not None
    made = make(model, sizes, tuning)
    # An alignment sees texts of the tuning.
    tuned = [stage for _, stage in made if getattr(stage, "part", "") != "distill"]
    read = [s.loop.steps * s.data.batch_size * s.tokens_read for s in tuned]
    assert sum(read) == 16 * sizes.context
    assert {stage.seed for _, stage in made} == {3}
    assert made[-1][1].optimizer.learning_rate == 1e-3


def test_a_memory_is_tuned_on_the_texts_of_a_window(model):
    tuning = Tuning("embedded", updates=6, rate=1e-3, seed=3)
    ((_, window),) = stages.tune_beside("none")(model, SIZES, tuning)
    (_, aligned), (_, tuned) = stages.tune_beside("gated_deltanet")(
        model, SIZES, tuning
    )
    for stage in (window, tuned):
        assert (stage.loop.steps, stage.seed) == (6, 3)
        assert stage.optimizer == window.optimizer and stage.data == window.data
    # Half of the texts, each as often as `PASSES`.
    assert isinstance(aligned, RetrofitStage)
    assert aligned.part == "distill" and aligned.seed == 3
    assert aligned.loop.steps == stages.PASSES * 3 and aligned.passes == stages.PASSES


@pytest.mark.parametrize("store", [False, True])
def test_mplus_keeps_no_more_than_the_wide_window(store, monkeypatch):
    monkeypatch.setattr(stages, "MPLUS_TOKENS", 2)
    model = tiny.drawn(lambda: tiny.make_llama(num_layers=2, vocab_size=400))
    sizes = dataclasses.replace(SIZES, window=64, context=64, more=1000)
    memory = stages.mplus_memory(model, sizes, store)
    target = state_bytes(stages.wide_window(model, sizes), sizes.tokens)

    def bytes_of(config):
        return state_bytes(
            stages.add_mplus(model, config, key=jax.random.key(0)), sizes.tokens
        )

    names = ("pool_size", "num_retrieved", "store_size") if store else ("pool_size",)
    longer = {name: getattr(memory, name) + 2 for name in names}
    assert bytes_of(memory) <= target < bytes_of(dataclasses.replace(memory, **longer))
    # What is written before reads leaves a row of the pool that is another document's.
    tuning = Tuning("embedded", updates=6, rate=1e-3, seed=3)
    for _, stage in stages.tune_mplus(store)(model, sizes, tuning):
        assert isinstance(stage, MPlusStage)
        assert store or max(stage.tasks.chunks) * 2 < stage.memory.pool_size
    monkeypatch.setattr(
        stages, "wide_window", lambda model, _: limit_attention(model, 4)
    )
    with pytest.raises(ValueError, match="M. keeps at least"):
        stages.mplus_memory(model, sizes, store)


def _result(name, nats, seed=0, changes=None):
    documents = [
        {
            "name": f"{kind}{i}",
            "kind": kind,
            "nats": [50.0, nats + i],
            "targets": [5, 10],
        }
        for kind in ("proofs", "code", "prose")
        for i in range(5)
    ]
    trained = {"updates": 2, "tokens": 16, "cpu_seconds": 1.0, "rate": 1e-3}
    return {
        "row": name,
        "label": ROWS[name].label,
        "seed": seed,
        "layers": [1],
        "bytes": 10,
        "texts_digest": "a",
        "edges": [0, 5, 15],
        "bins": [1, 2],
        "documents": documents,
        "training": trained if ROWS[name].stages else None,
        "reading": {"tokens": 300, "cpu_seconds": 2.0},
        "needles": {"160": {"0": {"right": 1.0}, "100": {"right": 0.0}}},
        "facts": {"30": {"right": 0.5}},
    } | (changes or {})


def test_rows_are_put_together(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    assert equal_bytes_report.write(folder) is None
    given = (("wide", 30.0, 0), ("window", 40.0, 0))
    given += (("lattice", 20.0, 1), ("wide-tuned", 25.0, 1), ("wide-tuned", 9.0, 0))
    for name, nats, seed in given:
        text = json.dumps(_result(name, nats, seed))
        (folder / f"{name}-seed{seed}.json").write_text(text)
    found = equal_bytes_report.write(folder)
    assert found is not None
    by_row = {(row["row"], row["seed"]): row for row in found["rows"]}
    assert by_row["lattice", 1]["saved"]["code"]["nats"] == pytest.approx(0.5)
    assert by_row["window", 0]["saved"]["prose"]["nats"] == pytest.approx(-1.0)
    assert "saved" not in by_row["wide-tuned", 1]
    assert by_row["wide", 0]["perplexity"]["proofs"] == pytest.approx(math.exp(3.2))
    assert "trellis" in found["missing"] and "lattice" not in found["missing"]
    for plot in ("positions", "needles"):
        assert (tmp_path / f"{plot}.png").stat().st_size > 1000
    for one in ("perplexity", "saved", "positions", "questions", "cost"):
        rows = list(getattr(equal_bytes_report, one).rows(found))
        assert all(row.keys() <= rows[0].keys() for row in rows)
    (lattice,) = [row for row in rows if "Lattice" in row[""]]
    assert lattice == {
        "": "Lattice, seed 1",
        "tokens read in a CPU second": "150",
        "updates": "2",
        "training tokens": "16",
        "learning rate": "0.001",
        "CPU seconds": "1",
    }
    for field, other in (("texts_digest", "b"), ("edges", [0, 9, 15])):
        text = json.dumps(_result("infini", 1.0, 0, {field: other}))
        (folder / "infini-seed0.json").write_text(text)
        with pytest.raises(ValueError, match=f"cannot be compared: {field} must"):
            equal_bytes_report.write(folder)


def test_rows_are_compared_with_the_window_of_their_bytes():
    sizes = {"window": 8, "wide-shared": 10, "infini": 10, "wide": 20, "full": 90}
    rows = [_result(name, 20.0, 0, {"bytes": size}) for name, size in sizes.items()]
    found = {row["row"]: row for row in equal_bytes_report.summary(rows)["rows"]}
    # Infini-attention is tuned, and no tuned window is there.
    with_base = {name: row.get("saved_over") for name, row in found.items()}
    assert with_base == {
        "window": ROWS["wide-shared"].label,
        "wide-shared": None,
        "infini": None,
        "wide": None,
        "full": ROWS["wide"].label,
    }


def test_the_plan_leaves_out_what_is_done(tmp_path, capsys):
    config = equal_bytes.Config(
        rows=("window", "lattice"), seeds=(0, 1), output=tmp_path
    )
    assert config.missing() == [("window", 0), ("lattice", 0), ("lattice", 1)]
    (tmp_path / "lattice-seed0.json").write_text("{}")
    equal_bytes.main(dataclasses.replace(config, plan=True))
    said = capsys.readouterr().out
    assert "1 done, 2 missing" in said and "lattice, seed 1" in said
    for name, seed in config.missing():
        (tmp_path / f"{name}-seed{seed}.json").write_text("{}")
    equal_bytes.main(config)
    assert "every row has its result" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: equal_bytes.Config(rows=("latice",)), "rows.*latice.*lattice"),
        (lambda: equal_bytes.Config(least=4), "least must be at least 5"),
        (lambda: equal_bytes.Config(context=512), "tokens must be first=512 times 2"),
        (lambda: TrainConfig(rates=()), "rates must be positive"),
        (lambda: TrainConfig(rates=(0.1, -1.0)), "rates must be positive"),
        (lambda: TrainConfig(updates=0), "updates must be at least 1"),
        (lambda: ScoreConfig(tokens=512), "tokens must be first=512 times 2"),
        (lambda: ScoreConfig(tokens=3000), "up to longest=16384, got 3000"),
        (
            lambda: dataclasses.replace(SIZES, context=7),
            "context must be a multiple of window=4, got 7",
        ),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_layers_must_be_measured_or_given(tmp_path):
    config = equal_bytes.Config(output=tmp_path / "rows")
    with pytest.raises(ValueError, match="run python -m experiments.memories.layers"):
        equal_bytes.chosen_layers(config)
    rises = [{"all": {"nats": nats}} for nats in (0.1, 0.5, 0.2, 0.4)]
    (tmp_path / "layers.json").write_text(json.dumps({"rise": rises}))
    assert equal_bytes.chosen_layers(dataclasses.replace(config, count=2)) == (1, 3)
    assert equal_bytes.chosen_layers(dataclasses.replace(config, layers=(3,))) == (3,)


@pytest.mark.slow
def test_rows_are_trained_scored_and_not_run_again(small, tmp_path, capsys):
    source, backbone = small
    config = equal_bytes.Config(
        rows=("window", "wide-tuned", "gated-deltanet"),
        corpus=source,
        backbone=str(backbone),
        window=5,
        sinks=2,
        layers=(1,),
        more=4,
        context=20,
        least=5,
        train=TrainConfig(updates=4, rate_updates=1, rates=(1e-3, 1e-2)),
        scores=dataclasses.replace(SCORES, tokens=20, long=1, longest=40),
        run_dir=tmp_path / "runs",
        output=tmp_path / "results",
    )
    with idle_updates():
        equal_bytes.main(config)
    said = capsys.readouterr().out
    assert "gated-deltanet: " in said and "bytes of state, the wide window" in said
    found = json.loads((tmp_path / "results.json").read_text())
    assert [row["row"] for row in found["rows"]] == [
        "window",
        "wide-tuned",
        "gated-deltanet",
    ]
    memory = found["rows"][2]
    assert memory["training"]["tokens"] == 4 * 20
    assert memory["training"]["skipped_updates"] == 0
    assert memory["training"]["rate"] in config.train.rates
    assert set(memory["saved"]) == {"proofs", "code", "prose"}
    assert set(memory["facts"]) == {"0", "30"}
    # Idle updates leave the gate shut: the narrow window loses to the wide one.
    assert memory["perplexity"] == pytest.approx(found["rows"][0]["perplexity"])
    equal_bytes.main(config)
    assert "every row has its result" in capsys.readouterr().out
