"""Variants of a trained M+: another store, MemoryLLM, attention as the retriever.

Each has the same parameters, and is a new model.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.lab.measure import tree_bytes
from memjax.models.lora import Frozen
from memjax.models.mplus import write as mplus_writing
from memjax.models.mplus.model import MPlus


def with_store(model: MPlus, rows: int = 0, retrieved: int = 0) -> MPlus:
    """M+ of the same parameters with another store size or number retrieved.

    Args:
        model: with a store.
        rows: M, memory tokens in the store; 0 keeps the model's.
        retrieved: R, memory tokens of a read; 0 keeps the model's.

    Raises:
        ValueError: as `MPlusConfig`, or for a model without a store.
    """
    if not model.config.num_retrieved:
        raise ValueError(
            f"store={rows} and retrieved={retrieved} need a model with a store; it has "
            "none"
        )
    old = model.config
    return _with_config(
        model, store=rows or old.store_size, retrieved=retrieved or old.num_retrieved
    )


def without_store(model: MPlus) -> MPlus:
    """MemoryLLM of the same parameters, with the store's bytes added to the pool.

    The pool is the smallest that makes the state on the device as large as M+'s, whose
    store has its values on the host and its keys on the device. A pool that comes from
    a checkpoint keeps its size.
    """
    chunk, pool = model.config.num_memory_tokens, model.config.pool_size
    if model.initial is not None:
        return _with_config(model, num_retrieved=0)
    sized = lambda pool: _with_config(model, num_retrieved=0, pool_size=pool)
    least = device_bytes(sized(pool))
    each = device_bytes(sized(pool + chunk)) - least
    more = max(0, math.ceil((device_bytes(model) - least) / each))
    return sized(pool + more * chunk)


def with_attention_retrieval(model: MPlus) -> MPlus:
    """M+-Attn of the same parameters: attention scores replace the retriever.

    The store lies on the device, where every token searches it. Memory tokens that come
    from a checkpoint become keys and values.

    Raises:
        ValueError: if the model has no retriever, or the program's legacy store.
    """
    if not model.config.has_retriever:
        raise ValueError(
            "model must have a learned retriever, got "
            f"num_retrieved={model.config.num_retrieved}, "
            f"retrieval={model.config.retrieval!r}"
        )
    rebuilt = _with_config(
        model,
        retrieval="attention",
        retrieval_source="prefix",
        store_memory="device",
    )
    initial = rebuilt.initial
    if initial is not None and initial.rows is not None and initial.born is not None:
        rows, born = initial.rows.get_value(), initial.born.get_value()
        layers = [
            mplus_writing.stored(rebuilt.weights, i, rows[i][None], born[i][None])
            for i in range(rebuilt.layers)
        ]
        keep = lambda parts: Frozen(jnp.concatenate(parts))
        values, keys = keep([x.rows for x in layers]), keep([x.keys for x in layers])
        return MPlus(rebuilt.weights, initial._replace(rows=values, keys=keys))
    return rebuilt


def _with_config(model, **changes):
    return model.replace(config=dataclasses.replace(model.config, **changes))


class KeptBytes(NamedTuple):
    """Bytes of one batch element's memory between two tokens, by where they lie."""

    device: int
    host: int

    @property
    def total(self) -> int:
        """Of both: memory on the host is not free."""
        return self.device + self.host


def kept_bytes(model: MPlus) -> KeptBytes:
    """What M+ or MemoryLLM keeps of one batch element.

    The rows of the long-term store lie on the host; their keys are searched on the
    device. With attention retrieval all of the store is on the device.
    """
    state = jax.eval_shape(lambda: model.init_state(1))
    by_attention, store = model.config.by_attention, state.store
    rows = [] if store is None or by_attention else [x.rows for x in store.layers]
    host = tree_bytes(rows)
    return KeptBytes(tree_bytes(state) - host, host)


def device_bytes(model: MPlus) -> int:
    """Bytes of one batch element's memory that a read needs on the device."""
    return kept_bytes(model).device
