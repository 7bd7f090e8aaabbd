"""A run that was divided among four devices goes on divided among two."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memjax.mechanisms import SlidingWindowConfig
from memjax.models import ModelConfig
from memjax.training import LoopConfig, MeshConfig, StepConfig
from memjax.training import pretrain as run
from tests.training.processes import Process


def train(texts: Path, folder: Path, fsdp: int) -> None:
    """A short run with a carried memory."""
    run.train(
        run.RunConfig(
            model=ModelConfig(
                mechanisms=(SlidingWindowConfig(16, 4, 4, 4, window=8),),
                num_layers=1,
                vocab_size=256,
                model_dim=16,
                hidden_dim=16,
                dtype="float32",
                remat=False,
            ),
            data=run.DataConfig(
                source=f"folder:{texts}",
                tokenizer="bytes",
                mode="streamed",
                context_length=8,
                batch_size=4,
                cache_dir=texts / "cache",
            ),
            step=StepConfig(carry_memory=True),
            loop=LoopConfig(steps=6, save_every=3, log_every=1),
            mesh=MeshConfig(fsdp=fsdp),
        ),
        folder,
    )


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["values"]["loss"] for line in lines]


@pytest.mark.slow
def test_run_resumes_on_fewer_devices(
    tmp_path: Path, with_devices: Callable[[int], dict[str, str]]
) -> None:
    texts, whole, again = (tmp_path / name for name in ("texts", "whole", "again"))
    texts.mkdir()
    rng = np.random.default_rng(0)
    for i in range(8):
        words = rng.choice(["memory", "window", "block", "state"], size=60)
        (texts / f"{i}.txt").write_text(" ".join(words))

    def on_devices(count: int, folder: Path) -> None:
        devices = with_devices(count)
        Process(train, texts, folder, count, environment=devices).require_end()

    on_devices(4, whole)
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "6")
    on_devices(2, again)
    assert len(losses(again)) == 6
    np.testing.assert_allclose(losses(again), losses(whole), rtol=1e-5)
    assert json.loads((again / "config.json").read_text())["mesh"]["fsdp"] == 2
