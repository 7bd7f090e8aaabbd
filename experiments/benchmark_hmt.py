"""How fast is a training step of HMT, beside its authors' way of computing it?

    python experiments/benchmark_hmt.py

One step: 4 segments of 256 new tokens, loss on the last 256, backward through all
segments, AdamW; float32, the same number of threads for all. The peer is eager PyTorch
over a Hugging Face model (`hmt_peer`), where both are installed. Each candidate lives
in a process of its own and takes its turns there, one at a time; what it compiles and
its first step are not timed. Weights are random: they do not change the time.

Also counted: the operations that the step needs, the operations that each program
executes, and the least time that this machine's peaks allow (one product and one copy,
measured first): `share_of_peak` is needed operations over time, over that peak, and
`times_roofline` the time over the least time. The cost of long inputs is `hmt_cost.py`.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import benchmark_kernels
from hmt_operations import SHAPES, Shape, Size, Trained, least_bytes, operations
from memjax.data import Batch
from memjax.models import LanguageModel, ModelConfig
from memjax.models.config import Architecture
from memjax.models.hmt import HMTConfig, hmt
from memjax.models.lora import LoraConfig, add_lora
from memjax.training import OptimizerConfig
from memjax.training.optimizer import optimizer
from memjax.training.step import StepConfig, init_train_state, make_train_step
from provenance import provenance

RESULTS = pathlib.Path(__file__).parent / "results"
Candidate = Literal["peer", "keep", "recompute"]


@dataclasses.dataclass(frozen=True)
class Config:
    """What is timed.

    Attributes:
        sizes: of the backbone: "tiny", or "smollm2" (135M).
        batches: rows of a step.
        trained: everything, or LoRA (rank 8) and the memory's parameters.
        candidates: "peer", and ours keeping all activations or recomputing them.
        threads: of every candidate.
        repeats: timed steps of each, at least 1.
        output: where the numbers go.
    """

    sizes: tuple[Size, ...] = ("tiny", "smollm2")
    batches: tuple[int, ...] = (1, 2)
    trained: tuple[Trained, ...] = ("all", "lora")
    candidates: tuple[Candidate, ...] = get_args(Candidate)
    threads: int = 2
    repeats: int = 5
    output: pathlib.Path = RESULTS / "hmt_speed.json"

    def __post_init__(self) -> None:
        for name in ("sizes", "batches", "trained", "candidates"):
            if not getattr(self, name):
                raise ValueError(f"{name} must not be empty")
        for name, value in (("repeats", self.repeats), ("batches", min(self.batches))):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        cores = len(os.sched_getaffinity(0))
        if not 1 <= self.threads <= cores:
            raise ValueError(f"threads must be in [1, {cores}], got {self.threads}")


def backbone_config(shape: Shape) -> ModelConfig:
    """Our backbone of that shape, in float32."""
    return ModelConfig(
        mixers=("attention",) * shape.layers,
        vocab_size=shape.vocab,
        model_dim=shape.width,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.width // shape.heads,
        hidden_dim=shape.hidden,
        capacity=2048,
        tied_head=shape.tied,
        architecture=Architecture(scale_embedding=False),
        dtype="float32",
        # What the memory's segments keep is theirs to say.
        remat=False,
    )


def llama(shape: Shape) -> Any:
    """transformers' Llama of that shape, its parameters random."""
    # Optional, and no other candidate's process should load it.
    import transformers  # pyright: ignore[reportMissingImports]

    sizes = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=shape.tied,
    )
    return transformers.LlamaForCausalLM(sizes)


def ours(
    shape: Shape,
    batch: int,
    trained: Trained,
    activations: Literal["keep", "recompute"],
) -> Callable[[], float]:
    """Our step, compiled when it is first called; returns the loss."""
    backbone = LanguageModel(backbone_config(shape), key=jax.random.key(0))
    if trained == "lora":
        backbone = add_lora(backbone, LoraConfig(), jax.random.key(2))
    memory = HMTConfig(
        segment=shape.segment,
        sensory=shape.sensory,
        retrieval_dim=shape.retrieval_dim,
        activations=activations,
    )
    model = hmt(backbone, memory, key=jax.random.key(1))
    transform = optimizer(
        OptimizerConfig(
            learning_rate=1e-5,
            beta2=0.999,
            epsilon=1e-8,
            weight_decay=0.01,
            decay_vectors=True,
            max_gradient_norm=float("inf"),
        ),
        steps=1000,
    )
    settings = StepConfig(loss_on="last")
    holder = [init_train_state(model, transform, settings, batch)]
    update = jax.jit(make_train_step(model, transform, settings), donate_argnums=0)
    tokens = _tokens(shape, batch)
    # The last logits have no target.
    mask = np.ones(tokens.shape, np.float32)
    mask[:, -1] = 0
    items = (tokens, np.roll(tokens, -1, axis=1), mask, np.ones(batch, bool))
    one = Batch(*map(jnp.asarray, items))

    def step() -> float:
        holder[0], metrics = update(holder[0], one)
        jax.block_until_ready((holder[0], metrics))
        return float(metrics["loss"])

    return step


def peer(
    shape: Shape, batch: int, trained: Trained, threads: int
) -> Callable[[], float]:
    """The peer's step; returns the loss."""
    # Optional, and no other candidate's process should load them.
    import torch  # pyright: ignore[reportMissingImports]

    import hmt_peer

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    memory = hmt_peer.PeerConfig(
        segment=shape.segment,
        sensory=shape.sensory,
        memories=300,
        retrieval_dim=shape.retrieval_dim,
        summary=shape.segment // 2,
    )
    model = hmt_peer.PeerHMT(llama(shape), memory)
    if trained == "lora":
        hmt_peer.add_lora(model)
    adamw = hmt_peer.adamw(model)
    tokens = torch.from_numpy(_tokens(shape, batch)).long()
    return lambda: hmt_peer.training_step(model, adamw, tokens, shape.segment)


def confine(threads: int) -> None:
    """Keeps this process to so many cores; XLA takes a thread for each."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def build(
    candidate: Candidate, shape: Shape, batch: int, trained: Trained, threads: int
) -> Callable[[], float]:
    """A candidate's step."""
    if candidate == "peer":
        return peer(shape, batch, trained, threads)
    return ours(shape, batch, trained, candidate)


def serve(
    line: Any, threads: int, make: Callable[..., Callable[[], Any]], given: Any
) -> None:
    """A candidate's process: a step whenever it is asked, until it is told to stop."""
    confine(threads)
    step = make(*given)
    while line.recv():
        begin = time.perf_counter()
        value = step()
        seconds = time.perf_counter() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        line.send((seconds, value, peak))


def take_turns(
    make: Callable[..., Callable[[], Any]],
    given: dict[str, tuple[Any, ...]],
    threads: int,
    repeats: int,
) -> dict[str, list[tuple[float, Any, float]]]:
    """Runs one step of every candidate, in turns, after one that is not counted.

    Args:
        make: builds a candidate's step, in the candidate's own process.
        given: what it is given, for each candidate.
        threads: of each process.
        repeats: steps after the first.

    Returns:
        For each candidate and step, the first among them: seconds, what the step
        returned, and the most MiB that the process has had.
    """
    spawn = multiprocessing.get_context("spawn")
    lines, processes = {}, []
    for name, arguments in given.items():
        lines[name], other = spawn.Pipe()
        target = (other, threads, make, arguments)
        processes.append(spawn.Process(target=serve, args=target))
        processes[-1].start()
        other.close()
    found: dict[str, list[tuple[float, Any, float]]] = {name: [] for name in lines}
    for _ in range(1 + repeats):
        for name, line in lines.items():
            line.send(True)
            found[name].append(line.recv())
    for line in lines.values():
        line.send(False)
    for process in processes:
        process.join()
    return found


def race(config: Config, shape: Shape, batch: int, trained: Trained) -> dict[str, Any]:
    """Times one step of every candidate, in turns, after one that is not timed."""
    given = {
        name: (name, shape, batch, trained, config.threads)
        for name in present(config.candidates)
    }
    found = take_turns(build, given, config.threads, config.repeats)
    return {
        name: summary([seconds for seconds, _, _ in rows[1:]])
        | {"first_s": rows[0][0], "loss": rows[-1][1], "peak_mebibytes": rows[-1][2]}
        for name, rows in found.items()
    }


def present(candidates: Sequence[str]) -> list[Any]:
    """The candidates whose packages are installed."""
    missing = [
        name
        for name in ("torch", "transformers")
        if importlib.util.find_spec(name) is None
    ]
    return [name for name in candidates if name != "peer" or not missing]


def main(config: Config) -> None:
    """Times, prints and writes the results."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, confine, (config.threads,)) as pool:
        name, device = pool.submit(benchmark_kernels.this_device).result()
    rows = []
    for size in config.sizes:
        for trained in config.trained:
            for batch in config.batches:
                row = measure(config, size, batch, trained, device)
                rows.append(row)
                print(json.dumps(row), flush=True)
    fields = dataclasses.asdict(config)
    del fields["output"]
    report = provenance("speed of a training step of HMT", fields) | {
        "peaks": {"of": name} | device._asdict(),
        "packages": {
            package: importlib.metadata.version(package)
            for package in ("torch", "transformers")
            if importlib.util.find_spec(package) is not None
        },
        "steps": rows,
    }
    config.output.parent.mkdir(parents=True, exist_ok=True)
    config.output.write_text(json.dumps(report, indent=1) + "\n")
    _print(rows)


def measure(
    config: Config, size: Size, batch: int, trained: Trained, device: Any
) -> dict[str, Any]:
    """One row: times, ratios to the peer, operations and distance to the peaks."""
    shape = SHAPES[size]
    flops = operations(shape, batch, trained)
    traffic = least_bytes(shape, trained)
    least = max(flops["needed"] / device.flops, traffic / device.bandwidth)
    load = os.getloadavg()[0]
    times = race(config, shape, batch, trained)
    for name, row in times.items():
        row["share_of_peak"] = flops["needed"] / row["median_s"] / device.flops
        row["times_roofline"] = row["median_s"] / least
        if "peer" in times and name != "peer":
            row["speedup"] = times["peer"]["median_s"] / row["median_s"]
            row["least_speedup"] = times["peer"]["min_s"] / row["max_s"]
    return {
        "size": size,
        "batch": batch,
        "trained": trained,
        "operations": flops,
        "bytes": traffic,
        "roofline_s": least,
        # Beside other work PyTorch's threads wait for each other, and lose far more.
        "load_average_before": load,
        "candidates": times,
    }


def _tokens(shape: Shape, batch: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.integers(0, shape.vocab, (batch, shape.tokens), dtype=np.int32)


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and spread of times."""
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table("backbone", "trained", "batch", "candidate", "seconds", "spread")
    for column in ("peak MiB", "of peak", "of roofline", "speedup"):
        table.add_column(column, justify="right")
    for row in rows:
        for name, found in row["candidates"].items():
            table.add_row(
                row["size"],
                row["trained"],
                str(row["batch"]),
                name,
                f"{found['median_s']:.3f}",
                f"{found['min_s']:.3f} to {found['max_s']:.3f}",
                f"{found['peak_mebibytes']:,.0f}",
                f"{found['share_of_peak']:.0%}",
                f"{found['times_roofline']:.1f}x",
                f"{found['speedup']:.2f}" if "speedup" in found else "",
            )
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
