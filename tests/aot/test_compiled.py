"""Steps of each system, compiled for four TPU chips."""

import dataclasses
import importlib.util
import re

import jax
import pytest

from memjax.aot import libtpu
from memjax.aot.compile import Request, compiled
from memjax.aot.report import report
from memjax.aot.steps import build, device_bytes
from memjax.data.mplus_tasks.tasks import MPlusTaskConfig
from memjax.mechanisms import AttentionConfig, ElasticMemoryConfig
from memjax.models import preset
from memjax.models.hmt.config import HMTConfig
from memjax.models.mplus.config import MPlusConfig
from memjax.training.config import DataConfig, RunConfig
from memjax.training.distributed.sharding import MeshConfig, make_mesh
from memjax.training.finetune.mplus_stage import MPlusStage
from memjax.training.finetune.run import FinetuneRun
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.finetune.stage import SampleConfig
from tests.aot.in_process import _in_process as _in_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("in_process"),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="compiling for a TPU takes libtpu (pip install libtpu)",
    ),
]
CHIPS = "v5e:2x2"
MESH = MeshConfig(fsdp=4)


def layer(family):
    """One layer of a tiny preset, of the kind that gives it its name."""
    config = preset(f"{family}-tiny", 256)
    kinds = config.layers
    elastic = [
        mechanism for mechanism in kinds if isinstance(mechanism, ElasticMemoryConfig)
    ]
    mechanisms = (elastic or kinds)[:1]
    return dataclasses.replace(config, num_layers=1, mechanisms=tuple(mechanisms))


def training(family, rows=4, fsdp=4, context=128):
    data = DataConfig(context_length=context, batch_size=rows)
    return RunConfig(model=layer(family), data=data, mesh=MeshConfig(fsdp=fsdp))


def finetuning(memory):
    samples = SampleConfig(batch_size=4, validation_texts=4)
    if memory == "hmt":
        hmt = HMTConfig(segment_length=32, num_sensory_tokens=4, num_memories=4)
        stage = SegmentStage(hmt=hmt, depth=1, data=samples, mesh=MESH)
    else:
        sizes = MPlusConfig(
            num_memory_tokens=4,
            pool_size=8,
            chunk_size=8,
            min_chunk_size=2,
            num_retrieved=4,
            store_size=16,
            key_dim=4,
            rank=2,
        )
        tasks = MPlusTaskConfig(
            chunks=(1, 40), shortest_chunk=3, target=16, prompt=3, revisit=0.0
        )
        stage = MPlusStage(memory=sizes, tasks=tasks, data=samples, mesh=MESH)
    attention = AttentionConfig(128, 4, 2, 32, capacity=256)
    backbone = dataclasses.replace(layer("transformer"), mechanisms=(attention,))
    return FinetuneRun(stage, backbone, "bytes", "", "")


def check(found):
    """A report that agrees with itself and with the compiler's own sums."""
    assert found["fits"] and found["devices"] == 4
    memory = found["memory"]
    assert memory["total"] == sum(memory["parts"].values()) < memory["capacity"]
    assert memory["parts"]["parameters"] > 0 and found["compiler"]["flops"] > 0
    assert {row["kind"] for row in found["collectives"]} & {"all-reduce", "all-gather"}


@pytest.mark.parametrize(
    ("family", "what"),
    [("elastic", "evaluate"), ("lattice", "train")],
)
def test_a_step_of_a_recurrent_system(family, what):
    """All kernels and their gradients are compiled in `tests/kernels`."""
    request = Request(training(family), what, CHIPS)
    made = compiled(request, cycles=False)
    check(report(request, made))
    # Its kernels are inside.
    assert "tpu_custom_call" in made.text
    facts = made.facts
    counted = sum(facts["arguments"].values())
    # As they lie: in tiles, with padding.
    assert counted <= facts["argument_bytes"] <= 8 * counted


@pytest.mark.parametrize("memory", ["hmt", "mplus"])
def test_a_training_step_of_each_system_around_a_backbone_is_lowered(memory):
    """Which takes a fifth of the time of a compilation; one is compiled below."""
    run = finetuning(memory)
    mesh = make_mesh(MESH, libtpu.devices_of(CHIPS))
    step = build(run, "train", mesh)
    with jax.set_mesh(mesh):
        text = step.function.lower(*step.arguments).as_text()
    assert "mhlo.num_partitions = 4" in text
    assert step.tokens == 4 * run.tokens_read
    assert device_bytes(step.parts["parameters"]) > 0


def test_cycles_of_a_training_step_are_counted():
    request = Request(training("transformer"), "train", CHIPS)
    speed = report(request, compiled(request, cycles=True))["speed"]
    least, most = speed["cycles"]
    low, high = speed["utilisation"]
    assert 1e4 < least < most and 0 < low < high < 1
    assert low * most == pytest.approx(high * least)
    # Scatters of XLA, and no kernel.
    assert all("fusion" in name for name in speed["loops_of_unknown_length"])
    total = sum(row["cycles"][1] for row in speed["dearest"])
    assert 0.1 * most < total <= most


@pytest.mark.parametrize("what", ["prefill", "decode"])
def test_steps_that_read(what):
    request = Request(training("transformer"), what, CHIPS)
    check(report(request, compiled(request, cycles=False)))


def test_store_on_the_host_takes_no_device_memory():
    run = finetuning("mplus")
    stage = run.config
    assert isinstance(stage, MPlusStage)

    # More than all else together, whose tiles have padding.
    sizes = dataclasses.replace(stage.memory, store_size=2**12)

    def stored(where):
        memory = dataclasses.replace(sizes, store_memory=where)
        placed = dataclasses.replace(stage, memory=memory)
        return dataclasses.replace(run, config=placed)

    request = Request(stored("host"), "decode", CHIPS)
    made = compiled(request, cycles=False)
    check(report(request, made))
    there = made.facts
    mesh = make_mesh(MESH, libtpu.devices_of(CHIPS))
    here = build(stored("device"), "decode", mesh).parts
    size = device_bytes(here["memory"]) - there["arguments"]["memory"]
    assert device_bytes(here, host=True) == 0 < there["host_arguments"] == size
    assert there["argument_bytes"] < size


def test_needed_memory_of_a_step_that_is_too_large():
    # 8 million tokens: the compiler refuses before it schedules anything. Many rows
    # would take longer to read than the step to compile.
    run = training("transformer", rows=2**6, context=2**17)
    request = Request(run, "train", CHIPS)
    found = report(request, compiled(request, cycles=False))
    assert not found["fits"] and found["memory"]["largest"] == "temporaries"
    assert found["memory"]["total"] > found["memory"]["capacity"] > 15 * 2**30


def test_slices_exchange_only_gradients():
    run = training("transformer", rows=8)
    run = dataclasses.replace(run, mesh=MeshConfig(fsdp=4, slices=2))
    made = compiled(Request(run, "train", CHIPS, slices=2), cycles=False)
    found = report(Request(run, "train", CHIPS, slices=2), made)
    assert found["devices"] == 8
    # Each transfer is the outer part of an all-reduce; nothing else leaves a slice.
    meetings = re.findall(r'_rendezvous="([a-z-]+)', made.text)
    assert {*meetings} == {"all-reduce"}
    groups = {*re.findall(r"replica_groups=(\{\{[^ ]*\}\})", made.text)}
    assert groups == {"{{0,1,2,3}}"}
    (between,) = [x for x in found["collectives"] if x["kind"] == "between slices"]
    # At most all gradients, in float32.
    assert between["bytes"] <= 4 * found["memory"]["parts"]["parameters"]


def test_an_unknown_topology_is_refused():
    request = Request(training("transformer"), "train", "v5e:3x5")
    with pytest.raises(ValueError, match="none that libtpu describes"):
        compiled(request, cycles=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": training("transformer", rows=6)}, "batch_size=6 does not divide"),
        ({"run": training("transformer", fsdp=3)}, "does not fit 4 devices"),
        ({"slices": 2}, "mesh.slices=1 must be 2"),
    ],
)
def test_steps_that_cannot_be_compiled_are_refused(changes, message):
    request = Request(training("transformer"), "train", CHIPS)
    with pytest.raises(ValueError, match=message):
        compiled(dataclasses.replace(request, **changes), cycles=False)


@pytest.mark.parametrize(("slices", "data"), [(1, 1), (2, 2)])
def test_a_mesh_may_divide_an_axis_of_the_torus(slices, data):
    """Eight chips share tensors, and the torus is 4 x 4."""
    mesh = MeshConfig(data=data, fsdp=2, tensor=8, slices=slices)
    made = make_mesh(mesh, libtpu.devices_of("v5e:4x4", slices))
    assert made.devices.shape == (data, 2, 8, 1)
    assert len({chip.id for chip in made.devices.flat}) == 16 * slices
    # Each group of eight is a block of neighbours, of one slice.
    groups = made.devices.reshape(-1, 8)
    for group in groups:
        xs, ys, _ = zip(*(chip.coords for chip in group), strict=True)
        assert {len({*xs}), len({*ys})} == {2, 4}
        assert len({getattr(chip, "slice_index", 0) for chip in group}) == 1
