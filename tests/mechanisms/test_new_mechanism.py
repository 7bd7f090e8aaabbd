"""A mechanism in a file of its own takes part in everything, with no other change."""

import importlib.util
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from memjax.data.batches.batch import Batch
from memjax.models import LanguageModel, ModelConfig
from memjax.training.distributed import sharding
from memjax.training.step import StepConfig, init_train_state, make_train_step

FILE = '''
"""A memory that is the decaying sum of what was read: s ← d s + W x, y = s."""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from memjax.mechanisms import MechanismDefaults
from memjax.mechanisms.base import Mechanism, axes, check_input


@dataclasses.dataclass(frozen=True)
class DecayingSumConfig(MechanismDefaults):
    name: ClassVar[str] = "decaying_sum"
    model_dim: int

    def build(self):
        return decaying_sum(self)

    def param_axes(self):
        return DecayingSumParams(weight=axes("model", "heads"), decay=axes())


class DecayingSumParams(NamedTuple):
    weight: jax.Array
    decay: jax.Array


def init_params(config, key):
    d = config.model_dim
    return DecayingSumParams(jax.random.normal(key, (d, d)) * d**-0.5, jnp.full(d, 0.5))


def init_state(config, batch):
    return jnp.zeros((batch, config.model_dim))


def step(config, params, state, x):
    check_input(x, config.model_dim, state)
    state = params.decay[None] * state + x.astype(jnp.float32) @ params.weight
    return state, state.astype(x.dtype)


def apply(config, params, state, x):
    check_input(x, config.model_dim, state)
    body = lambda state, x: step(config, params, state, x)
    state, y = jax.lax.scan(body, state, jnp.moveaxis(x, 1, 0))
    return state, jnp.moveaxis(y, 0, 1)


def decaying_sum(config):
    bind = lambda function: functools.partial(function, config)
    return Mechanism(bind(init_params), bind(init_state), bind(step), bind(apply))
'''


def load(path):
    """A module from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", name="new")
def _new(tmp_path_factory):
    path = tmp_path_factory.mktemp("new") / "decaying_sum.py"
    path.write_text(FILE)
    return load(path)


def test_it_keeps_the_law(new):
    law = load(Path(__file__).parent / "test_contract.py")
    case = law.make_case(new.DecayingSumConfig(law.D))
    stepped = law.make_stepped(case)
    law.test_apply_equals_steps(case, stepped)
    law.test_apply_takes_over_at_every_token(case, stepped, law.LENGTH)
    law.test_no_reading_ahead(case)
    law.test_a_token_is_not_forgotten_at_once(case)
    law.test_batch_rows_are_independent(case)
    law.test_reset_row_starts_afresh_and_leaves_the_other(case, stepped, 2)
    law.test_state_is_a_fixed_point_of_shape_and_float32(case)
    law.test_bfloat16_is_close_to_float32(case)
    law.test_gradients_are_finite_and_those_of_steps(case, stepped)
    law.test_input_of_another_shape_is_refused(case, (law.B, law.LENGTH, law.D + 1))


def test_a_language_model_of_it_trains_and_is_divided_among_devices(new):
    config = ModelConfig(
        mechanisms=(new.DecayingSumConfig(8),),
        num_layers=2,
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
    assert specs["params/blocks/1/mechanism/weight"] == P("fsdp", "tensor")
    assert specs["params/blocks/1/mechanism/decay"] == P()
    assert specs["memory/1"] == P(("data", "fsdp"))

    tokens = jax.random.randint(jax.random.key(1), (2, 7), 0, 11)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((2, 6)), jnp.ones(2, bool))
    before = jax.tree.map(np.array, state.params)
    after, metrics = jax.jit(make_train_step(model, transform, options))(state, batch)
    assert metrics["finite"] == 1 and np.isfinite(metrics["loss"])
    for old, new_leaf in zip(
        jax.tree.leaves(before), jax.tree.leaves(after.params), strict=True
    ):
        assert not np.array_equal(old, new_leaf)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(after.memory))
