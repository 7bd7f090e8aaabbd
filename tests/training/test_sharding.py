"""Any mesh trains alike, and really divides what it should."""

import dataclasses
import functools
import inspect
import json
import math

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from memjax.mechanisms import DeltaNetConfig, HybridConfig, SlidingWindowConfig
from memjax.models import LanguageModel, ModelConfig, preset
from memjax.models.language_model.presets import FAMILIES
from memjax.training.distributed import sharding
from memjax.training.distributed.sharding import MeshConfig
from memjax.training.step import StepConfig, init_train_state
from tests.training import sharded_run
from tests.training.processes import Process

BATCH = ("data", "fsdp")


@pytest.fixture(scope="module")
def result(with_devices):
    process = Process(sharded_run.main, environment=with_devices(8))
    return json.loads(process.require_end().splitlines()[-1])


@pytest.mark.slow
def test_a_mesh_gives_the_losses_of_one_device(result):
    alone = result["none"]["losses"]
    np.testing.assert_allclose(result["2 2 2"]["losses"], alone, rtol=1e-5)
    assert len(set(alone)) == 3


@pytest.mark.slow
def test_each_device_holds_its_share(result):
    data, fsdp, tensor = 2, 2, 2
    leaves = result["2 2 2"]["leaves"]
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


@pytest.mark.slow
def test_remaining_devices_go_to_data(result):
    assert result["left over"] == dict(data=4, fsdp=2, tensor=1, sequence=1)


@pytest.mark.slow
def test_rows_that_do_not_divide_are_refused(result):
    message = "batch of 4 rows does not divide among data * fsdp = 8 devices"
    assert result["rows"] == message


@pytest.mark.slow
def test_devices_gather_parameters_and_no_activations(with_devices):
    process = Process(sharded_run.gathered, environment=with_devices(8))
    found = json.loads(process.require_end().splitlines()[-1])
    assert set(found) == set(sharded_run.COMPILED)
    for family, (parameter, gathered) in found.items():
        assert gathered <= parameter, family


@pytest.fixture(scope="module")
def divided(with_devices):
    process = Process(sharded_run.sequences, environment=with_devices(8))
    return json.loads(process.require_end().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", sharded_run.MECHANISMS)
def test_divided_sequences_give_the_update_of_one_device(divided, name):
    # Loss and gradients.
    assert divided[name]["difference"] < 1e-5
    exchanges = divided[name]["exchanges"]
    # And back, forward and backward.
    joins = name in ("linear_attention", "elastic")
    assert exchanges == 0 if joins else exchanges >= 4


@pytest.mark.slow
def test_devices_that_divide_sequences_gather_nothing(divided):
    assert divided["attention"]["gathered"] == 0


@pytest.mark.slow
def test_devices_share_the_memory_of_mplus_and_send_one_layers_pool_at_most(
    with_devices,
):
    process = Process(sharded_run.memory, environment=with_devices(4))
    found = json.loads(process.require_end().splitlines()[-1])
    # Over a full store, whose rows are replaced.
    assert found["stored"] == 48 and found["difference"] < 1e-5
    shares = found["shares"]
    for name in ("pool", "store/layers/0/rows", "store/layers/1/keys"):
        assert shares[name] == 4, name
    # Of the store's 48 rows nothing but scores is sent.
    assert [sizes for sizes in found["sent"] if 48 in sizes[:-1]] == []
    # Of the pool's 40 rows in 2 layers those of one layer, for 2 batch elements.
    largest = max(math.prod(sizes) for sizes in found["sent"] if len(sizes) > 3)
    assert largest == 2 * 1 * 40 * 16


@pytest.mark.slow
def test_hmt_and_mplus_train_alike_on_one_and_eight_devices(with_devices):
    process = Process(sharded_run.systems, environment=with_devices(8))
    found = json.loads(process.require_end().splitlines()[-1])
    assert {*found} == {"hmt", "mplus"}
    for name, losses in found.items():
        assert losses["1"][0] != losses["1"][1]
        np.testing.assert_allclose(losses["8"], losses["1"], rtol=1e-5, err_msg=name)


def specs(config, axes=(2, 2, 2)):
    """Where each leaf of a train state lies, by path, on a mesh of no devices."""
    mesh = AbstractMesh(axes, ("data", "fsdp", "tensor"))
    tree = train_state(config)
    placed = inspect.unwrap(sharding.shardings)(mesh, tree, config)
    return {
        sharding.leaf_name(path): (leaf.shape, place.spec)
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
    "embedding": P("tensor", "fsdp"),
    "mechanism/query": P("fsdp", "tensor"),
    "mechanism/key": P("fsdp", "tensor"),
    "mechanism/value": P("fsdp", "tensor"),
    "mechanism/output": P("tensor", None, "fsdp"),
    "attention/query": P("fsdp", "tensor"),
    "attention/key": P("fsdp", "tensor"),
    "attention/value": P("fsdp", "tensor"),
    "attention/output": P("tensor", None, "fsdp"),
    "balance/bias": P(None),
    "mechanism/gate_bias": P("tensor"),
    "mechanism/summary_prompt": P(None, "fsdp"),
    "mechanism/mixing": P(None),
    "mechanism/mixing_bias": P(None),
    "mechanism/query_key": P("fsdp", None, "tensor"),
    "mechanism/filters": P(None, None, "tensor"),
    "mechanism/gate": P("fsdp", "tensor"),
    "mechanism/norm": P(None),
    "cell/rate": P("fsdp", "tensor"),
    "cell/target": P("fsdp", "tensor"),
    "cell/forget": P("fsdp", "tensor"),
    "cell/write": P("fsdp", "tensor"),
    "cell/log_rate": P(None),
    "cell/narrow": P("fsdp", None),
    "cell/widen": P(None, "tensor"),
    "cell/keys": P("tensor"),
    "cell/values": P("tensor"),
    "cell/slots": P("tensor"),
    "cell/weights": P("tensor"),
    "cell/bias": P("tensor"),
    "cell/scale": P(None),
    "cell/shift": P(None),
    "cell/skip": P(None),
    "decay/log_rate": P(None),
    "step/weight": P("fsdp", "tensor"),
    "pace/weight": P("fsdp", "tensor"),
    "forget/weight": P("fsdp", "tensor"),
    "step/bias": P(None),
    "pace/bias": P(None),
    "forget/bias": P(None),
    "feed_forward/gate": P("fsdp", "tensor"),
    "feed_forward/up": P("fsdp", "tensor"),
    "feed_forward/down": P("tensor", "fsdp"),
    "norm": P(None),
}


def trimmed(spec):
    """Without the Nones at the end, which mean nothing."""
    axes = list(spec)
    while axes and axes[-1] is None:
        axes.pop()
    return tuple(axes)


@functools.cache
def endings(name):
    """Which intended leaves a preset has, after checking where they lie."""
    met = set()
    for path, (shape, spec) in specs(preset(name, 4096)).items():
        if path.startswith("memory/"):
            assert trimmed(spec) == (BATCH,), path
        elif shape:
            ending = next(end for end in INTENDED if path.endswith(end))
            assert trimmed(spec) == trimmed(INTENDED[ending]), path
            met.add((path.split("/")[0], ending))
    return met


# Sizes differ in numbers alone; the largest of each paper stands for the others.
@pytest.mark.parametrize(
    "name", [*(f"{family}-tiny" for family in FAMILIES), "elastic-400m", "trellis-780m"]
)
def test_every_leaf_of_a_preset_has_its_sharding(name):
    met = endings(name)
    rooms = [{end for at, end in met if at == room} for room in ("params", "optimizer")]
    assert rooms[0] == rooms[1] >= {"embedding"}
    assert rooms[0] & {"mechanism/output", "attention/output"}


def test_every_sharding_rule_matches_some_preset():
    met = set().union(*(endings(f"{family}-tiny") for family in FAMILIES))
    assert {end for _, end in met} == set(INTENDED)


def test_an_untied_head_has_its_rule():
    config = dataclasses.replace(preset("deltanet-tiny", 4096), tied_head=False)
    placed = specs(config)
    assert trimmed(placed["params/head"][1]) == ("fsdp", "tensor")


def test_an_axis_that_does_not_divide_is_left_out_for_that_leaf():
    """2 key-value heads on 4 tensor devices; queries have 4 heads."""
    placed = specs(preset("elastic-tiny", 4096), (1, 2, 4))
    mechanism = "params/blocks/0/mechanism/"
    assert trimmed(placed[mechanism + "key"][1]) == ("fsdp",)
    assert trimmed(placed[mechanism + "query"][1]) == ("fsdp", "tensor")


@pytest.mark.parametrize(
    "axes,message",
    [
        (dict(data=3), "data=3 fsdp=1 tensor=1 does not fit 1 devices"),
        (dict(fsdp=2), "data=0 fsdp=2 tensor=1 does not fit 1 devices"),
        (dict(sequence=2), "tensor=1 sequence=2 does not fit 1 devices"),
        (dict(tensor=0), "mesh axes must be positive"),
        (dict(sequence=0), "mesh axes must be positive"),
        (dict(data=-1), "mesh axes must be positive"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(MeshConfig(**axes))


WINDOW = SlidingWindowConfig(16, num_heads=4, num_kv_heads=2, head_dim=4)


def model_of(*mechanisms):
    return ModelConfig(mechanisms=mechanisms, num_layers=4, vocab_size=8, model_dim=16)


@pytest.mark.parametrize(
    "axes,batch,message",
    [
        ((2, 3, 1), 16, "batch_size=16 .* data . fsdp = 6 devices: 12 or 18 would"),
        ((2, 3, 1), 4, "batch_size=4 .* devices: 6 would"),
        (
            (1, 1, 3),
            1,
            r"tensor=3 .* the 4 heads of model.mechanisms\[0\]: 1, 2, 4 would",
        ),
        ((1, 1, 4), 1, r"tensor=4 .* the 6 heads of model.mechanisms\[1\]: 1, 2, 3, 6"),
        (
            (1, 1, 2, 4),
            1,
            r"tensor . mesh.sequence = 8 .* 4 heads .*: 1, 2, 4",
        ),
        ((1, 1, 1, 3), 1, "sequence=3 must divide the 64 tokens of a row"),
        ((1, 1, 4, 2), 1, r"sequence = 8 .* the 4 heads of model.mechanisms\[0\]"),
        ((1, 1, 4, 1), 1, r"tensor=4 .* the 6 heads of model.mechanisms\[1\]"),
    ],
)
def test_indivisible_sizes_are_refused(axes, batch, message):
    mesh = AbstractMesh(axes, ("data", "fsdp", "tensor", "sequence")[: len(axes)])
    model = model_of(WINDOW, DeltaNetConfig(16, 6, 4, 4))
    with pytest.raises(ValueError, match=message):
        sharding.require_divides(mesh, batch, model, 64)


def test_heads_of_a_hybrids_window_are_checked_too():
    mesh = AbstractMesh((1, 1, 3), ("data", "fsdp", "tensor"))
    beside = HybridConfig(WINDOW, DeltaNetConfig(2 * 2 * 4, 4, 4, 4))
    with pytest.raises(ValueError, match="tensor=3 does not divide the 4 heads"):
        sharding.require_divides(mesh, 1, model_of(beside), 64)


def test_divisible_sizes_are_accepted():
    mesh = AbstractMesh((2, 2, 4), ("data", "fsdp", "tensor"))
    # Two key-value heads are on all four devices.
    sharding.require_divides(mesh, 8, model_of(WINDOW), 64)
    # A linear memory is divided by tokens, whatever its heads.
    mesh = AbstractMesh((1, 1, 2, 8), ("data", "fsdp", "tensor", "sequence"))
    sharding.require_divides(mesh, 1, model_of(DeltaNetConfig(16, 6, 4, 4)), 64)


class Chip:
    """A device of a host, as far as a mesh asks."""

    platform = "none"

    def __init__(self, number, host):
        self.id, self.process_index = number, host


def part_of(host, shape, hosts, monkeypatch):
    """What a host reads, where the devices of a mesh are on these hosts."""
    chips = [Chip(i, at) for i, at in enumerate(hosts)]
    axes = ("data", "fsdp", "tensor")
    mesh = jax.sharding.Mesh(np.array(chips).reshape(shape), axes)
    monkeypatch.setattr(jax, "process_index", lambda: host)
    return inspect.unwrap(sharding.host_part)(mesh)


@pytest.mark.parametrize(
    "shape,hosts,parts",
    [
        ((2, 2, 1), [0, 0, 1, 1], [(0, 2), (1, 2)]),
        ((4, 1, 1), [0, 1, 2, 3], [(0, 4), (1, 4), (2, 4), (3, 4)]),
        # Hosts that share rows read the same.
        ((1, 2, 2), [0, 1, 2, 3], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ((1, 1, 4), [0, 0, 1, 1], [(0, 1), (0, 1)]),
        # Devices in an order of their own, as on a TPU.
        ((2, 2, 1), [1, 1, 0, 0], [(1, 2), (0, 2)]),
    ],
)
def test_hosts_read_the_rows_of_their_devices(shape, hosts, parts, monkeypatch):
    found = [part_of(i, shape, hosts, monkeypatch) for i in range(len(parts))]
    assert found == parts


def test_hosts_with_scattered_rows_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"gives process 0 the parts \[0, 2\] of .* 4"):
        part_of(1, (4, 1, 1), [0, 1, 0, 1], monkeypatch)


def test_one_device_is_a_mesh():
    assert dict(sharding.make_mesh(MeshConfig()).shape) == dict(
        data=1, fsdp=1, tensor=1, sequence=1
    )
