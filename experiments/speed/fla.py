"""Kernels of flash-linear-attention on the arrays of our ops.

They need PyTorch, Triton and a GPU. Its kernels of GLA and GSA tune themselves for
longer than a GPU was lent to us, and its TTT does not compile.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

#: Functions of fla that compute the same, by our op.
PEERS: dict[str, tuple[str, ...]] = {
    "linear_attention": ("linear_attn.chunk_linear_attn",),
    "ssd": ("simple_gla.chunk_simple_gla",),
    "delta_rule": (
        "delta_rule.chunk_delta_rule",
        "delta_rule.fused_recurrent_delta_rule",
    ),
    "gated_delta_rule": (
        "gated_delta_rule.chunk_gated_delta_rule",
        "gated_delta_rule.fused_recurrent_gated_delta_rule",
    ),
}


def peers(op: str, arrays: dict[str, Any]) -> dict[str, dict[str, Callable[[], Any]]]:
    """Passes of the kernels for an op that run here, on arrays by our op's names."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "fla")):
        return {}
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {}

    def tensor(array: Any) -> Any:
        """A leaf on the GPU with the values and the type of a JAX array."""
        values = torch.from_numpy(np.asarray(array, np.float32).copy())
        return values.to("cuda", getattr(torch, str(array.dtype))).requires_grad_()

    tensors = {name: tensor(array) for name, array in arrays.items()}
    options = {"normalize": False} if op == "linear_attention" else {}

    def peer(path: str) -> dict[str, Callable[[], Any]]:
        module, name = path.rsplit(".", 1)
        function = getattr(importlib.import_module(f"fla.ops.{module}"), name)

        def forward() -> Any:
            with torch.no_grad():
                y = function(**tensors, scale=1.0, **options)[0]
            torch.cuda.synchronize()
            return y

        def both() -> None:
            y = function(**tensors, scale=1.0, **options)[0]
            torch.autograd.grad(y.sum(), list(tensors.values()), allow_unused=True)
            torch.cuda.synchronize()

        return {"forward": forward, "both": both}

    return {f"fla.ops.{path}": peer(path) for path in PEERS.get(op, ())}
