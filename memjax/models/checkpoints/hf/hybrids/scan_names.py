"""Names of the tensors of convolutions and elementwise scans of published models."""

from typing import Any

import numpy as np

from memjax.models.checkpoints.hf.tensor import Piece, Tensor


def short_conv(config: Any, at: str) -> dict[str, Any]:
    """Of LFM2: gate of the input, gate of the output, and values, in one matrix."""
    matrices = _rows(f"{at}.in_proj.weight", 3, config.model_dim)
    found = dict(zip(("input_gate", "gate", "value"), matrices, strict=True))
    return {ours: Tensor("", "into", (piece,)) for ours, piece in found.items()} | {
        "filters": Tensor(f"{at}.conv.weight", "taps"),
        "output": Tensor(f"{at}.out_proj.weight", "into"),
    }


def mamba(config: Any, at: str) -> dict[str, Any]:
    """Of Mamba and Falcon Mamba: values and gate in one matrix."""
    found = {
        "filters": Tensor(f"{at}.conv1d.weight", "taps"),
        "selection": Tensor(f"{at}.x_proj.weight", "into"),
        "pace": Tensor(f"{at}.dt_proj.weight", "into"),
        "pace_bias": Tensor(f"{at}.dt_proj.bias"),
        "log_rate": Tensor(f"{at}.A_log", "into"),
        "skip": Tensor(f"{at}.D"),
        "output": Tensor(f"{at}.out_proj.weight", "into"),
    }
    for ours, piece in zip(
        ("value", "gate"),
        _rows(f"{at}.in_proj.weight", 2, config.inner_dim),
        strict=True,
    ):
        found[ours] = Tensor("", "into", (piece,))
        if config.bias:
            bias = piece._replace(name=f"{at}.in_proj.bias")
            found[f"{ours}_bias"] = Tensor("", "flat", (bias,))
    if config.bias:
        found["output_bias"] = Tensor(f"{at}.out_proj.bias")
    if config.conv_bias:
        found["filter_bias"] = Tensor(f"{at}.conv1d.bias")
    return found


def rg_lru(config: Any, at: str) -> dict[str, Any]:
    """Of RecurrentGemma."""
    found = {
        "filters": Tensor(f"{at}.conv_1d.weight", "taps"),
        "filter_bias": Tensor(f"{at}.conv_1d.bias"),
        "decay": Tensor(f"{at}.rg_lru.recurrent_param"),
    }
    for ours, theirs in (("value", "x"), ("gate", "y"), ("output", "out")):
        found[ours] = Tensor(f"{at}.linear_{theirs}.weight", "into")
        found[f"{ours}_bias"] = Tensor(f"{at}.linear_{theirs}.bias")
    for gate in ("input", "recurrent"):
        found[f"{gate}_gate"] = Tensor(f"{at}.rg_lru.{gate}_gate_weight")
        found[f"{gate}_bias"] = Tensor(f"{at}.rg_lru.{gate}_gate_bias")
    return found


def _rows(name: str, parts: int, width: int) -> list[Piece]:
    """Equal parts of a tensor's rows, first to last."""
    rows = np.split(np.arange(parts * width), parts)
    return [Piece(name, part, parts * width) for part in rows]
