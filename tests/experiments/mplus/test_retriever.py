"""A retriever is fitted for a run of a few tokens, written and read."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.mplus import models, retriever
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig
from memjax.training import LoopConfig
from memjax.training import pretrain as run
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.stage import SampleConfig
from tests.experiments.mplus.tiny import CONFIG, MEMORY
from tests.training.idle import idle_updates

STAGE = MPlusStage(
    memory=dataclasses.replace(MEMORY, chunk_size=8, min_chunk_size=2),
    tasks=MPlusTaskConfig(chunks=(1,), shortest_chunk=3, target=16, prompt=3),
    loop=LoopConfig(steps=1, save_every=1, log_every=1),
    seed=0,
)


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory):
    """The folder of an M+ run."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    for i in range(6):
        words = rng.choice(["memory", "window", "block", "state"], size=60)
        (folder / f"{i}.txt").write_text(" ".join(words))
    source, cache = f"folder:{folder}", folder / "cache"
    data = run.DataConfig(
        source, "bytes", context_length=16, batch_size=2, cache_dir=cache
    )
    backbone, trained = (tmp_path_factory.mktemp(name) for name in ("plain", "mplus"))
    samples = SampleConfig(source, batch_size=2, cache_dir=cache)
    stage = dataclasses.replace(STAGE, data=samples)
    with idle_updates():
        run.train(run.RunConfig(model=CONFIG, data=data, loop=STAGE.loop), backbone)
        finetune.finetune(stage, backbone, trained)
    return trained


@pytest.mark.slow
def test_retriever_is_fitted_written_and_read(trained, tmp_path):
    file = tmp_path / "fitted.safetensors"
    retriever.main(retriever.Config(trained, file, documents=4, ask=0.0))
    model, _ = models.load_trained("model", trained)
    fitted = retriever.read(model, file)
    pairs = [jax.tree.leaves((x.query, x.key)) for x in (model, fitted)]
    for old, new in zip(*pairs, strict=True):
        assert old.shape == new.shape and np.abs(new - old).max() > 0.1
    again = tmp_path / "again.safetensors"
    retriever.save(fitted, again)
    assert again.read_bytes() == file.read_bytes()
    found = load_file(file)
    save_file(found | {"query.up": np.zeros((1, 3, 3), np.float32)}, again)
    with pytest.raises(ValueError, match=r"query.up must be \[2, 8, 4\], got \[1, 3"):
        retriever.read(model, again)
    save_file(found | {"more": np.zeros(1, np.float32)}, again)
    with pytest.raises(ValueError, match=r"has more: \['more'\]"):
        retriever.read(model, again)
    with pytest.raises(ValueError):
        retriever.main(retriever.Config(tmp_path, file))
