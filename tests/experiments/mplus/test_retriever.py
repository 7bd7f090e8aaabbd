"""The program that makes a retriever: whole, on a run of a few tokens."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments.mplus import retriever
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig
from memjax.mechanisms import AttentionConfig
from memjax.models import ModelConfig
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.nnx import as_arrays
from memjax.training import LoopConfig
from memjax.training import pretrain as run
from memjax.training.finetune import finetune
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.stage import SampleConfig
from tests.training.idle import idle_updates

MODEL = ModelConfig(
    mechanisms=(AttentionConfig(8, 2, 1, 4, capacity=64),),
    num_layers=1,
    vocab_size=256,
    model_dim=8,
    hidden_dim=8,
    dtype="float32",
    remat=False,
)
STAGE = MPlusStage(
    memory=MPlusConfig(
        num_memory_tokens=4,
        pool_size=8,
        chunk_size=8,
        min_chunk_size=2,
        num_retrieved=4,
        store_size=16,
        key_dim=4,
        rank=2,
    ),
    tasks=MPlusTaskConfig(chunks=(1,), shortest_chunk=3, target=16, prompt=3),
    loop=LoopConfig(steps=1, save_every=1, log_every=1),
    seed=0,
)


@pytest.fixture(name="trained", scope="module")
def _trained(tmp_path_factory):
    """The folder of an M+ run."""
    folder = tmp_path_factory.mktemp("texts")
    words = ["memory", "window", "block", "state"]
    rng = np.random.default_rng(0)
    for i in range(6):
        (folder / f"{i}.txt").write_text(" ".join(rng.choice(words, size=60)))
    source, cache = f"folder:{folder}", folder / "cache"
    data = run.DataConfig(
        source, "bytes", context_length=16, batch_size=2, cache_dir=cache
    )
    backbone = tmp_path_factory.mktemp("backbone")
    samples = SampleConfig(source, batch_size=2, cache_dir=cache)
    stage = dataclasses.replace(STAGE, data=samples)
    trained = tmp_path_factory.mktemp("trained")
    with idle_updates():
        run.train(run.RunConfig(model=MODEL, data=data, loop=STAGE.loop), backbone)
        finetune.finetune(stage, backbone, trained)
    return trained


def parts(model):
    return jax.tree.leaves(as_arrays((model.query, model.key)))


@pytest.mark.slow
def test_a_retriever_is_made_fitted_and_read(trained, tmp_path, capsys):
    made, fitted = tmp_path / "made.safetensors", tmp_path / "fitted.safetensors"
    config = retriever.Config(trained, made, documents=4, batch=2, ask=0.0)
    retriever.main(config)
    assert capsys.readouterr().out == "4 documents\n"
    retriever.main(dataclasses.replace(config, output=fitted, steps=2))
    assert "step 1: " in capsys.readouterr().out
    model = finetune.load_model(trained)[1]
    assert isinstance(model, MPlus)
    before = parts(model)
    model = retriever.read(model, made)
    similar = parts(model)
    model = retriever.read(model, fitted)
    for old, start, new in zip(before, similar, parts(model), strict=True):
        assert old.shape == start.shape == new.shape
        assert 0 < np.abs(new - start).max() < 0.1 < np.abs(start - old).max()


@pytest.mark.slow
def test_files_of_other_models_are_refused(trained, tmp_path):
    model = finetune.load_model(trained)[1]
    assert isinstance(model, MPlus)
    file = tmp_path / "other.safetensors"
    retriever.save(model, file)
    found = load_file(file)
    save_file(found | {"query.up": np.zeros((1, 3, 3), np.float32)}, file)
    with pytest.raises(ValueError, match=r"query.up must be \[1, 8, 4\], got \[1, 3"):
        retriever.read(model, file)
    save_file(found | {"more": np.zeros(1, np.float32)}, file)
    with pytest.raises(ValueError, match=r"has more: \['more'\]"):
        retriever.read(model, file)


@pytest.mark.slow
def test_what_cannot_be_made_is_refused(trained, tmp_path):
    config = retriever.Config(trained, tmp_path / "x")
    with pytest.raises(ValueError, match="steps must be above 0 with start='model'"):
        dataclasses.replace(config, start="model")
    with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
        dataclasses.replace(config, steps=-1)
    backbone = dataclasses.replace(config, model=tmp_path)
    with pytest.raises(ValueError):
        retriever.main(backbone)
