"""A retrofit from the choice of its layers to the model that is opened again."""

import dataclasses
import functools
import inspect
import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

import memjax
from memjax.cli import main as cli
from memjax.config_io import from_record, to_record
from memjax.data.batches.batch import Batch
from memjax.mechanisms import HybridConfig, SlidingWindowConfig
from memjax.mechanisms.layers.norms import rms_norm
from memjax.models.adapters import Frozen, freeze, merge_lora, thaw
from memjax.models.checkpoints.memory_state import load_memory, save_memory
from memjax.models.language_model.retrofit import MemoryOptions, add_memory
from memjax.models.language_model.windowed import limit_attention
from memjax.models.lora import LoraConfig, add_lora
from memjax.nnx.table import tabulate
from memjax.training.config import LoopConfig
from memjax.training.distributed import sharding
from memjax.training.finetune import finetune
from memjax.training.finetune.distillation import distillation_loss, teacher_outputs
from memjax.training.finetune.retrofit_stage import NEW, RetrofitStage
from memjax.training.finetune.retrofit_stages import (
    LAYERS_FILE,
    PartConfig,
    RetrofitStages,
    with_layers,
)
from memjax.training.optimizer import OptimizerConfig
from tests import tiny

WINDOW, CONTEXT = 4, 12
PART = PartConfig(
    OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
    LoopConfig(steps=2, save_every=1, log_every=1),
)


def stages(data, **changes):
    config = RetrofitStages(
        memory="gated_deltanet",
        window=WINDOW,
        sinks=1,
        context_length=CONTEXT,
        start_texts=2,
        count=1,
        choose_texts=2,
        data=data,
        distill=PART,
        tune=PART,
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module", name="trained")
def _trained(base, tmp_path_factory):
    """Both parts by the command, which measures the one layer and chooses it."""
    folder = tmp_path_factory.mktemp("retrofit")
    backbone, data = base
    words = "finetune retrofit --memory gated_deltanet --layers auto --window 4"
    words += f" --sinks 1 --context-length {CONTEXT} --start-texts 2 --count 1"
    words += f" --choose-texts 2 --data.source {data.source} --data.batch-size 2"
    words += f" --data.cache-dir {data.cache_dir} --backbone {backbone}"
    for part in ("distill", "tune"):
        words += f" --{part}.loop.steps 2 --{part}.loop.save-every 2"
        words += f" --{part}.loop.log-every 1 --{part}.optimizer.learning-rate 0.01"
        words += f" --{part}.optimizer.warmup-ratio 0.01"
    command = [*words.split(), "--run-dir", str(folder)]
    with pytest.raises(SystemExit) as stop:
        cli.main(command)
    assert stop.value.code == 0
    return folder, command


def arrays(model):
    """Parameters by name."""
    found = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    return {name(path).removesuffix(".value"): np.asarray(x) for path, x in found}


@pytest.mark.slow
def test_each_part_trains_its_own_parameters(base, trained):
    before = arrays(memjax.load(base[0]).model)
    _, aligned = finetune.load(trained[0] / "stage1")
    described, tuned = finetune.load(trained[0])
    assert isinstance(described.config, RetrofitStage)
    assert (described.config.part, described.config.layers) == ("tune", (0,))
    record = json.loads((trained[0] / LAYERS_FILE).read_text())
    assert record["layers"] == [0] and len(record["rises"]) == 1
    for model in (aligned, tuned):
        found = arrays(model)
        for name, value in before.items():
            inside = name.replace("mechanism.", "mechanism.attention.")
            same = found.get(inside, found.get(f"{inside}.weight"))
            if same is None:
                same = found.get(inside + ".0")
            np.testing.assert_array_equal(same, value)

    # The gate has moved in both parts, by a rate ten times that of the rest.
    def gate(model):
        return model.blocks[0].mechanism.balance.amount.get_value()

    assert 0.05 < np.abs(gate(aligned)).max() < 0.21
    assert np.abs(gate(tuned) - gate(aligned)).max() > 0.01
    trainable = {n for n in arrays(tuned)} - {
        n for n, x in arrays(nnx.state(tuned, Frozen)).items()
    }
    assert all(
        NEW.search(n) or "mechanism.attention" in n or "feed" in n for n in trainable
    )


@pytest.mark.slow
def test_resumed_retrofit_keeps_its_chosen_layers(trained, capsys):
    folder, command = trained
    file = folder / LAYERS_FILE
    before = file.stat().st_mtime_ns
    with pytest.raises(SystemExit) as stop:
        cli.main(command)
    assert stop.value.code == 0 and file.stat().st_mtime_ns == before
    said = capsys.readouterr().err
    assert "layers      0 (" in said and "FLOPs a step" in said
    # Another window would have other layers, and another run.
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--window", "5"])
    assert stop.value.code == 2
    assert "window was 4 and is now 5" in capsys.readouterr().err


@pytest.mark.slow
def test_retrofit_loads_reads_and_exports(trained, tmp_path):
    model: Any = memjax.load(trained[0]).model
    assert isinstance(model.config.layers[0], HybridConfig)
    tokens = np.asarray(tiny.tokens(0, 1, 11))

    def read(model):
        state = model.init_state(1)
        return tiny.method(model, "__call__", state, jnp.asarray(tokens))

    state, logits = read(model)
    save_memory(tmp_path / "memory", model, state)
    tiny.assert_equal(load_memory(tmp_path / "memory", model), state)

    opened = memjax.load(trained[0])
    model.save(tmp_path / "exported", opened.text)
    assert model.model_type == "memjax"
    exported: Any = memjax.load(tmp_path / "exported").model
    assert exported.config == model.config
    tiny.assert_close(read(exported)[1], logits)
    tiny.assert_equal(arrays(exported), arrays(merge_lora(model)))
    table = tabulate(exported, exported.init_state(1), jnp.asarray(tokens))
    assert "Total Parameters: 2,656" in table


@pytest.mark.slow
def test_retrofit_perplexity_is_independent_of_segments(trained):
    folder, _ = trained
    found = []
    for segment in ("4", "12"):
        with pytest.raises(SystemExit) as stop:
            cli.main(
                ["eval", str(folder), "--split", "test", "--tokens-per-call", segment]
            )
        assert stop.value.code == 0
        report = json.loads((folder / "eval-test.json").read_text())
        found.append(report["perplexity"]["all"]["perplexity"])
    assert 1 < found[0] < 1000
    # A state of constant size is carried: where a text is split does not matter.
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


@pytest.mark.slow
def test_distillation_loss_is_the_unexplained_variance():
    teacher = tiny.llama()

    def fit(window, sinks):
        return add_memory(
            teacher, memory="deltanet", layers=(0,), window=window, sinks=sinks, key=KEY
        )

    tokens = tiny.tokens(1, 2, 16)
    student = fit(WINDOW, 0)
    found, alone = tiny_loss(student, tokens)
    # By hand: the first layer's attention, of the embedding.
    block = teacher.blocks[0]
    norm = block.mechanism_norm.get_value()
    x = rms_norm(teacher.embed(tokens), norm, 1e-5)
    params = block.parameters().mechanism
    windowed = limit_attention(teacher, WINDOW).blocks[0].functions

    def attention(functions):
        assert functions.whole is not None
        return jax.jit(functions.whole)(params, x, None)[:, WINDOW:]

    full, own = attention(block.functions), attention(windowed)
    spread = full - full.mean(axis=(0, 1), keepdims=True)
    np.testing.assert_allclose(
        found, ((own - full) ** 2).sum() / (spread**2).sum(), rtol=1e-4
    )
    # The memory has no part yet.
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    # A window and sinks that see everything miss nothing.
    assert tiny_loss(fit(12, 4), tokens)[0] < 1e-10 < found


def test_distillation_inputs_come_from_windowed_layers():
    teacher = tiny.drawn(lambda: tiny.make_llama(num_layers=2))
    student = add_memory(
        teacher, memory="deltanet", layers=(1,), window=2, sinks=0, key=KEY
    )
    tokens = tiny.tokens(1, 2, 8)
    other = tokens.at[:, 0].add(1) % tiny.LLAMA.vocab_size

    @jax.jit
    def read(tokens):
        return teacher_outputs(student, teacher.config, tokens)

    one, two = read(tokens), read(other)
    # A window of 2 below; full attention in the layer itself.
    chex.assert_trees_all_equal(one["x"][0][:, 2:], two["x"][0][:, 2:])
    assert np.abs(one["y"][0] - two["y"][0])[:, -1].max() > 1e-5


@pytest.mark.slow
def test_cached_teacher_outputs_equal_recomputed_ones():
    """Three updates with one sample read once, and read each time: the same bits."""
    stage = RetrofitStage(
        memory="deltanet",
        layers=(0,),
        window=WINDOW,
        sinks=1,
        part="distill",
        context_length=12,
    )
    tokens = np.asarray(tiny.tokens(1, 2, 12))
    ones = np.ones(tokens.shape, np.float32)
    batch = Batch(tokens, tokens, ones, np.ones(2, bool))
    after, reads = [], 0

    def counted(update):
        def run(state, batch):
            nonlocal reads
            reads += isinstance(batch, Batch)
            return jax.jit(update)(state, batch)

        return run

    for passes in (1, 3):
        chosen = dataclasses.replace(stage, passes=passes)
        model = chosen.wrap(tiny.llama(), KEY)
        step = chosen.make_step(model, tiny.LLAMA, counted)
        state = chosen.first_state(model, KEY)
        reads = 0
        for _ in range(3):
            state, metrics = step(state, batch)
            assert set(metrics) >= {"loss", "window_loss"}
        assert reads == 4 - passes
        after.append(state.params)
    chex.assert_trees_all_close(*after, rtol=1e-4, atol=1e-7)
    first = chosen.wrap(tiny.llama(), KEY)
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max(), after[0], nnx.state(first, nnx.Param)
    )
    assert max(jax.tree.leaves(moved)) > 1e-4


KEY = jax.random.key(0)


def tiny_loss(student, tokens):
    graph, variables = nnx.split(student)

    def loss(variables):
        model = nnx.merge(graph, variables)
        return distillation_loss(model, teacher_outputs(model, tiny.LLAMA, tokens))

    return np.asarray(jax.jit(loss)(variables))


def test_adapters_begin_where_they_are_told():
    sizes = {"memory": "none", "layers": (1,), "window": 4, "sinks": 1}
    for first, begins in ((None, 1), (0, 0)):
        stage = RetrofitStage(**sizes, context_length=12, first_adapter=first)
        trained = nnx.state(stage.wrap(tiny.llama(), KEY), nnx.Param)
        assert min(name.split(".")[1] for name in arrays(trained)) == str(begins)
    with pytest.raises(ValueError, match="first_adapter must be at least 0, got -1"):
        RetrofitStage(**sizes, first_adapter=-1)


def test_adapters_begin_at_the_first_memory_and_reach_its_attention():
    model = add_memory(tiny.llama(), memory="gla", layers=(1,), window=4, key=KEY)
    adapted = add_lora(model, LoraConfig(rank=2), KEY, first_layer=1)
    adapted = thaw(adapted, lambda name: NEW.search(name) is not None)
    trained = {name for name in arrays(nnx.state(adapted, nnx.Param))}
    assert all(name.startswith("blocks.1.") for name in trained)
    assert any("mechanism.attention.query" in name for name in trained)
    for part in ("features.key", "memory.narrow", "balance.amount"):
        assert f"blocks.1.mechanism.{part}" in trained
    tiny.assert_equal(arrays(merge_lora(adapted)), arrays(model))
    assert not jax.tree.leaves(nnx.state(freeze(model), nnx.Param))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(sinks=5), r"sinks must be in \[0, window=4\], got 5"),
        (dict(context_length=5), r"context_length must be above window \+ sinks = 5"),
        (dict(placement="instead"), "placement='instead' needs memory='elastic'"),
        (dict(start_texts=-1), "start_texts must be >= 0"),
        (dict(gate_rate=0.0), "gate_rate must be positive"),
        (dict(passes=0), "passes must be at least 1, got 0"),
        (
            dict(memory="none", options=MemoryOptions(slots=3)),
            "options must be None with memory='none'",
        ),
        (dict(wider=2), "wider must be 0, or more with memory='none', got 2 with"),
        (dict(memory="none", wider=-1), "wider must be 0, or more .* got -1"),
    ],
)
def test_bad_settings(base, changes, message):
    with pytest.raises(ValueError, match=message):
        stages(base[1], **changes)


def test_bad_stages(base, tmp_path):
    config = stages(base[1], layers=(0,))
    (_, distill), (_, tune) = config.stages()
    with pytest.raises(ValueError, match="layers must be at least one, got none"):
        dataclasses.replace(tune, layers=())
    with pytest.raises(ValueError, match="part='distill' needs a hybrid"):
        dataclasses.replace(distill, memory="none")
    with pytest.raises(ValueError, match="remat must be products with part='distill'"):
        dataclasses.replace(distill, remat="all")
    with pytest.raises(ValueError, match="passes must be 1 with part='tune'"):
        dataclasses.replace(tune, passes=2)
    with pytest.raises(ValueError, match="passes must be 1 with 2 hosts, got 4"):
        distill.batches([], memjax.load(base[0]).tokenizer, 256, shard_count=2)
    decayed = dataclasses.replace(tune.optimizer, decay_vectors=True)
    with pytest.raises(ValueError, match="decay_vectors must be False"):
        dataclasses.replace(tune, optimizer=decayed)
    other = dataclasses.replace(distill, window=3)
    with pytest.raises(ValueError, match="window=4 must be that of the start, 3"):
        tune.check_start(other, "start")
    with pytest.raises(ValueError, match="start must be a run of part='distill'"):
        tune.check_start(tune, "start")
    with pytest.raises(ValueError, match="must be resolved"):
        stages(base[1]).stages()
    with pytest.raises(ValueError, match=r"count must be in \[1, 1\]"):
        with_layers(stages(base[1], count=2), base[0], tmp_path)
    # A record is read back, whatever the memory.
    for stage in (distill, dataclasses.replace(tune, memory="none", remat="all")):
        assert from_record(RetrofitStage, to_record(stage)) == stage
    # Without a memory there is nothing to align: the baseline is tuned alone.
    (name, alone), *others = dataclasses.replace(config, memory="none").stages()
    assert (name, alone.part, others) == ("", "tune", [])
    assert alone.memory_name == "windows of 4 with 1 sinks"
    # Or with as many bytes as a memory's, in the layers that it would have.
    wide = dataclasses.replace(alone, wider=3)
    backbone = finetune.load_backbone(base[0]).model
    for stage, window in ((alone, 4), (wide, 7)):
        mechanism = stage.wrap(backbone, KEY).config.mechanisms[0]
        assert isinstance(mechanism, SlidingWindowConfig) and mechanism.window == window


def test_attention_of_a_hybrid_is_sharded_as_plain_attention():
    model = add_memory(tiny.llama(), memory="gla", layers=(1,), window=4, key=KEY)
    adapted = add_lora(model, LoraConfig(rank=2), KEY, first_layer=1)
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
    place = inspect.unwrap(sharding.shardings)
    leaves = jax.tree_util.tree_leaves_with_path(
        place(mesh, nnx.state(adapted), adapted.config)
    )
    specs = {sharding.leaf_name(path): tuple(leaf.spec) for path, leaf in leaves}
    mechanism = "blocks/1/mechanism/"
    assert specs[f"{mechanism}attention/query/weight"] == ("fsdp", "tensor")
    assert specs[f"{mechanism}attention/query/down"] == ()
    assert specs[f"{mechanism}features/key"] == ("tensor",)
    assert specs[f"{mechanism}balance/weight"] == ("fsdp", "tensor")
