"""Compilation of a step in a process of its own, and the compiler's statistics."""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from memjax.aot import libtpu
from memjax.aot.chips import chip_of
from memjax.aot.cycles.attention import shares
from memjax.aot.cycles.count import PROGRAM, Count, count
from memjax.aot.steps import Run, What, build, device_bytes
from memjax.config_io import from_record, read_json, to_record
from memjax.training import pretrain
from memjax.training.config import RunConfig
from memjax.training.distributed import sharding
from memjax.training.finetune.run import FinetuneRun
from memjax.training.monitoring.model_flops import flops_per_token

REQUEST, FACTS = "request.json", "facts.json"
RUNS = {"train": RunConfig, "finetune": FinetuneRun}


@dataclasses.dataclass(frozen=True)
class Request:
    """A step to compile, and its devices.

    Attributes:
        run: its configuration.
        what: the step.
        topology: of one slice, as libtpu names it.
        slices: number of slices.
    """

    run: Run
    what: What
    topology: str
    slices: int = 1


class Compiled(NamedTuple):
    """A compiled step, or the reason why it does not fit.

    Attributes:
        facts: sizes in bytes on one device, operations, seconds; "exhausted" is the
            compiler's message on a program that is too large for the memory.
        text: of the program for a device; empty if it does not fit.
        counted: its cycles; None if not requested.
    """

    facts: dict[str, Any]
    text: str
    counted: Count | None


def compiled(request: Request, cycles: bool) -> Compiled:
    """Compiles a step.

    Args:
        request: the step.
        cycles: whether to count its cycles; the compiler then writes a file for each
            operation.

    Raises:
        ValueError: libtpu is not installed, or knows no such topology; the mesh does
            not fit it, or the batch the mesh.
        RuntimeError: the step does not compile for another reason.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / REQUEST).write_text(json.dumps(_record(request)))
        bundles = folder / "bundles"
        bundles.mkdir()
        done = libtpu.run(__spec__.name, [temporary], bundles if cycles else None)
        if done.returncode or not (folder / FACTS).exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the step does not compile: {last[:500]}")
        facts = json.loads((folder / FACTS).read_text())
        if "refused" in facts:
            raise ValueError(facts["refused"])
        if "exhausted" in facts:
            return Compiled(facts, "", None)
        text = (folder / PROGRAM).read_text()
        if not cycles:
            return Compiled(facts, text, None)
        (folder / PROGRAM).rename(bundles / PROGRAM)
        speed = chip_of(request.topology).bytes_per_cycle
        return Compiled(facts, text, count(bundles, _shares(request), speed))


def _record(request: Request) -> dict[str, Any]:
    return {**vars(request), "run": to_record(request.run), "kind": request.run.kind}


def _read(record: dict[str, Any]) -> Request:
    kind = RUNS[record.pop("kind")]
    return Request(**{**record, "run": from_record(kind, record["run"], "run")})


def _shares(request: Request) -> dict[str, Any]:
    """The share of its grid steps in which an attention kernel computes."""
    # Other programs have other masks: all their steps count.
    if request.run.kind != "train" or request.what != "train":
        return {}
    run, mesh = request.run, request.run.mesh
    ways = mesh.tensor * mesh.sequence
    return shares(run.language_model.layers, run.data.context_length, ways)


def model_flops(request: Request) -> float | None:
    """Operations of a language model in a step; None for a fine-tuning.

    See `flops_per_token`: reading takes a third of the operations of training.
    """
    if request.run.kind != "train":
        return None
    data = request.run.data
    model = pretrain.abstract_model(request.run.language_model)
    each = flops_per_token(model, data.context_length)
    match request.what:
        case "train":
            return each * data.batch_size * data.context_length
        case "evaluate":
            rows = min(data.batch_size, data.validation_texts)
            return each / 3 * rows * data.context_length
    return each / 3 * data.batch_size


def _facts(request: Request, folder: Path) -> dict[str, Any]:
    """In the child: compiles, writes the program, and returns its statistics."""
    import jax

    devices = libtpu.devices_of(request.topology, request.slices)
    mesh = sharding.make_mesh(request.run.mesh, devices)
    step = build(request.run, request.what, mesh)
    facts: dict[str, Any] = {
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "tokens": step.tokens,
        "arguments": {name: device_bytes(part) for name, part in step.parts.items()},
        "host_arguments": device_bytes(step.parts, host=True),
    }
    seconds = facts["seconds"] = {}

    def timed(name: str, stage: Any, *given: Any) -> Any:
        begin = time.perf_counter()
        made = stage(*given)
        seconds[name] = round(time.perf_counter() - begin, 1)
        return made

    with jax.set_mesh(mesh):
        traced = timed("trace", step.function.trace, *step.arguments)
        lowered = timed("lower", traced.lower)
    try:
        program = timed("compile", lowered.compile)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return facts | {"exhausted": str(error)}
    (folder / PROGRAM).write_text(program.as_text() or "")
    memory = program.memory_analysis()
    for name in ("argument", "output", "alias", "temp", "generated_code"):
        facts[f"{name}_bytes"] = getattr(memory, f"{name}_size_in_bytes")
    cost = program.cost_analysis() or {}
    facts["flops"] = cost.get("flops")
    facts["bytes_accessed"] = cost.get("bytes accessed")
    return facts


def main(folder: Path) -> None:
    """In the child: reads the request in a folder, and writes the facts."""
    try:
        facts = _facts(_read(read_json(folder / REQUEST)), folder)
    except ValueError as error:
        facts = {"refused": str(error)}
    (folder / FACTS).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
