"""Commands with URLs in place of folders."""

import dataclasses
import json
from pathlib import Path

import pytest

import memjax
from memjax.buckets.bucket import Bucket
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import HMT
from memjax.training import LoopConfig, pretrain
from memjax.training.finetune import finetune
from memjax.training.finetune.curricula import HMTStages
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import SampleConfig
from tests import tiny
from tests.buckets.stores import Store
from tests.cli.commands import SIZES, TRANSFORMER, command, refused, run
from tests.training.finetune.backbone import backbone_run
from tests.training.idle import idle_updates


@pytest.fixture(name="words", scope="module")
def _words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(4):
        (folder / f"{i}.txt").write_text("memory window block state " * (6 + i))
    data = ["--data.source", f"folder:{folder}", "--data.cache-dir", f"{folder}/cache"]
    return [*TRANSFORMER, *data, *SIZES]


@pytest.mark.slow
# Runs in both stores are in test_runs.py.
@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_run_is_trained_scored_continued_and_exported(
    url: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Updates are those of `test_runs.py`.
    with idle_updates():
        code, out, err = command("train", "--run-dir", url, *words)
        assert (code, err) == (0, [])
        assert f"finished at step 2; run folder {url}" in out
        code, out, err = run("train", "--run-dir", url, *words, "--loop.steps", "3")
        assert code == 0 and f"wrote {url}/curves.png" in out
        assert any("resumed at step 2" in line for line in err)
    code, out, err = command("eval", url, "--split", "train")
    assert (code, err) == (0, [])
    bucket = Bucket(url)
    assert json.loads(bucket.read("eval-train.json"))["split"] == "train"
    for plot in ("curves.png", "eval-train.png"):
        assert bucket.read(plot).startswith(b"\x89PNG")
    code, out, err = command("generate", url, "--prompt", "memory", "--tokens", "3")
    assert (code, err) == (0, []) and out
    code, out, err = command("export", url, f"{url}-exported")
    assert (code, err) == (0, [])
    assert "model.safetensors" in Bucket(f"{url}-exported").entries()
    assert "must be empty" in refused("export", url, f"{url}-exported")
    # What was exported opens as the run does.
    _, model = pretrain.load_model(url)
    found = tiny.parameters(memjax.load(f"{url}-exported").model)
    own = tiny.parameters(model)
    # Files of other libraries have the embedding scaled, and a head of its own.
    for part in ("blocks", "norm"):
        tiny.assert_equal(found[part], own[part])
    assert not list(here.iterdir())


def test_folder_without_a_model_is_named(url: str) -> None:
    assert f"{url} is neither a folder nor a GGUF file" in refused("eval", url)
    assert "memory must be a folder on a disk" in refused(
        "ask", "x", "what?", "--memory", url
    )


@pytest.mark.slow
def test_fine_tuning_reads_and_writes_a_bucket(gs: Store, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(4):
        (texts / f"{i}.txt").write_text("memory window block state " * (6 + i))
    source, cache = f"folder:{texts}", tmp_path / "cache"
    backbone, tuned = gs.url("backbone"), gs.url("tuned")
    with idle_updates():
        pretrain.train(backbone_run(source, cache), backbone)
        first = SegmentStage(
            hmt=HMTConfig(
                segment_length=8, num_sensory_tokens=2, num_memories=3, retrieval=False
            ),
            window=8,
            data=SampleConfig(source, batch_size=2, cache_dir=cache),
            loop=LoopConfig(steps=1, save_every=1, log_every=1),
        )
        memory = dataclasses.replace(first.hmt, retrieval=True)
        stages = HMTStages(first, dataclasses.replace(first, hmt=memory, depth=3))
        for _ in range(2):
            outcome = finetune.finetune_stages(stages.stages(), backbone, Path(tuned))
            assert outcome.reason == "finished"
    names = Bucket(tuned).entries()
    assert {"stage1/config.json", "stage2/metrics.jsonl"} <= set(names)
    loaded = memjax.load(tuned)
    assert isinstance(loaded.model, HMT)
    loaded.model.save(tmp_path / "exported", loaded.text)
