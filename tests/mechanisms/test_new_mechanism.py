"""A new mechanism is a file and an import; everything else is derived."""

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import memjax
from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel, ModelConfig
from memjax.training.distributed import sharding
from memjax.training.step import StepConfig, init_train_state, make_train_step

FILE = '''
"""A decaying sum of the values, whatever their keys: s ← d s + v, y = s + q."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from memjax.mechanisms.base import axes
from memjax.mechanisms.cells.base import bind
from memjax.mechanisms.layers.recurrent.block import RecurrentConfig


@dataclasses.dataclass(frozen=True)
class FadingConfig(RecurrentConfig):
    name: ClassVar[str] = "fading"

    def cell(self):
        return bind(self, init_params, init_state, step, apply)

    def cell_axes(self):
        return FadingParams(decay=axes("heads"), gate=axes("model", "heads"))


class FadingParams(NamedTuple):
    decay: jax.Array
    gate: jax.Array


def init_params(config, key):
    gate = jax.random.normal(key, (config.model_dim, config.num_heads)) * 0.1
    return FadingParams(jnp.full((config.num_heads, config.value_dim), 0.5), gate)


def init_state(config, batch):
    return jnp.zeros((batch, config.num_heads, config.value_dim))


def step(config, params, memory, q, k, v, x):
    share = jax.nn.sigmoid((x @ params.gate.astype(x.dtype)).astype(jnp.float32))
    written = share[..., None] * v.astype(jnp.float32)
    memory = params.decay[None] * memory + written
    return memory, (memory + q.sum(axis=-1, keepdims=True)).astype(v.dtype)


def apply(config, params, memory, q, k, v, x):
    if memory is None:
        memory = init_state(config, q.shape[0])

    def body(memory, token):
        return step(config, params, memory, *token)

    tokens = [jnp.moveaxis(leaf, 1, 0) for leaf in (q, k, v, x)]
    memory, y = jax.lax.scan(body, memory, tuple(tokens))
    return memory, jnp.moveaxis(y, 0, 1)
'''
# Runs on a copy of memjax with the file, and its import in `memjax.mechanisms`.
PROGRAM = """
import inspect, json
import jax
from memjax.cli import main
from memjax.cli.arguments.parsing import parse
from memjax.config_io import from_record, to_record
from memjax.models import LanguageModel, ModelConfig, add_memory, preset

def configuration(line):
    call = parse(line.split(), main.COMMANDS, main.CONFIGURED)
    return inspect.signature(call.func).bind(*call.args, **call.keywords).arguments

model = preset("fading-tiny", vocab_size=11)
assert [m.name for m in model.mechanisms] == ["fading"]
attention = preset("transformer-tiny", vocab_size=11)
hybrid = add_memory(
    LanguageModel(attention, key=jax.random.key(0)),
    memory="fading", layers=(1,), window=4, sinks=1, key=jax.random.key(1),
).config
assert hybrid.layers[1].memory.name == "fading"
for config in (model, hybrid):
    record = json.loads(json.dumps(to_record(config)))
    assert from_record(ModelConfig, record) == config
found = configuration("train fading-350m --model.mechanisms.0.value-dim 24")
assert found["config"].model.mechanisms[0].value_dim == 24
found = configuration("finetune retrofit --memory fading --layers 3 --backbone b")
assert found["config"].memory == "fading"
"""


@pytest.fixture(scope="module", name="file")
def _file(tmp_path_factory):
    path = tmp_path_factory.mktemp("new") / "fading.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module", name="new")
def _new(file):
    return load(file)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_contract(new, monkeypatch):
    law = load(Path(__file__).parent / "test_contract.py")
    case = law.make_case(new.FadingConfig(law.D, 2, 4, 6))
    stepped = law.make_stepped(case)
    law.test_apply_equals_steps(case, stepped)
    law.test_apply_continues_at_every_token(case, stepped)
    law.test_no_reading_ahead_and_no_forgetting_at_once(case)
    law.test_batch_rows_are_independent(case)
    law.test_reset_row_equals_the_empty_state(case, stepped)
    law.test_state_is_a_fixed_point_of_shape_and_float32(case, monkeypatch)
    law.test_bfloat16_is_close_to_float32(case)
    law.test_gradients_equal_differences(case, stepped)
    law.test_input_of_another_shape_is_refused(case)


def test_training_and_sharding(new):
    config = ModelConfig(
        mechanisms=(new.FadingConfig(8, 2, 4, 4),),
        num_layers=1,
        vocab_size=11,
        model_dim=8,
        hidden_dim=12,
        dtype="float32",
    )
    model = LanguageModel(config, key=jax.random.key(0))
    options, transform = StepConfig(carry_memory=True), optax.sgd(0.1)
    state = init_train_state(model, transform, options, 2)
    mesh = AbstractMesh((1, 2, 2), ("data", "fsdp", "tensor"))
    specs = {
        sharding.leaf_name(path): place.spec
        for path, place in jax.tree_util.tree_leaves_with_path(
            inspect.unwrap(sharding.shardings)(mesh, state, config)
        )
    }
    assert specs["params/blocks/0/mechanism/cell/gate"] == P("fsdp", "tensor")
    assert specs["params/blocks/0/mechanism/cell/decay"] == P("tensor")
    assert specs["memory/0/memory"] == P(("data", "fsdp"))

    tokens = np.random.default_rng(1).integers(0, 11, (2, 7), np.int32)
    ones = np.ones((2, 6), np.float32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], ones, np.ones(2, bool))
    before = jax.tree.map(np.array, state.params)
    after, metrics = jax.jit(make_train_step(model, transform, options))(state, batch)
    assert metrics["finite"] == 1 and np.isfinite(metrics["loss"])
    for old, new_leaf in zip(
        jax.tree.leaves(before), jax.tree.leaves(after.params), strict=True
    ):
        assert not np.array_equal(old, new_leaf)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(after.memory))


@pytest.mark.slow
def test_presets_hybrids_files_and_commands_know_it(file, tmp_path):
    """Of a copy of the package with the file and one line of `__init__`."""
    package = Path(memjax.__file__).parent
    copy = tmp_path / "memjax"
    copy.mkdir()
    for path in package.iterdir():
        if path.name != "mechanisms":
            (copy / path.name).symlink_to(path)
    shutil.copytree(package / "mechanisms", copy / "mechanisms")
    shutil.copy(file, copy / "mechanisms" / "fading.py")
    exports = copy / "mechanisms" / "__init__.py"
    line = "from memjax.mechanisms.fading import FadingConfig as FadingConfig\n"
    exports.write_text(exports.read_text().replace("from", line + "from", 1))
    kernels = str(package.parent / "kernels")
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), kernels))},
        check=True,
    )
