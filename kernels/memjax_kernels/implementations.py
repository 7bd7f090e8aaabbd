"""Which code runs an op, where."""

import logging

import jax

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
            which it cannot: where jax has one device, or inside a `shard_map`.
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
    for name in FASTEST.get(jax.default_backend(), FASTEST["cpu"]):
        obstacle = obstacles.get(name, "not written")
        if name.startswith("pallas_") and not (obstacle or _whole()):
            obstacle = "XLA cannot partition a kernel: call the op under shard_map"
        if not obstacle:
            return name
        _log.debug("%s falls through %s: %s", op, name, obstacle)
    raise ValueError(f"no implementation of {op} runs here: {obstacles}")


def _whole() -> bool:
    """Whether arrays lie on one device each as far as the op can see."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)
    return manual or jax.device_count() == 1


def needs(platform: str) -> str:
    """The obstacle of a kernel written for `platform`: "" where jax runs on it."""
    here = jax.default_backend()
    return "" if here == platform else f"it needs a {platform}, jax runs on {here}"
