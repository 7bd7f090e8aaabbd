"""The torch baseline of M+: the program that its authors released.

The program is not part of this project. `git clone` it from
https://github.com/wangyu-ustc/MemoryLLM and install its requirements (transformers
4.48.2, peft 0.10.0, PyTorch). Its two kinds of attention that run on a CPU return fewer
values than its layers unpack, so the file fails as it stands. The missing values are
filled with None here; nothing else is changed.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

from experiments.hmt.speed.implementations import llama_config
from experiments.hmt.speed.operations import Shape

FILE = "modeling_mplus.py"
# The linear maps that LoRA adapts.
ADAPTED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
# What its attention classes leave out, of the five values that a layer takes.
MISSING = {"LlamaAttention": 1, "LlamaSdpaAttention": 2}


def program(checkout: pathlib.Path) -> Any:
    """Its module, whose attention runs on a CPU."""
    spec = importlib.util.spec_from_file_location("modeling_mplus", checkout / FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name, count in MISSING.items():
        attention = getattr(module, name)
        attention.forward = _completed(attention.forward, count)
    return module


def _completed(forward: Callable[..., tuple[Any, ...]], missing: int) -> Any:
    return lambda *given, **named: (*forward(*given, **named), *[None] * missing)


def build(
    checkout: pathlib.Path,
    attention: Literal["eager", "sdpa"],
    shape: Shape,
    memory: Any,
    held: int,
) -> Any:
    """Its model of those sizes, with `held` random rows in every layer's store.

    Args:
        checkout: the program's folder.
        attention: "eager" is the program's own, "sdpa" PyTorch's fused one.
        shape: of the backbone.
        memory: an `implementations.Memory`.
        held: each merge takes the oldest of them; a store that is empty grows.
    """
    lora = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "inference_mode": False}
    merging = memory.merging(held)
    blocks = memory.retrieved // memory.tokens
    # Its own settings ride in the backbone's.
    config = llama_config(
        shape,
        attn_implementation=attention,
        num_tokens=memory.tokens,
        num_ltm_blocks=blocks,
        num_blocks=memory.pool // memory.tokens + blocks,
        drop_memory_per_layer=True,
        add_bos_embedding=True,
        add_decoder_lora=True,
        lora_config=lora | {"target_modules": list(ADAPTED)},
        update_ltm_mode="immediate",
        update_ltm_frequency=memory.merge_every,
        initial_rf_when_moving_stm_to_ltm=merging.first_recalls,
        decay_frequency=1.0,
        ltm_initial_size=held,
        add_selector=True,
        add_encoder_retriever=True,
        num_selector_layers=2,
        selector_hidden_dim=memory.key_dim,
        map_from_hidden_states=True,
    )
    model = program(checkout).MPlus(config).eval()
    model.put_ltm_to_numpy()
    for layer in range(shape.layers):
        model.ltm_ages[layer] = merging.ages.copy()
        model.ltm_recall_frequencies[layer] = merging.recalls.copy()
    return model
