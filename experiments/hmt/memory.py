"""What does a deeper unroll of HMT cost in memory, and what does recomputing save?

    python -m experiments.hmt.memory

Compiles one training step (stage 2, all parameters, AdamW) at several depths, in
segments a sample. The activations for the backward pass are kept, recomputed, or
recomputed from layers' inputs that are kept in the host's memory. Nothing is executed:
the sizes are what the compiler allocates, on this machine and, with libtpu installed,
for a TPU that need not be here.
"""

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from experiments.lab.results import RESULTS, settings, write_report
from memjax.data.batches.batch import Batch
from memjax.evaluation.drawing import COLOURS, drawing, log_values, source_of
from memjax.mechanisms import AttentionConfig
from memjax.models import LanguageModel, ModelConfig
from memjax.models.hmt.config import HMTConfig
from memjax.models.hmt.model import hmt
from memjax.training.finetune.segment_stage import SegmentStage
from memjax.training.optimizer import optimizer
from memjax.training.step import init_train_state, make_train_step

Activations = Literal["keep", "recompute", "offload"]
ACTIVATIONS: tuple[Activations, ...] = ("keep", "recompute", "offload")
# Compiling for a TPU that is not here must not look for one.
ABSENT_TPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes; the defaults compile in minutes on a CPU.

    Attributes:
        depths: segments a sample.
        segment: L.
        sensory: k.
        memories: N.
        batch_size: samples.
        layers: of the backbone.
        width: of the backbone, in heads of 64.
        vocab_size: V.
        topology: the TPU to compile for; empty for none.
        output: where the results go, without suffix.
    """

    depths: tuple[int, ...] = (1, 2, 4, 8, 15)
    segment: int = 256
    sensory: int = 32
    memories: int = 300
    batch_size: int = 2
    layers: int = 2
    width: int = 256
    vocab_size: int = 4096
    topology: str = "v5e:2x2"
    output: Path = RESULTS / "hmt" / "memory"


def compile_step(
    config: Config, depth: int, activations: Activations, device: Any
) -> dict[str, int]:
    """Bytes that the compiled step takes beyond its arguments and results."""
    heads, longest = config.width // 64, config.segment + config.sensory + 2
    backbone = ModelConfig(
        mechanisms=(AttentionConfig(config.width, heads, heads, 64, capacity=longest),),
        num_layers=config.layers,
        vocab_size=config.vocab_size,
        model_dim=config.width,
        hidden_dim=3 * config.width,
        dtype="float32",
        remat=False,
    )
    memory = HMTConfig(
        segment=config.segment,
        sensory=config.sensory,
        memories=config.memories,
        activations=activations,
    )
    settings = SegmentStage()
    transform = optimizer(settings.optimizer, settings.loop.steps)
    build = lambda: hmt(
        LanguageModel(backbone, key=jax.random.key(0)), memory, key=jax.random.key(1)
    )
    state = jax.eval_shape(
        lambda: init_train_state(build(), transform, settings.step, config.batch_size)
    )
    shape = (config.batch_size, depth * config.segment)
    batch = jax.eval_shape(
        lambda: Batch(
            tokens=jnp.zeros(shape, jnp.int32),
            targets=jnp.zeros(shape, jnp.int32),
            mask=jnp.zeros(shape),
            reset=jnp.zeros(shape[:1], bool),
        )
    )
    step = make_train_step(nnx.eval_shape(build), transform, settings.step)
    arguments = _on(device, (state, batch))
    # The program is not run: its buffers are allotted before machine code is made.
    quick: Any = {"xla_backend_optimization_level": 0}
    quick = quick if device.platform == "cpu" else {}
    lowered = jax.jit(step, donate_argnums=0).lower(*arguments)
    compiled = lowered.compile(compiler_options=quick)
    found: Any = compiled.memory_analysis()
    return {
        "device": found.temp_size_in_bytes,
        "host": found.host_temp_size_in_bytes,
        "arguments": found.argument_size_in_bytes,
    }


def devices(config: Config) -> dict[str, Any]:
    """This machine's device, and the absent TPU where it can be compiled for."""
    here = jax.devices()[0]
    found = {here.device_kind if here.platform != "cpu" else "CPU": here}
    if config.topology and importlib.util.find_spec("libtpu") is not None:
        for name, value in ABSENT_TPU.items():
            os.environ.setdefault(name, value)
        topology = topologies.get_topology_desc(config.topology, "tpu")
        found[f"TPU {config.topology.split(':')[0]}"] = topology.devices[0]
    return found


def main(config: Config) -> None:
    """Compiles all, and writes numbers and a plot."""
    sizes: dict[str, dict[str, list[dict[str, int]]]] = {}
    for name, device in devices(config).items():
        sizes[name] = {way: [] for way in ACTIVATIONS}
        for way in ACTIVATIONS:
            for depth in config.depths:
                size = compile_step(config, depth, way, device)
                sizes[name][way].append(size)
                print(f"{name} {way} depth {depth}: {size}", flush=True)
    question = (__doc__ or "").splitlines()[0]
    found = {"bytes": sizes}
    result = write_report(config.output, question, settings(config), found)
    plot(result, Path(f"{config.output}.png"))


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel a device; the host's part dashed where there is any."""
    sizes, depths = result["bytes"], result["config"]["depths"]
    with drawing(
        path,
        columns=len(sizes),
        size=(5 * len(sizes), 4.2),
        title="A training step of HMT: MiB beside parameters and moments",
        source=f"compiled on {source_of(result)}",
        sharey=True,
    ) as drawn:
        for axes, (device, ways) in zip(drawn.grid[0], sizes.items(), strict=True):
            for i, (way, found) in enumerate(ways.items()):
                of = lambda place, found=found: [x[place] / 2**20 for x in found]
                drawn.line(axes, depths, of("device"), way, i)
                if any(of("host")):
                    dashed: Any = {"linestyle": "--", "color": COLOURS[i]}
                    name = f"{way}, on the host"
                    drawn.line(axes, depths, of("host"), name, len(ways), **dashed)
            axes.set(title=f"for {device}", xlabel="segments a sample")
            log_values(axes)
            axes.set_xticks(depths)
        drawn.grid[0, 0].set_ylabel("MiB")


def _on(device: Any, tree: PyTree) -> PyTree:
    sharding = SingleDeviceSharding(device)
    with_sharding = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(with_sharding, tree)


if __name__ == "__main__":
    main(tyro.cli(Config))
