"""Any mesh trains alike, and really divides what it should."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from memjax.models import LanguageModel, preset
from memjax.models.config import PRESETS
from memjax.training import sharding
from memjax.training.sharding import MeshConfig
from memjax.training.step import StepConfig, init_train_state

PROGRAM = Path(__file__).parent / "sharded_run.py"
BATCH = ("data", "fsdp")


@pytest.fixture(scope="module")
def result():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAM)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("mesh", ["8 1 1", "2 2 2", "1 4 2"])
def test_every_mesh_gives_the_losses_of_one_device(result, mesh):
    alone = result["none"]["losses"]
    np.testing.assert_allclose(result[mesh]["losses"], alone, rtol=1e-5)
    assert len(set(alone)) == 3


@pytest.mark.parametrize("axes", [(8, 1, 1), (2, 2, 2), (1, 4, 2)])
def test_each_device_holds_its_share(result, axes):
    data, fsdp, tensor = axes
    leaves = result[" ".join(map(str, axes))]["leaves"]
    assert set(leaves) == set(result["none"]["leaves"])
    for name, (shape, held) in leaves.items():
        share = np.prod(shape) / np.prod(held)
        if name.startswith("memory/"):
            expected = data * fsdp
        elif len(shape) > 1:
            expected = fsdp * tensor
        else:
            expected = 1
        assert share == expected, name


def test_what_is_left_over_goes_to_data(result):
    assert result["left over"] == dict(data=4, fsdp=2, tensor=1)


def test_rows_that_do_not_divide_are_refused(result):
    message = "batch of 4 rows does not divide among data * fsdp = 8 devices"
    assert result["rows"] == message


def specs(tree, axes=(2, 2, 2)):
    """The rules' placement by path, on a mesh of no devices."""
    mesh = AbstractMesh(axes, ("data", "fsdp", "tensor"))
    placed = inspect.unwrap(sharding.shardings)(mesh, tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (leaf.shape, place.spec)
        for (path, leaf), place in zip(
            jax.tree_util.tree_leaves_with_path(tree),
            jax.tree.leaves(placed),
            strict=True,
        )
    }


def train_state(config):
    def create():
        model = LanguageModel(config, key=jax.random.key(0))
        options = StepConfig(carry_memory=True)
        return init_train_state(model, optax.adamw(1e-3), options, 8)

    return jax.eval_shape(create)


INTENDED = {
    "embedding/value": P("tensor", "fsdp"),
    "mixer/value/query": P("fsdp", "tensor"),
    "mixer/value/key": P("fsdp", "tensor"),
    "mixer/value/value": P("fsdp", "tensor"),
    "mixer/value/output": P("tensor", None, "fsdp"),
    "feed_forward/value/gate": P("fsdp", "tensor"),
    "feed_forward/value/up": P("fsdp", "tensor"),
    "feed_forward/value/down": P("tensor", "fsdp"),
    "norm/value": P(None),
}


def trimmed(spec):
    """Without the Nones at the end, which mean nothing."""
    axes = list(spec)
    while axes and axes[-1] is None:
        axes.pop()
    return tuple(axes)


@pytest.mark.parametrize("name", PRESETS)
def test_every_leaf_of_every_preset_lies_where_it_was_meant_to(name):
    state = train_state(preset(name, 4096))
    met = set()
    for path, (shape, spec) in specs(state).items():
        if path.startswith("memory/"):
            assert trimmed(spec) == (BATCH,), path
        elif shape:
            ending = next(end for end in INTENDED if path.endswith(end))
            assert trimmed(spec) == trimmed(INTENDED[ending]), path
            met.add((path.split("/")[0], ending))
    assert met == {(room, end) for room in ("params", "optimizer") for end in INTENDED}


def test_an_untied_head_and_the_delta_rule_have_their_rules():
    config = dataclasses.replace(
        preset("elastic-tiny", 4096), tied_head=False, mixers=("deltanet",)
    )
    placed = specs(train_state(config))
    assert trimmed(placed["params/head/value"][1]) == ("fsdp", "tensor")
    rate = placed["params/blocks/0/mixer/value/rate"]
    assert trimmed(rate[1]) == ("fsdp", "tensor")


def test_an_axis_that_does_not_divide_is_left_out_for_that_leaf():
    """2 key-value heads on 4 tensor devices; queries have 4 heads."""
    placed = specs(train_state(preset("elastic-tiny", 4096)), (1, 2, 4))
    mixer = "params/blocks/0/mixer/value/"
    assert trimmed(placed[mixer + "key"][1]) == ("fsdp",)
    assert trimmed(placed[mixer + "query"][1]) == ("fsdp", "tensor")


@pytest.mark.parametrize(
    "axes,message",
    [
        (dict(data=3), "data=3 fsdp=1 tensor=1 does not fit 1 devices"),
        (dict(fsdp=2), "data=0 fsdp=2 tensor=1 does not fit 1 devices"),
        (dict(tensor=0), "mesh axes must be positive"),
        (dict(data=-1), "mesh axes must be positive"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(MeshConfig(**axes))


def test_one_device_is_a_mesh():
    assert dict(sharding.make_mesh(MeshConfig()).shape) == dict(
        data=1, fsdp=1, tensor=1
    )
