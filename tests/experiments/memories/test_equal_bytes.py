"""The comparison at a tiny size: rows, scores, what goes on and what is refused."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from experiments.lab import measure as scores
from experiments.lab.measure import ScoreConfig
from experiments.memories import equal_bytes as table
from experiments.memories import equal_bytes_report as report
from experiments.memories import equal_bytes_training as training
from experiments.memories import equal_bytes_tunings as tunings
from experiments.memories.equal_bytes_rows import ROWS
from experiments.memories.equal_bytes_training import TrainConfig
from experiments.memories.equal_bytes_tunings import Sizes, Tuning
from experiments.tables import compare as tables
from memjax import evaluation
from memjax.data import Passage, Question, load_tokenizer
from memjax.data.documents.tokens import TokenisedDocument
from memjax.evaluation.statistics import loss_difference_by_document
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
BPE = load_tokenizer("bpe4k")


@pytest.fixture(scope="module")
def model():
    return tiny.drawn(lambda: tiny.make_llama(num_layers=2))


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(0)
    return [
        TokenisedDocument(
            f"{kind}{i}",
            kind,
            rng.integers(0, tiny.LLAMA.vocab_size, 21).astype(np.int32),
        )
        for kind in ("proofs", "code", "prose")
        for i in range(5)
    ]


def test_binned_losses_compare_as_those_of_positions(model, texts):
    narrow = limit_attention(model, 2)
    whole = [
        evaluation.token_losses(one, texts, segment=20, batch_size=2)
        for one in (narrow, model)
    ]
    found = [scores.perplexity(one, texts, SCORES) for one in (narrow, model)]
    binned = [scores.binned_losses(one["documents"], SCORES.bins) for one in found]
    for one, parts in zip(whole, binned, strict=True):
        expected = evaluation.perplexity(one, kind="code", first=5)
        got = evaluation.perplexity(parts, kind="code")
        assert got == pytest.approx(expected, rel=1e-5)
        late = np.arange(20) >= 5
        one.nll[:] *= late
        one.mask[:] *= late
    np.testing.assert_allclose(
        loss_difference_by_document(*binned),
        loss_difference_by_document(*whole),
        atol=1e-5,
    )
    assert found[0]["tokens"] == 15 * 20 and SCORES.edges == [0, 5, 10, 20]


def test_long_documents_have_bins_of_their_own(model, texts):
    wanted = dataclasses.replace(SCORES, tokens=10, long=1)
    short = [
        x._replace(tokens=x.tokens[: 21 if i else 11]) for i, x in enumerate(texts)
    ]
    found = scores.perplexity(model, short[:2], wanted)["documents"]
    assert [d["targets"] for d in found] == [[5, 5, 0], [5, 5, 10]]
    assert found[0]["nats"][2] == 0 < found[1]["nats"][2]
    only_short = scores.perplexity(model, short[:1], wanted)["documents"]
    np.testing.assert_allclose(only_short[0]["nats"], found[0]["nats"], rtol=1e-5)


def test_facts_stand_as_far_back_as_they_are_said_to():
    fact = Question("Its capital is Oslo.", "The capital is", "Oslo", "", "Norway")
    passages = [Passage("In Norway."), Passage("Rain fell. " * 40)]
    inputs = [scores.fact_input(BPE, fact, passages, n) for n in (0, 30)]
    assert len(inputs[1].tokens) - len(inputs[0].tokens) == 30
    for found in inputs:
        assert BPE.decode(found.tokens[found.answer :]) == " Oslo"
        text = BPE.decode(found.tokens)
        assert text.startswith(fact.context) and "In Norway" not in text
    with pytest.raises(ValueError, match="distances must be at most"):
        scores.fact_input(BPE, fact, passages, 10_000)


def test_needles_lie_at_their_depths():
    words = ("It rained. " * 50).split()
    first, last = scores.needle_inputs(BPE, words, 160, 0, SCORES)
    places = [BPE.decode(x.tokens).index("One of the special") for x in (first, last)]
    assert places[0] < places[1]
    assert all(len(x.tokens) <= 160 for x in (first, last))
    assert BPE.decode(first.tokens[first.answer :])[1:].isdigit()


def test_equal_bytes(model):
    kept = lambda one: scores.kept_bytes(one, 64)
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


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.stages])
def test_rows_are_trained_on_as_many_tokens(name, model):
    if "mplus" in name or "memory" in name:
        pytest.skip("sizes of the preset do not fit a tiny window")
    tuning = Tuning("embedded", updates=16, rate=1e-3, seed=3)
    sizes = dataclasses.replace(SIZES, window=32, context=64)
    make = ROWS[name].stages
    assert make is not None
    stages = make(model, sizes, tuning)
    # An alignment sees texts of the tuning.
    aligns = lambda stage: isinstance(stage, RetrofitStage) and stage.part == "distill"
    tuned = [stage for _, stage in stages if not aligns(stage)]
    read = lambda s: s.loop.steps * s.data.batch_size * s.tokens_read
    assert sum(map(read, tuned)) == 16 * sizes.context
    assert {stage.seed for _, stage in stages} == {3}
    assert stages[-1][1].optimizer.learning_rate == 1e-3


def test_a_memory_is_tuned_on_the_texts_of_a_window(model):
    tuning = Tuning("embedded", updates=6, rate=1e-3, seed=3)
    made = lambda tune: tune(model, SIZES, tuning)
    ((_, window),) = made(tunings.tune_beside("none"))
    (_, aligned), (_, tuned) = made(tunings.tune_beside("gated_deltanet"))
    for stage in (window, tuned):
        assert (stage.loop.steps, stage.seed) == (6, 3)
        assert stage.optimizer == window.optimizer and stage.data == window.data
    # Half of the texts, each as often as `PASSES`.
    assert isinstance(aligned, RetrofitStage)
    assert aligned.part == "distill" and aligned.seed == 3
    assert aligned.loop.steps == tunings.PASSES * 3 and aligned.passes == tunings.PASSES


@pytest.mark.parametrize("store", [False, True])
def test_mplus_keeps_no_more_than_the_wide_window(store, monkeypatch):
    monkeypatch.setattr(tunings, "MPLUS_TOKENS", 2)
    model = tiny.drawn(lambda: tiny.make_llama(num_layers=2, vocab_size=400))
    sizes = dataclasses.replace(SIZES, window=64, context=64, more=1000)
    memory = tunings.mplus_memory(model, sizes, store)
    target = scores.kept_bytes(tunings.wide_window(model, sizes), sizes.tokens)
    bytes_of = lambda config: scores.kept_bytes(
        tunings.add_mplus(model, config, key=jax.random.key(0)), sizes.tokens
    )
    names = ("pool", "retrieved", "store") if store else ("pool",)
    longer = {name: getattr(memory, name) + 2 for name in names}
    assert bytes_of(memory) <= target < bytes_of(dataclasses.replace(memory, **longer))
    # What is written before reads leaves a row of the pool that is another document's.
    tuning = Tuning("embedded", updates=6, rate=1e-3, seed=3)
    for _, stage in tunings.tune_mplus(store)(model, sizes, tuning):
        assert isinstance(stage, MPlusStage)
        assert store or max(stage.tasks.chunks) * 2 < stage.memory.pool_size
    monkeypatch.setattr(
        tunings, "wide_window", lambda model, _: limit_attention(model, 4)
    )
    with pytest.raises(ValueError, match="M. keeps at least"):
        tunings.mplus_memory(model, sizes, store)


def test_the_better_rate_is_taken_and_kept(monkeypatch, tmp_path):
    tried = []
    monkeypatch.setattr(training, "_trial", lambda name, rate, *_: tried.append(rate))
    losses = iter([math.nan, 2.0, 1.0])
    monkeypatch.setattr(training, "validation_loss", lambda *_: next(losses))
    config = TrainConfig(rates=(1e-2, 1e-3, 1e-4))
    setting = training.Setting(None, "", SIZES, "", [], SCORES, tmp_path)  # pyright: ignore
    choose = lambda config: training.choose_rate(
        "lattice", config, setting, tmp_path / "rates" / "lattice.json"
    )
    assert choose(config)["rate"] == 1e-4
    assert choose(config)["validation_nats"][1:] == [2.0, 1.0]
    assert tried == [1e-2, 1e-3, 1e-4]
    assert choose(TrainConfig(rates=(5e-4,))) == {"rate": 5e-4}


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


def test_rows_are_put_together(tmp_path, monkeypatch):
    assert report.write(tmp_path) is None
    given = (("wide", 30.0, 0), ("window", 40.0, 0))
    given += (("lattice", 20.0, 1), ("wide-tuned", 25.0, 1), ("wide-tuned", 9.0, 0))
    for name, nats, seed in given:
        text = json.dumps(_result(name, nats, seed))
        (tmp_path / f"{name}-seed{seed}.json").write_text(text)
    found = report.write(tmp_path)
    assert found is not None
    by_row = {(row["row"], row["seed"]): row for row in found["rows"]}
    assert by_row["lattice", 1]["saved"]["code"]["nats"] == pytest.approx(0.5)
    assert by_row["window", 0]["saved"]["prose"]["nats"] == pytest.approx(-1.0)
    assert "saved" not in by_row["wide-tuned", 1]
    assert by_row["wide", 0]["perplexity"]["proofs"] == pytest.approx(math.exp(3.2))
    assert "trellis" in found["missing"] and "lattice" not in found["missing"]
    for plot in ("positions", "needles"):
        assert (tmp_path / f"{plot}.png").stat().st_size > 1000
    monkeypatch.setattr(tables, "load", lambda name: found)
    for name in ("perplexity", "positions", "questions", "cost"):
        made = getattr(tables, name)()
        assert {len(row) for row in made.rows} == {len(made.header)}
    assert ["Lattice, seed 1", "150", "2", "16", "0.001", "1"] in tables.cost().rows
    for field, other in (("texts_digest", "b"), ("edges", [0, 9, 15])):
        text = json.dumps(_result("infini", 1.0, 0, {field: other}))
        (tmp_path / "infini-seed0.json").write_text(text)
        with pytest.raises(ValueError, match=f"cannot be compared: {field} must"):
            report.write(tmp_path)


def test_rows_are_compared_with_the_window_of_their_bytes():
    sizes = {"window": 8, "wide-shared": 10, "infini": 10, "wide": 20, "full": 90}
    rows = [_result(name, 20.0, 0, {"bytes": size}) for name, size in sizes.items()]
    found = {row["row"]: row for row in report.summary(rows)["rows"]}
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
    config = table.Config(rows=("window", "lattice"), seeds=(0, 1), output=tmp_path)
    assert config.missing() == [("window", 0), ("lattice", 0), ("lattice", 1)]
    (tmp_path / "lattice-seed0.json").write_text("{}")
    table.main(dataclasses.replace(config, plan=True))
    said = capsys.readouterr().out
    assert "1 done, 2 missing" in said and "lattice, seed 1" in said
    for name, seed in config.missing():
        (tmp_path / f"{name}-seed{seed}.json").write_text("{}")
    table.main(config)
    assert "every row has its result" in capsys.readouterr().out


def test_parts_are_measured_once(tmp_path):
    file = tmp_path / "a" / "part.json"
    assert table.once(file, lambda: {"x": 1}) == {"x": 1}
    assert table.once(file, lambda: {"x": 2}) == {"x": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table.Config(rows=("latice",)), "rows.*latice.*lattice"),
        (lambda: table.Config(least=4), "least must be at least 5"),
        (lambda: table.Config(context=512), "tokens must be first=512 times 2"),
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
    config = table.Config(output=tmp_path)
    with pytest.raises(ValueError, match="run python -m experiments.memories.layers"):
        table.chosen_layers(config)
    rises = [{"all": {"nats": nats}} for nats in (0.1, 0.5, 0.2, 0.4)]
    (tmp_path / "layers.json").write_text(json.dumps({"rise": rises}))
    assert table.chosen_layers(dataclasses.replace(config, count=2)) == (1, 3)
    assert table.chosen_layers(dataclasses.replace(config, layers=(3,))) == (3,)


@pytest.mark.slow
def test_rows_are_trained_scored_and_not_run_again(small, tmp_path, capsys):
    source, backbone = small
    config = table.Config(
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
        table.main(config)
    said = capsys.readouterr().out
    assert "gated-deltanet: " in said and "bytes kept, the wide window" in said
    found = json.loads((tmp_path / "results" / "summary.json").read_text())
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
    table.main(config)
    assert "every row has its result" in capsys.readouterr().out
