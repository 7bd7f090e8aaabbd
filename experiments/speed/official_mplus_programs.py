"""M+ by memjax and by its authors, with random weights and a filled store."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, PyTree

from experiments.speed.shapes import Shape, backbone, llama_config
from memjax.models import MPlusConfig, add_mplus
from memjax.models.mplus.read import ReadOptions
from memjax.models.mplus.state import LayerStore, MPlusState

FILE = "modeling_mplus.py"
#: The linear maps that LoRA adapts.
ADAPTED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
#: How many of the five values that a layer takes its attention classes leave out.
MISSING = {"LlamaAttention": 1, "LlamaSdpaAttention": 2}


class Memory(NamedTuple):
    """Sizes of a memory in rows, by default the paper's.

    `tokens` memory tokens summarise a `chunk`; `store` includes the rows dropped since
    the last merge, of which the authors' program has one every `merge_every` updates.
    """

    tokens: int = 256
    chunk: int = 512
    pool: int = 10_240
    retrieved: int = 2_560
    store: int = 153_600
    key_dim: int = 256
    merge_every: int = 60

    @property
    def config(self) -> MPlusConfig:
        """Ours, with as many rows."""
        return MPlusConfig(
            num_memory_tokens=self.tokens,
            chunk_size=self.chunk,
            pool_size=self.pool,
            num_retrieved=self.retrieved,
            store_size=self.store,
            key_dim=self.key_dim,
        )


class Subject(NamedTuple):
    """Timed functions: they inject whole chunks [1, T], and read [1, T] after them."""

    inject: Callable[[np.ndarray], Any]
    read: Callable[[np.ndarray], Any]


def filled(state: MPlusState, held: int) -> MPlusState:
    """The state of one text, its pool full and `held` rows in its store, all random."""
    random = np.random.default_rng(0)
    store, rows = state.store, state.pool.shape[2]
    assert store is not None

    def normal(x: Array) -> Array:
        return jnp.asarray(random.standard_normal(x.shape, np.float32))

    def layer(old: LayerStore) -> LayerStore:
        # Every layer has its own, so that all can be donated.
        born = jnp.arange(old.born.shape[1], dtype=jnp.int32)[None] - (held + rows - 1)
        new = LayerStore(normal(old.rows), normal(old.keys), born)
        # Or the peak of the memory would be that of both.
        jax.tree.map(lambda x: x.delete(), old)
        return new

    ages = jnp.arange(rows - 1, -1, -1, dtype=jnp.int32)[None, None]
    return state._replace(
        pool=normal(state.pool),
        ages=jnp.broadcast_to(ages, state.ages.shape),
        num_valid=jnp.full_like(state.num_valid, rows),
        store=store._replace(
            layers=tuple(map(layer, store.layers)),
            num_valid=jnp.full_like(store.num_valid, held),
        ),
    )


def ours(shape: Shape, memory: Memory, held: int) -> Subject:
    """Our model, `held` rows in its store; compiled at its first calls."""
    config = memory.config
    model = add_mplus(backbone(shape), config, key=jax.random.key(1))
    graph, params = nnx.split(model)
    state = filled(model.init_state(1), held)

    @jax.jit
    def read(params: PyTree, state: MPlusState, ids: Array) -> Array:
        # As in the authors' program, every token takes part in the search.
        options = ReadOptions(prompt_length=ids.shape[1])
        return nnx.merge(graph, params).read(state, ids, options)[1]

    def write(params: PyTree, state: MPlusState, ids: Array) -> MPlusState:
        return nnx.merge(graph, params).inject(state, ids)

    compiled = jax.jit(write, donate_argnums=1)

    def inject(ids: np.ndarray) -> None:
        nonlocal state
        state = jax.block_until_ready(compiled(params, state, jnp.asarray(ids)))

    return Subject(
        inject=inject,
        read=lambda ids: jax.block_until_ready(read(params, state, jnp.asarray(ids))),
    )


def merging(memory: Memory, held: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Frequency of recall at a merge, ages and frequencies of `held` rows.

    With these each merge of the peer drops the oldest, and the store stays as large.
    """
    batch = memory.merge_every * memory.tokens
    ages = np.arange(held)[::-1]
    merges = -(-held // batch)
    return merges + 1.0, ages + memory.pool, (merges - ages // batch).astype(float)


def authors(
    checkout: Path, attention: str, shape: Shape, memory: Memory, held: int
) -> Subject:
    """The authors' program, `held` rows in its store."""
    # Optional, and no other implementation's process should load it.
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    first_recalls, ages, recalls = merging(memory, held)
    lora = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "inference_mode": False}
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
        initial_rf_when_moving_stm_to_ltm=first_recalls,
        decay_frequency=1.0,
        ltm_initial_size=held,
        add_selector=True,
        add_encoder_retriever=True,
        num_selector_layers=2,
        selector_hidden_dim=memory.key_dim,
        map_from_hidden_states=True,
    )
    model = _program(checkout).MPlus(config).eval()
    model.put_ltm_to_numpy()
    for index in range(shape.layers):
        model.ltm_ages[index] = ages.copy()
        model.ltm_recall_frequencies[index] = recalls.copy()

    def inject(ids: np.ndarray) -> None:
        with torch.no_grad():
            for start in range(0, ids.shape[1], memory.chunk):
                chunk = torch.from_numpy(ids[:, start : start + memory.chunk]).long()
                model.inject_memory(chunk, update_memory=True)

    def read(ids: np.ndarray) -> None:
        with torch.no_grad():
            long = torch.from_numpy(ids).long()
            model(input_ids=long, use_cache=True, return_dict=True)

    return Subject(inject, read)


def _program(checkout: Path) -> Any:
    """The authors' module, with attention that runs on a CPU."""
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
    def completed(*given: Any, **named: Any) -> tuple[Any, ...]:
        return (*forward(*given, **named), *[None] * missing)

    return completed
