"""Fine-tuning runs: two stages, resuming in the second, what a folder holds."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import memjax
from memjax.cli import main as cli
from memjax.mechanisms import AttentionConfig, SlidingWindowConfig
from memjax.models import LanguageModel
from memjax.models.hmt.checkpoint import load_hmt
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import HMT
from memjax.models.language_model.reread import ReReadWindow
from memjax.nnx import as_arrays
from memjax.training import LoopConfig, StepConfig
from memjax.training import pretrain as run
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.finetune import finetune
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.hmt_presets import PAPER_SIZES, presets
from memjax.training.finetune.run import FinetuneRun
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.start import starting_point
from tests import tiny
from tests.training.idle import idle_updates

SEGMENT = 8


def stages(samples):
    first = SegmentStage(
        hmt=HMTConfig(
            segment_length=SEGMENT,
            num_sensory_tokens=2,
            num_memories=3,
            retrieval=False,
        ),
        window=SEGMENT,
        data=samples,
        loop=LoopConfig(steps=2, save_every=1, log_every=1),
    )
    memory = dataclasses.replace(first.hmt, retrieval=True)
    return HMTStages(first, dataclasses.replace(first, hmt=memory, depth=3))


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(r["step"], r["values"]["loss"]) for r in records if r["kind"] == "train"]


def leaves(folder):
    return jax.tree.leaves(nnx.state(finetune.load(folder)[1]))


@pytest.fixture(name="whole", scope="module")
def _whole(base, tmp_path_factory, interrupted):
    """Both stages; the second was interrupted in the middle, and resumed."""
    folder = tmp_path_factory.mktemp("whole")

    def train():
        return finetune.finetune_stages(stages(base[1]).stages(), base[0], folder)

    with interrupted(4):
        train()
    stage = finetune.load(folder / "stage2")[0].config
    assert isinstance(stage, SegmentStage) and stage.depth == 3
    finished = losses(folder / "stage1")
    outcome = train()
    assert (outcome.reason, outcome.step) == ("finished", 2)
    assert losses(folder / "stage1") == finished and len(finished) == 2
    return folder


@pytest.mark.slow
def test_the_second_stage_resumed_in_its_middle_bit_for_bit(base, whole, tmp_path):
    second = stages(base[1]).stage2
    finetune.finetune(second, base[0], tmp_path / "stage2", whole / "stage1")
    assert losses(tmp_path / "stage2") == losses(whole / "stage2")
    for a, b in zip(leaves(tmp_path), leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_stage_2_keeps_backbone_and_first_memory_and_draws_the_rest(base, whole):
    described, trained = finetune.load(whole / "stage1")
    assert isinstance(trained, HMT) and not trained.config.retrieval
    config = stages(base[1]).stage2
    before, model, *_ = starting_point(config, None, whole / "stage1")
    state = nnx.to_pure_dict(nnx.state(model))
    kept = nnx.to_pure_dict(nnx.state(trained))
    for name in ("backbone", "initial_memory"):
        same = jax.tree.map(np.array_equal, state[name], kept[name])
        assert all(jax.tree.leaves(same))
    assert set(state) - set(kept) == {"summary_prompt", "query", "key"}
    assert before.backbone_digest == described.backbone_digest
    assert before.start_digest == finetune.digest(trained)


@pytest.mark.slow
def test_run_loads_without_its_backbone(base, whole):
    described, model = finetune.load_model(whole)
    assert isinstance(described, FinetuneRun)
    pretrained, backbone = run.load_model(base[0])
    assert described.model == pretrained.model
    assert described.config == stages(base[1]).stage2
    assert isinstance(model, HMT) and described.data.context_length == 3 * SEGMENT
    original = nnx.state(backbone)
    moved = jax.tree.map(
        lambda a, b: not np.array_equal(a, b), original, nnx.state(model.backbone)
    )
    assert all(jax.tree.leaves(moved))


@pytest.fixture(name="window", scope="module")
def _window(base, tmp_path_factory):
    """The baseline, with adapters."""
    folder = tmp_path_factory.mktemp("window")
    config = dataclasses.replace(stages(base[1]).stage1, memory="window", train="lora")
    finetune.finetune(config, base[0], folder)
    return folder


@pytest.mark.slow
def test_the_baseline_is_the_backbone_with_windows_and_lora_freezes_it(base, window):
    _, model = finetune.load(window)
    assert isinstance(model, LanguageModel)
    assert [type(mechanism) for mechanism in model.config.mechanisms] == [
        SlidingWindowConfig
    ]
    original = run.load_model(base[0])[1]
    assert finetune.digest(finetune.load_backbone(window).model) != finetune.digest(
        original
    )
    mechanism = as_arrays(model.blocks[0].mechanism)
    names = ("query", "key", "value", "output")
    frozen = [getattr(mechanism, name).weight for name in names]
    kept = [getattr(original.blocks[0].parameters().mechanism, name) for name in names]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, frozen, kept)))


@pytest.mark.slow
def test_reread_window_trains_as_it_reads(base, tmp_path):
    stage = dataclasses.replace(
        stages(base[1]).stage1, memory="reread", reread=5, train="lora", depth=3
    )
    finetune.finetune(stage, base[0], tmp_path / "run")
    opened = memjax.load(tmp_path / "run")
    model = opened.model
    assert isinstance(model, ReReadWindow)
    assert (model.reread, model.segment) == (5, SEGMENT)
    original = run.load_model(base[0])[1]
    trained = finetune.digest(model.plain())
    assert trained != finetune.digest(original)
    with pytest.raises(ValueError, match="export its backbone alone"):
        model.save(tmp_path / "out", opened.text)


def test_baselines_have_their_sizes(base):
    backbone = run.load_model(base[0])[1]
    stage = dataclasses.replace(stages(base[1]).stage1, memory="window", sinks=2)
    key = jax.random.key(0)
    limited = stage.wrap(backbone, key)
    assert isinstance(limited, LanguageModel)
    (mechanism,) = limited.config.mechanisms
    assert isinstance(mechanism, SlidingWindowConfig)
    assert (mechanism.window, mechanism.sinks) == (SEGMENT, 2)
    again = dataclasses.replace(stage, memory="reread", sinks=0, reread=3)
    model = again.wrap(backbone, key)
    assert isinstance(model, ReReadWindow)
    assert (model.reread, model.window) == (3, SEGMENT)
    assert again.memory_name == "the last tokens, read again"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(sinks=2), "sinks must be 0, or more with memory='window', got 2"),
        (dict(memory="reread", sinks=2), "sinks must be 0.*with memory='reread'"),
        (dict(memory="window", sinks=-1), "sinks must be 0, or more.*got -1"),
        (dict(memory="window", reread=2), "reread must be 0.*with memory='window'"),
        (dict(memory="reread", reread=-2), "reread must be 0, or more.*got -2"),
    ],
)
def test_sizes_of_other_memories_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SegmentStage(**fields)


@pytest.mark.slow
def test_a_finetuned_run_is_evaluated_and_writes_text(whole, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["eval", str(whole), "--split", "test", "--tokens-per-call", "8"])
    assert stop.value.code == 0
    found = json.loads((whole / "eval-test.json").read_text())["perplexity"]["all"]
    # Its summary reads ahead: not all targets count.
    assert found["perplexity"] != found["all_targets"]
    with pytest.raises(SystemExit) as stop:
        words = ["generate", str(whole), "--prompt", "memory block", "--tokens", "2"]
        cli.main(words)
    assert stop.value.code == 0 and "memory block" in capsys.readouterr().out


@pytest.mark.slow
def test_a_finetuned_run_is_exported_under_the_official_names(whole, tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["export", str(whole), str(tmp_path / "out")])
    assert not stop.value.code
    loaded, (_, trained) = load_hmt(tmp_path / "out"), finetune.load(whole)
    # Not the same parameters: the embedding's scale goes into the embedding.
    tokens = jnp.arange(2 * SEGMENT + 3, dtype=jnp.int32)[None]
    assert isinstance(trained, HMT)

    def read(m):
        return tiny.method(m, "__call__", m.init_state(1), tokens)[1]

    answers = [read(model) for model in (loaded, trained)]
    chex.assert_trees_all_close(*answers, atol=1e-4)


@pytest.mark.slow
def test_another_backbone_is_refused_on_resuming(base, whole, window):
    with pytest.raises(ValueError, match="backbone_digest was"):
        finetune.finetune(stages(base[1]).stage1, window, whole / "stage1")
    with pytest.raises(ValueError, match="must have been trained on backbone="):
        finetune.finetune(stages(base[1]).stage2, window, whole, whole / "stage1")


@pytest.mark.slow
def test_invalid_starts_are_refused(base, whole, window, tmp_path):
    two = stages(base[1])
    for config, start, message in (
        (
            two.stage2,
            whole / "stage2",
            "stage 1, .* has HMT with retrieval",
        ),
        (two.stage2, window, "that run has no memory"),
        (two.stage1, whole / "stage1", "hmt.retrieval=True, got memory='hmt' and Fa"),
        (dataclasses.replace(two.stage2, train="lora"), whole / "stage1", "train='lo"),
        (two.stage2, base[0], "must be the folder of a fine-tuning run"),
    ):
        with pytest.raises(ValueError, match=message):
            finetune.finetune(config, None, tmp_path / "new", start)
    mechanisms = (AttentionConfig(16, 2, 1, 4, capacity=64),)
    narrow = run.load_model(base[0])[0].model
    wider = run.RunConfig(
        model=dataclasses.replace(narrow, model_dim=16, mechanisms=mechanisms),
        data=run.DataConfig(
            base[1].source, "bytes", context_length=16, cache_dir=base[1].cache_dir
        ),
        loop=LoopConfig(steps=1),
    )
    with idle_updates():
        run.train(wider, tmp_path / "wider")
    with pytest.raises(ValueError, match="the backbone's width of 16, got 8"):
        finetune.finetune(
            two.stage2, tmp_path / "wider", tmp_path / "new", whole / "stage1"
        )
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_unusable_backbones_are_refused(base, whole, tmp_path):
    config = stages(base[1]).stage1
    for backbone, message in (
        (None, "backbone=None must be a path"),
        (tmp_path / "none", "none is neither a folder nor a GGUF file"),
        (whole, "must be a plain model, but that one has a memory"),
    ):
        with pytest.raises(ValueError, match=message):
            finetune.finetune(config, backbone, tmp_path / "new")
    longer = dataclasses.replace(config.hmt, segment_length=63)
    with pytest.raises(ValueError, match="sequences of 67 tokens .* allow 64"):
        finetune.finetune(
            dataclasses.replace(config, hmt=longer), base[0], tmp_path / "new"
        )


def test_settings_that_contradict_themselves_are_refused():
    two = presets()["hmt"]
    assert isinstance(two, HMTStages)
    with pytest.raises(ValueError, match="stage2 must have .* hmt.retrieval=True"):
        HMTStages(two.stage1, two.stage1)
    with pytest.raises(ValueError, match="carry_memory=True: streams carry"):
        dataclasses.replace(two.stage1, step=StepConfig(carry_memory=True))
    with pytest.raises(ValueError, match="depth must be at least 1"):
        dataclasses.replace(two.stage1, depth=0)


def test_presets_follow_table_7():
    found = presets()
    lengths = {"opt-350m": 15 * 1024, "llama2-7b": 8 * 256, "mistral-7b": 3 * 512}
    for name in PAPER_SIZES:
        two = found[f"hmt-{name}"]
        assert isinstance(two, HMTStages)
        assert (two.stage1.depth, two.stage1.loop.steps) == (2, 200)
        assert two.stage2.loop.steps == 500
        if name in lengths:
            assert two.stage2.context_length == lengths[name]
    rmt = found["rmt"]
    assert isinstance(rmt, SegmentStage)
    assert rmt.hmt.num_sensory_tokens == 0 and not rmt.hmt.retrieval


def test_sequences_that_are_read_by_segments_are_not_divided(tmp_path):
    stage = SegmentStage(mesh=MeshConfig(sequence=2))
    with pytest.raises(ValueError, match="mesh.sequence must be 1, got 2: a memory"):
        finetune.finetune(stage, tmp_path / "backbone", tmp_path / "run")


def test_scan_layers_of_a_stage():
    backbone, key = tiny.llama(), jax.random.key(0)
    for looped in (False, True):
        memory = HMTConfig(segment_length=SEGMENT, num_sensory_tokens=2)
        stage = SegmentStage(hmt=memory, scan_layers=looped)
        model = stage.wrap(backbone, key)
        assert isinstance(model, HMT)
        assert model.backbone.config.scan_layers == looped
    assert presets()["hmt-llama2-7b"].stages()[0][1].scan_layers
