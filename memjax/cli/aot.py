"""The command `memjax aot`: memory and cost of a step on TPUs, without one."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import jax
from rich.console import Console
from rich.table import Table

from memjax.aot.chips import chip_of
from memjax.aot.compile import Request, compiled
from memjax.aot.libtpu import libtpu_version, require_libtpu
from memjax.aot.report import lines, report
from memjax.aot.search import Edge, Probe, largest
from memjax.aot.steps import Run, What
from memjax.buckets.writing import write_atomically
from memjax.checks import require_known
from memjax.cli import config_files
from memjax.cli.finetune import Config as Finetuning
from memjax.cli.finetune import presets as finetune_presets
from memjax.config_io import read_json
from memjax.evaluation.provenance import version
from memjax.models import ModelConfig
from memjax.models.checkpoints import own_format, own_model
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.status import Status
from memjax.training.config import RunConfig
from memjax.training.config import presets as train_presets
from memjax.training.finetune.run import AnyStage, FinetuneRun

#: Maximum number of units that a search tries.
MAX_UNITS = 2**24


def presets() -> dict[str, Any]:
    """Configurations of `memjax train` and of `memjax finetune` by name."""
    return finetune_presets() | train_presets()


def read(file: Path) -> tuple[Any, dict[str, Any]]:
    """The configuration of any run, and the options that it implies."""
    if config_files.is_finetuning(file):
        return config_files.read_finetuning(file)
    return config_files.read_training(file)


def aot(
    config: RunConfig | Finetuning,
    *,
    topology: str,
    slices: int = 1,
    what: tuple[What, ...] = ("train",),
    backbone: str | None = None,
    search: Literal["batch", "context"] | None = None,
    cycles: bool = True,
    output: Path | None = None,
) -> int:
    """Compiles a run's steps for TPUs, without one, and reports memory and cost.

    Exit code 1 if one does not fit. Counted cycles do not include waiting for memory
    and for other devices: tokens per second are an upper bound.

    Args:
        config: the preset, of `memjax train` or `memjax finetune`.
        topology: the chips, such as v5e:16x16, v5p:4x4x4 or v6e:8x8; the mesh must fit
            them.
        slices: number of topologies, joined by the data-center network.
        what: the steps: train, evaluate, prefill (a call of each sequence's prompt, of
            the model's preferred number of tokens), decode (one token of each).
        backbone: for a fine-tuning, a preset of `memjax train`, or the config.json of
            any model that memjax reads.
        search: also find the largest batch or context that fits, by compiling several.
        cycles: count them, which takes longer to compile.
        output: file for the report, as JSON.
    """
    chip_of(topology)
    require_libtpu()
    # Before compiling: files may change meanwhile.
    made_by = version()._asdict()
    # Only shapes are computed here, without a device.
    jax.config.update("jax_platforms", "cpu")
    results: dict[str, Any] = {}
    for name, run in _runs(config, backbone).items():
        for step in what:
            request = Request(run, step, topology, slices)
            label = " ".join(filter(None, (name, step)))
            with Status(f"compiling {label} for {topology}"):
                found = report(request, compiled(request, cycles))
            if search is not None:
                found["search"] = _search(request, search)
            results[label] = found
            _show(results)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        written = {**made_by, "libtpu": libtpu_version(), "steps": results}
        write_atomically(output, json.dumps(written, indent=1))
        print(f"wrote {output}")
    unfit = [name for name, found in results.items() if not found["fits"]]
    return 1 if unfit else 0


def _runs(config: RunConfig | Finetuning, backbone: str | None) -> Mapping[str, Run]:
    """The runs of a configuration, by stage."""
    if not hasattr(config, "stages"):
        if backbone is not None:
            raise ValueError(f"backbone={backbone!r} is for a fine-tuning only")
        return {"": cast(RunConfig, config)}
    config = cast(Finetuning, config)
    if backbone is None:
        raise ValueError(
            "backbone=None must be a preset of `memjax train` or a config.json"
        )
    if getattr(config, "layers", None) == "auto":
        raise ValueError("layers='auto' must be numbers here: nothing is measured")
    model = _backbone(backbone)

    return {
        name: FinetuneRun(cast(AnyStage, stage), model, "bytes", "", "")
        for name, stage in config.stages()
    }


def _backbone(name: str) -> ModelConfig:
    """The configuration of a pretrained model."""
    known = train_presets()
    if name in known:
        return known[name].model
    file = Path(name).expanduser()
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ValueError(
            f"backbone={name!r} is no preset of `memjax train`, and no config.json"
        )
    record = read_json(file)
    if record.get("model_type") == own_format.MODEL_TYPE:
        return own_model.read_config(record, None, str(file))
    return from_hf_config(record)


def _search(request: Request, name: str) -> dict[str, Any]:
    """The largest batch or context that fits, and the sizes that were compiled."""
    if request.run.kind != "train":
        raise ValueError(f"search={name!r} is for presets of `memjax train` only")
    run = cast(RunConfig, request.run)
    field = {"batch": "batch_size", "context": "context_length"}[name]
    now = getattr(run.data, field)
    unit = _unit(request, name)

    def probe(units: int) -> Probe:
        data = dataclasses.replace(run.data, **{field: units * unit})
        changed = dataclasses.replace(run, data=data)
        asked = dataclasses.replace(request, run=changed)
        with Status(f"compiling {name} {units * unit:,}"):
            memory = report(asked, compiled(asked, False))
        print(f"{name} {units * unit:,}: {'fits' if memory['fits'] else 'too large'}")
        size = memory["memory"]
        return Probe(memory["fits"], size["total"], size["capacity"])

    start = min(max(1, now // unit), MAX_UNITS)
    edge = largest(probe, start, MAX_UNITS)
    return _edge(edge, name, unit)


def _edge(edge: Edge, name: str, unit: int) -> dict[str, Any]:
    sizes = {size * unit: probe._asdict() for size, probe in edge.probes.items()}
    fails = None if edge.fails is None else edge.fails * unit
    return {"of": name, "fits": edge.fits * unit, "fails": fails, "compiled": sizes}


def _unit(request: Request, name: str) -> int:
    """The increment of a batch or a context, divisible by the mesh and the model."""
    run = cast(RunConfig, request.run)
    require_known("search", name, ("batch", "context"))
    if name == "batch":
        rows = _devices(request) // (run.mesh.tensor * run.mesh.sequence)
        return rows * run.step.accumulate
    windows = [mechanism.tokens_per_call or 0 for mechanism in run.model.layers]
    return math.lcm(max([128, *windows]), run.mesh.sequence)


def _devices(request: Request) -> int:
    """Number of devices of all slices."""
    grid = request.topology.partition(":")[2]
    sizes = [int(size) for size in grid.split("x")]
    count = request.slices
    for size in sizes:
        count *= size
    return count


def _show(results: Mapping[str, Any]) -> None:
    """Prints the table of the last step."""
    name, found = list(results.items())[-1]
    table = Table(name, f"{found['topology']}", show_header=True)
    for row in lines(found):
        table.add_row(*row)
    if edge := found.get("search"):
        table.add_row(f"largest {edge['of']}", f"{edge['fits']:,}")
    Console().print(table)
