"""Names and layouts of M+'s weights in checkpoints of the official program.

    model.layers.{l}.self_attn.{q,k,v}_proj, .mlp.{gate,up,down}_proj:
        .base_layer.weight  the backbone's, whose other tensors Hugging Face names
        .lora_{A,B}.default.weight, .lora_{A,B}.decoder_adapter.weight
                            the adapters that write and read
    model.layers.{l}.self_attn.{query,key,encoder_query}_proj.{0,2}.weight
    bos_embedding [L, 1, D], new_memory_positional_emb [1, 1, D]
    memory [L, N, D]        the pool that texts start from
    initialized [], uint8   MemoryLLM's: 0 if it was never written, and is not read
    ltm.{l} [n, D], ltm_keys.{l} [n, d], ltm_ages.{l} [n],
    ltm_recall_frequencies.{l} [n]
                            the long-term store that they start from

Wang et al. (2025), https://arxiv.org/abs/2502.00592. MemoryLLM has neither store nor
retriever.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memjax.models.checkpoints.hf.tensor import Tensor, to_stored
from memjax.models.lora import LowRank
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.retriever import Retriever
from memjax.models.mplus.state import Initial
from memjax.models.mplus.weights import MPlusWeights

POOL = "memory"
WRITTEN = "initialized"
STORE = ("ltm", "ltm_keys", "ltm_recall_frequencies", "ltm_ages")
WRITER, READER = "default", "decoder_adapter"
ADAPTERS = ("write_adapter", "read_adapter")
RETRIEVERS = {
    "query": "query_proj",
    "key": "key_proj",
    "encoder_query": "encoder_query_proj",
}
#: Targets of the adapters, as `lora_config.target_modules` lists them.
PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def of_backbone(name: str) -> str:
    """A backbone's tensor in the program: adapted matrices are one level deeper."""
    stem, _, kind = name.rpartition(".")
    # Adapted matrices are inside a wrapper, one level deeper.
    adapted = stem.endswith(tuple(PROJECTIONS.values()))
    return f"{stem}.base_layer.{kind}" if adapted else name


def belongs_to_store(name: str) -> bool:
    """Whether a tensor is of the long-term store or its retriever."""
    parts = name.split(".")
    return parts[0] in STORE or not {*parts}.isdisjoint(RETRIEVERS.values())


def learned(weights: MPlusWeights) -> dict[str, Any]:
    """Trained parameters, layer by layer; `of_learned` names them."""
    values: dict[str, Any] = {name: getattr(weights, name) for name in ADAPTERS}
    values["bos"] = weights.bos[:, None]
    # The program has an axis for the batch, of size 1.
    values["position"] = weights.position[None, None]
    if weights.config.has_retriever:
        for name in RETRIEVERS:
            whole = getattr(weights, name)
            # The program has a module a layer, where ours is one stack of all.
            values[name] = [Retriever(*pair) for pair in zip(*whole, strict=True)]
    return values


def with_learned(weights: MPlusWeights, values: Mapping[str, Any]) -> MPlusWeights:
    """The weights with these learned parameters."""
    retrievers = {
        name: jax.tree.map(lambda *layers: jnp.stack(layers), *values[name])
        for name in RETRIEVERS
        if name in values
    }
    return weights._replace(
        **{name: values[name] for name in ADAPTERS},
        **retrievers,
        bos=values["bos"][:, 0],
        position=values["position"][0, 0],
    )


def of_learned(values: Mapping[str, Any], reader: str = READER) -> list[Tensor]:
    """The tensor of each leaf of `learned`, in their order.

    Args:
        values: what `learned` gives, or its shapes.
        reader: name of the adapter that reads.
    """

    # Any, because they take the place of parameters.
    def into(name) -> Any:
        return Tensor(f"model.layers.{name}.weight", "into")

    def change(layer, target, adapter):
        at = f"{layer}.{PROJECTIONS[target]}"
        return LowRank(into(f"{at}.lora_A.{adapter}"), into(f"{at}.lora_B.{adapter}"))

    def both(layer, name):
        at = f"{layer}.self_attn.{name}"
        return Retriever(into(f"{at}.0"), into(f"{at}.2"))

    names: dict[str, Any] = {
        "bos": Tensor("bos_embedding"),
        "position": Tensor("new_memory_positional_emb"),
    }
    for ours, theirs in zip(ADAPTERS, (WRITER, reader), strict=True):
        names[ours] = tuple(
            {
                place: {target: change(layer, target, theirs) for target in changes}
                for place, changes in pair.items()
            }
            for layer, pair in enumerate(values[ours])
        )
    for ours, theirs in RETRIEVERS.items():
        if ours in values:
            names[ours] = [both(layer, theirs) for layer in range(len(values[ours]))]
    return jax.tree.leaves(names, is_leaf=lambda node: isinstance(node, Tensor))


def memory_shapes(
    config: MPlusConfig, layers: int, width: int, rows: int
) -> dict[str, tuple[int, ...]]:
    """Of the memory that texts start from, with `rows` in each layer's store."""
    shapes = {POOL: (layers, config.pool_size, width)}
    if config.num_retrieved and rows:
        ends = ((width,), (config.key_dim,), (), ())
        for name, end in zip(STORE, ends, strict=True):
            shapes |= {f"{name}.{layer}": (rows, *end) for layer in range(layers)}
    return shapes


def of_memory(initial: Initial) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of the memory that texts start from."""
    yield POOL, np.asarray(initial.pool.get_value())
    parts = (initial.rows, initial.keys, initial.recalls, initial.born)
    rows, keys, recalls, born = (
        None if part is None else np.asarray(part.get_value()) for part in parts
    )
    if rows is None or keys is None or recalls is None or born is None:
        return
    # The program keeps one copy a layer.
    recalls = np.broadcast_to(recalls, born.shape)
    for name, whole in zip(STORE, (rows, keys, recalls, -born), strict=True):
        yield from ((f"{name}.{layer}", value) for layer, value in enumerate(whole))


def learned_tensors(weights: MPlusWeights) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values of trained parameters."""
    values = learned(weights)
    pairs = zip(of_learned(values), jax.tree.leaves(values), strict=True)
    for tensor, value in pairs:
        yield tensor.name, to_stored(np.asarray(value), tensor.layout)
