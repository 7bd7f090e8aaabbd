"""Choice of the implementation of an op.

Without a choice by the caller this is decided when a program is lowered, by the
platform that it is lowered for. A program lowered on a CPU for a TPU holds the kernels
of the TPU.
"""

import functools
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jaxtyping import Array, PyTree

from memjax_kernels._src.common import cpu, gradients
from memjax_kernels._src.common.varying import vary_alike

_log = logging.getLogger(__name__)

# The platform that each kernel is written for, as jax.default_backend() names it.
_PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}
# The same platforms as programs are lowered for them.
_LOWERED_FOR = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}


def choose(
    op: str,
    implementation: str | None,
    forms: Mapping[str, Callable[..., Any]],
    unsupported: Mapping[str, str] | None = None,
    by_itself: Collection[str] = ("pallas_tpu",),
    looped: PyTree[Array] = None,
) -> Callable[..., Any]:
    """The implementation of an op that was asked for, or else the fastest.

    The fastest is a kernel in a program that is lowered for its platform, where the op
    has it and it takes the arguments; everywhere else it is `xla`, but for small
    memories on a CPU: there it is the token loop, and `xla` where a derivative is
    taken. The TPU kernels were compiled for v5e, v5p and v6e but never timed: the XLA
    forms carry the memory through HBM at every chunk, which the kernels do not. Those
    of GPUs are chosen where jax itself runs on a Hopper GPU, at the sizes that were
    timed on one. Kernels and most chunks have no forward mode (`jax.jvp`): ask for
    `reference` there.

    Args:
        op: its name, for messages.
        implementation: a key of `forms`, or None for the fastest.
        forms: the implementations. Kernels and `xla` take the same positional trees of
            arrays, and return the same structure.
        unsupported: why a form cannot take the arguments on any device, by its name;
            "" or no entry where it can.
        by_itself: kernels that are chosen without being asked for.
        looped: the state of an op whose token loop, `reference`, is faster on a CPU
            than chunks, if the state is small. None: it is not faster.

    Returns:
        One of the forms, or a function that is one of them when lowered.

    Raises:
        ValueError: on a name the op does not have, or one that cannot run here.
    """
    unsupported = unsupported or {}
    if implementation is not None:
        _check(op, implementation, forms, unsupported)
        return forms[implementation]
    kernels = {}
    for name in by_itself:
        if name not in forms:
            continue
        if unsupported.get(name):
            _log.debug("%s cannot run as %s: %s", op, name, unsupported[name])
        # A program for another host's GPU may not be one for a Hopper GPU.
        elif name != "pallas_gpu" or not needs("gpu"):
            kernels[_LOWERED_FOR[name]] = forms[name]
    default = forms["xla"]
    small = looped is not None and cpu.loop_is_faster(looped)
    if small and jax.default_backend() == "cpu":
        # Programs for a TPU are lowered on CPUs too, those for a GPU are not.
        kernels.setdefault("tpu", default)
        default = gradients.unless_differentiated(forms["reference"], default)
    if not kernels:
        # Many ops have the XLA form alone.
        return default
    every = {"default": default, **kernels}
    alike = {name: functools.partial(_alike, form) for name, form in every.items()}
    # Traces all forms and lowers one.
    return functools.partial(jax.lax.platform_dependent, **alike)


def _alike(form: Callable[..., Any], *arrays: Any) -> Any:
    # Inside a shard_map, results of all forms vary over the axes that arrays do.
    return vary_alike((form(*arrays), arrays))[0]


def _check(op, implementation, forms, unsupported):
    """Raises ValueError unless the implementation exists and can run here."""
    if implementation not in forms:
        raise ValueError(
            f"implementation of {op} must be None or one of {tuple(forms)}, "
            f"got {implementation!r}"
        )
    reason = unsupported.get(implementation)
    if implementation in _PLATFORMS:
        reason = needs(_PLATFORMS[implementation]) or reason
    if reason:
        raise ValueError(
            f"implementation={implementation!r} of {op} cannot run here: {reason}"
        )


def needs(platform: str) -> str:
    """Why a kernel written for `platform` cannot run here; "" if it can.

    Here is the mesh of `jax.set_mesh`, else where jax runs. A single device that a
    program is only compiled for is not known before it is lowered: leave the
    implementation to be chosen then.
    """
    # A mesh may be of devices that a program is only compiled for.
    device = jax.sharding.get_abstract_mesh().abstract_device
    here = jax.default_backend() if device is None else device.platform
    if here != platform:
        return f"it needs a {platform}, jax runs on {here}"
    return _needs_hopper() if platform == "gpu" else ""


def _needs_hopper() -> str:
    """Why a kernel of Hopper's tensor-core instructions cannot run on this GPU."""
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if capability.startswith("9."):
        return ""
    return f"it needs a Hopper GPU (compute capability 9), this one has {capability}"
