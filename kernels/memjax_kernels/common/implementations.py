"""Which code runs an op, where."""

import logging

import jax

from memjax_kernels.common import partition

_log = logging.getLogger(__name__)

# Fastest first, by platform. Rows with a kernel say what they rest on: a choice
# without a timing behind it stays behind "xla".
#   tpu: compiled for v5e, v5p and v6e, never timed: the XLA form carries the state
#        through HBM at every chunk, which the kernels do not.
#   gpu: Mosaic GPU kernels have not yet run on a GPU, so they are never picked here.
FASTEST: dict[str, tuple[str, ...]] = {
    "cpu": ("xla", "reference"),
    "gpu": ("xla", "reference"),
    "tpu": ("pallas_tpu", "xla", "reference"),
}


def choose(op: str, implementation: str | None, obstacles: dict[str, str]) -> str:
    """Picks the implementation of an op.

    Args:
        op: its name, for messages.
        implementation: what the caller asked for; None is the first of `FASTEST`
            that runs. A kernel is so picked only where XLA need not partition it,
            which it cannot: where jax has one device, inside a `shard_map`, or in
            `partition.over` a mesh.
        obstacles: for every implementation that the op has, "" if it runs with these
            arguments here, else why it cannot.

    Raises:
        ValueError: on a name the op does not have, or one that cannot run here.
    """
    if implementation is not None:
        if implementation not in obstacles:
            raise ValueError(
                f"implementation of {op} must be None or one of {tuple(obstacles)}, "
                f"got {implementation!r}"
            )
        if obstacles[implementation]:
            raise ValueError(
                f"implementation={implementation!r} of {op} cannot run here: "
                f"{obstacles[implementation]}"
            )
        return implementation
    for name in FASTEST.get(partition.platform(), FASTEST["cpu"]):
        obstacle = obstacles.get(name, "not written")
        if name.startswith("pallas_") and not (obstacle or partition.is_whole()):
            obstacle = "XLA cannot partition a kernel: call the op in partition.over"
        if not obstacle:
            return name
        _log.debug("%s falls through %s: %s", op, name, obstacle)
    raise ValueError(f"no implementation of {op} runs here: {obstacles}")


def needs(platform: str) -> str:
    """The obstacle of a kernel written for `platform`: "" where jax runs on it."""
    here = partition.platform()
    return "" if here == platform else f"it needs a {platform}, jax runs on {here}"


def needs_hopper() -> str:
    """The obstacle of a kernel of Hopper's tensor-core instructions, on a GPU."""
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if capability.startswith("9."):
        return ""
    return f"it needs a Hopper GPU (compute capability 9), this one has {capability}"
