"""Kernels of flash-linear-attention, timed beside ours where they are installed.

They need PyTorch, Triton and a GPU. Every function takes the same arrays as our op and
is timed in the same run.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

# Our op -> (module and function of fla, whether it computes the same function). Where
# it does not, it is the nearest kernel with the same state: fair for speed alone.
BASELINES: dict[str, tuple[tuple[str, bool], ...]] = {
    "linear_attention": (("fla.ops.linear_attn.chunk_linear_attn", True),),
    "ssd": (("fla.ops.simple_gla.chunk_simple_gla", True),),
    "gla": (
        ("fla.ops.gla.chunk_gla", True),
        ("fla.ops.gla.fused_recurrent_gla", True),
    ),
    "delta_rule": (
        ("fla.ops.delta_rule.chunk_delta_rule", True),
        ("fla.ops.delta_rule.fused_recurrent_delta_rule", True),
    ),
    "gated_delta_rule": (
        ("fla.ops.gated_delta_rule.chunk_gated_delta_rule", True),
        ("fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule", True),
    ),
    "gated_slots": (("fla.ops.gsa.chunk_gsa", True),),
    # fla updates with the last token's rate, ours with each token's own.
    "ttt_linear": (("fla.ops.ttt.fused_chunk_ttt_linear", False),),
    "trellis": (
        ("fla.ops.gsa.chunk_gsa", False),
        ("fla.ops.ttt.fused_chunk_ttt_linear", False),
    ),
    "lattice": (("fla.ops.gla.chunk_gla", False),),
}


def available() -> bool:
    """Whether PyTorch sees a GPU and flash-linear-attention is installed."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "fla")):
        return False
    return importlib.import_module("torch").cuda.is_available()


def to_torch(array: Any, dtype: str) -> Any:
    """A leaf tensor on the GPU with the values of a JAX array."""
    torch = importlib.import_module("torch")
    values = torch.from_numpy(np.asarray(array, np.float32).copy())
    return values.to("cuda", getattr(torch, dtype)).requires_grad_()


def call(baseline: str, named: dict[str, Any], chunk_size: int) -> Any:
    """One baseline on arrays named as our op names them: the tensor [B, T, H, V]."""
    module, name = baseline.rsplit(".", 1)
    function = getattr(importlib.import_module(module), name)
    q, k, v = named["q"], named["k"], named["v"]
    slots = named.get("alpha")
    if name == "chunk_gsa":
        g = named["g"]
        # Trellis has one gate a head; GSA one a slot.
        g = g if g.ndim == 4 else g[..., None].expand_as(slots)
        return function(q, k, v, slots, g, scale=1.0)[0]
    if name == "fused_chunk_ttt_linear":
        torch = importlib.import_module("torch")
        ones = torch.ones(q.shape[2:], device=q.device, dtype=q.dtype)
        eta = named["eta"] if "eta" in named else named["gamma"]
        options = {"chunk_size": chunk_size, "scale": 1.0}
        return function(
            q, k, v, ones, torch.zeros_like(ones), eta[..., None], **options
        )[0]
    if name.endswith("linear_attn"):
        return function(q, k, v, scale=1.0, normalize=False)[0]
    if "delta_rule" in name:
        gates = {"g": named["g"]} if "gated" in name else {}
        return function(q, k, v, beta=named["beta"], scale=1.0, **gates)[0]
    g = named["g"] if "g" in named else -named["gamma"]
    if name.endswith("_gla") and "simple" not in name and g.ndim == 3:
        # Lattice has one rate a head; GLA a gate for every channel.
        g = g[..., None].expand_as(k)
    gate = "gk" if name == "fused_recurrent_gla" else "g"
    return function(q, k, v, scale=1.0, **{gate: g})[0]


def ways(
    op: str, named: dict[str, Any], dtype: str, chunk_size: int
) -> dict[str, tuple[bool, Callable[[], Any], Callable[[], None]]]:
    """For every baseline: whether it is the same function, forward, and both."""
    torch = importlib.import_module("torch")
    gates = ("g", "beta", "gamma", "eta")
    tensors = {
        name: to_torch(array, "float32" if name in gates else dtype)
        for name, array in named.items()
    }

    def forward(baseline: str) -> Any:
        with torch.no_grad():
            y = call(baseline, tensors, chunk_size)
        torch.cuda.synchronize()
        return y

    def both(baseline: str) -> None:
        y = call(baseline, tensors, chunk_size)
        torch.autograd.grad(y.sum(), list(tensors.values()), allow_unused=True)
        torch.cuda.synchronize()

    return {
        name: (same, lambda p=name: forward(p), lambda p=name: both(p))
        for name, same in BASELINES.get(op, ())
    }
