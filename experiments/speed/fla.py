"""Kernels of flash-linear-attention on the arrays of our ops.

They need PyTorch, Triton and a GPU.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

#: By our op: function of fla, and whether it computes the same. Where it does not, it
#: is the nearest kernel with the same state: fair for speed alone.
PEERS: dict[str, dict[str, bool]] = {
    "linear_attention": {"linear_attn.chunk_linear_attn": True},
    "ssd": {"simple_gla.chunk_simple_gla": True},
    "gla": {"gla.chunk_gla": True, "gla.fused_recurrent_gla": True},
    "delta_rule": {
        "delta_rule.chunk_delta_rule": True,
        "delta_rule.fused_recurrent_delta_rule": True,
    },
    "gated_delta_rule": {
        "gated_delta_rule.chunk_gated_delta_rule": True,
        "gated_delta_rule.fused_recurrent_gated_delta_rule": True,
    },
    "gated_slots": {"gsa.chunk_gsa": True},
    # fla updates with the last token's rate, ours with each token's own.
    "ttt_linear": {"ttt.fused_chunk_ttt_linear": False},
    "trellis": {"gsa.chunk_gsa": False, "ttt.fused_chunk_ttt_linear": False},
    "lattice": {"gla.chunk_gla": False},
}


class Peer(NamedTuple):
    """A kernel of fla: whether it computes the same, its call, and with gradients."""

    same: bool
    forward: Callable[[], Any]
    both: Callable[[], Any]


def available() -> bool:
    """Whether flash-linear-attention is installed and PyTorch sees a GPU."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "fla")):
        return False
    return importlib.import_module("torch").cuda.is_available()


def peers(op: str, arrays: dict[str, Any], chunk_size: int) -> dict[str, Peer]:
    """The kernels for an op, on arrays named as our op names them."""
    torch = importlib.import_module("torch")

    def tensor(array: Any) -> Any:
        """A leaf on the GPU with the values and the type of a JAX array."""
        values = torch.from_numpy(np.asarray(array, np.float32).copy())
        return values.to("cuda", getattr(torch, str(array.dtype))).requires_grad_()

    tensors = {name: tensor(array) for name, array in arrays.items()}

    def forward(name: str) -> Any:
        with torch.no_grad():
            y = call(name, tensors, chunk_size)
        torch.cuda.synchronize()
        return y

    def both(name: str) -> None:
        y = call(name, tensors, chunk_size)
        torch.autograd.grad(y.sum(), list(tensors.values()), allow_unused=True)
        torch.cuda.synchronize()

    def peer(name: str, same: bool) -> Peer:
        return Peer(same, lambda: forward(name), lambda: both(name))

    return {f"fla.ops.{n}": peer(n, same) for n, same in PEERS.get(op, {}).items()}


def call(peer: str, named: dict[str, Any], chunk_size: int) -> Any:
    """One kernel's output [B, T, H, V]."""
    module, name = peer.rsplit(".", 1)
    function = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    q, k, v = named["q"], named["k"], named["v"]
    if name == "chunk_gsa":
        g, slots = named["g"], named["alpha"]
        # Trellis has one gate a head; GSA one a slot.
        g = g if g.ndim == 4 else g[..., None].expand_as(slots)
        return function(q, k, v, slots, g, scale=1.0)[0]
    if name == "fused_chunk_ttt_linear":
        torch = importlib.import_module("torch")
        scale = torch.ones(q.shape[2:], device=q.device, dtype=q.dtype)
        eta = named["eta"] if "eta" in named else named["gamma"]
        options = {"chunk_size": chunk_size, "scale": 1.0}
        offset = torch.zeros_like(scale)
        return function(q, k, v, scale, offset, eta[..., None], **options)[0]
    if name == "chunk_linear_attn":
        return function(q, k, v, scale=1.0, normalize=False)[0]
    if "delta_rule" in name:
        gates = {"g": named["g"]} if "gated" in name else {}
        return function(q, k, v, beta=named["beta"], scale=1.0, **gates)[0]
    g = named["g"] if "g" in named else -named["gamma"]
    if "simple" not in name and g.ndim == 3:
        # Lattice has one rate a head; GLA a gate for every channel.
        g = g[..., None].expand_as(k)
    gate = "gk" if name == "fused_recurrent_gla" else "g"
    return function(q, k, v, scale=1.0, **{gate: g})[0]
