"""Training on rows of several documents: the update of documents alone, whole runs."""

import dataclasses
import functools
import json

import chex
import jax
import numpy as np
import optax
import pytest

from memjax.data import TokenisedDocument, packed_batches
from memjax.data.batches.batch import Batch
from memjax.mechanisms import (
    AttentionConfig,
    ElasticMemoryConfig,
    LatticeConfig,
)
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import add_hmt
from memjax.training import LoopConfig, StepConfig
from memjax.training import pretrain as run
from memjax.training.step import init_train_state, make_train_step
from tests import tiny

D, V = 16, 256
CONFIG = ModelConfig(
    mechanisms=(
        AttentionConfig(D, 2, 1, 8, capacity=64),
        LatticeConfig(D, 2, slots=4, value_dim=4, chunk_size=4),
    ),
    num_layers=2,
    vocab_size=V,
    model_dim=D,
    hidden_dim=24,
    dtype="float32",
    remat=False,
)
# A step of plain descent at rate 1 moves the parameters by the gradient.
DESCENT = optax.sgd(1.0)


@functools.cache
def model():
    return tiny.drawn(lambda: LanguageModel(CONFIG, key=jax.random.key(0)))


def step(batch, accumulate=1):
    config = StepConfig(accumulate=accumulate)
    state = init_train_state(model(), DESCENT, config, len(batch.tokens))
    after, metrics = jax.jit(make_train_step(model(), DESCENT, config))(state, batch)
    return after.params, metrics["loss"]


def documents(*lengths):
    rng = np.random.default_rng(0)
    return [
        TokenisedDocument(f"d{i}", "text", rng.integers(0, V, n, np.int32))
        for i, n in enumerate(lengths)
    ]


def padded(document, length):
    """A document alone in its row."""
    pad = (0, length - len(document.tokens) + 1)
    tokens, targets = document.tokens[:-1], document.tokens[1:]
    mask = np.pad(np.ones(len(tokens), np.float32), pad)
    rows = (np.pad(tokens, pad), np.pad(targets, pad), mask, np.ones((), bool))
    return Batch(*(x[None] for x in rows))


@pytest.mark.slow
def test_packed_update_equals_update_of_separate_rows():
    texts = documents(8, 5, 13, 3, 9, 11)
    batch = next(packed_batches(texts, 24, 2, seed=0, start_multiple=4))
    assert batch.reset.sum() == len(texts)
    rows = zip(*(padded(d, 24) for d in texts), strict=True)
    separate = step(Batch(*map(np.concatenate, rows)))
    # A part of the batch after the other; sums over rows are in another order.
    packed = step(batch, accumulate=2)
    chex.assert_trees_all_close(packed, separate, rtol=1e-4, atol=1e-4)


def test_a_wrapped_backbone_is_refused():
    wrapped = add_hmt(
        model(),
        HMTConfig(segment_length=4, num_sensory_tokens=1),
        key=jax.random.key(0),
    )
    batch = next(packed_batches(documents(8, 5), 24, 1, seed=0, start_multiple=4))
    state = init_train_state(wrapped, DESCENT, StepConfig(), 1)
    with pytest.raises(ValueError, match="need a LanguageModel.* got HMT"):
        make_train_step(wrapped, DESCENT, StepConfig())(state, batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": StepConfig(bptt_blocks=2)}, "bptt_blocks must be 0 with them, got 2"),
        ({"step": StepConfig(loss_on="last")}, "loss_on='last' counts from the ends"),
        ({"step": StepConfig(carry_memory=True)}, "data.mode='packed' contradicts"),
        (
            {"data": run.DataConfig(mode="packed", context_length=30)},
            "context_length must be a multiple of 4 .* got 30",
        ),
        (
            {
                "model": dataclasses.replace(
                    CONFIG,
                    mechanisms=(ElasticMemoryConfig(D, 2, 1, 8, block=8, order=4),),
                )
            },
            "got ElasticMemoryConfig",
        ),
    ],
)
def test_settings_without_packing_are_refused(changes, message):
    good = {"model": CONFIG, "data": run.DataConfig(mode="packed")}
    with pytest.raises(ValueError, match=message):
        run.RunConfig(**{**good, **changes})


@pytest.mark.slow
def test_a_run_on_a_mixture_resumes_bit_for_bit(tmp_path):
    for part in range(2):
        (tmp_path / f"texts{part}").mkdir()
        for i in range(12):
            text = "memory of a text " * (1 + (7 * i + part) % 5)
            (tmp_path / f"texts{part}" / f"{i}.txt").write_text(f"{text}{i}")
    sources = [f"folder:{tmp_path}/texts{part}" for part in range(2)]
    config = run.RunConfig(
        model=CONFIG,
        data=run.DataConfig(
            tokenizer="bytes",
            mode="packed",
            context_length=64,
            batch_size=2,
            cache_dir=tmp_path / "cache",
            mixture=tuple((name, 1.0) for name in sources),
        ),
        loop=LoopConfig(steps=6, save_every=2, log_every=1),
    )
    assert run.train(config, tmp_path / "whole").reason == "finished"
    programs, calls = run._programs, []

    def stopped_after_three(config, mesh):
        create, step = programs(config, mesh)

        def until(state, batch):
            calls.append(batch)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return step(state, batch)

        return create, until

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_programs", stopped_after_three)
        with pytest.raises(KeyboardInterrupt):
            run.train(config, tmp_path / "parts")
    assert run.train(config, tmp_path / "parts").step == 6
    whole, parts = (losses(tmp_path / name) for name in ("whole", "parts"))
    assert whole == parts and len(whole) == 6 and whole[-1] < whole[0]


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["values"]["loss"] for line in lines if line["kind"] == "train"]
