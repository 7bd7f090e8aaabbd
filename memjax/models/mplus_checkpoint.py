"""M+ and MemoryLLM in and out of files, under the official program's names.

    model.layers.{l}.self_attn.{q,k,v}_proj, .mlp.{gate,up,down}_proj:
        .base_layer.weight  the backbone's, whose other tensors Hugging Face names
        .lora_{A,B}.default.weight, .lora_{A,B}.decoder_adapter.weight
                            the adapters that write and read
    model.layers.{l}.self_attn.{query,key,encoder_query}_proj.{0,2}.weight
    bos_embedding [L, 1, D], new_memory_positional_emb [1, 1, D]
    memory [L, N, D]        the pool that texts start from
    ltm.{l} [n, D], ltm_keys.{l} [n, d], ltm_recall_frequencies.{l} [n], ltm_ages.{l} [n]
                            the long-term store that they start from

The program is that of Wang et al. (2025), https://arxiv.org/abs/2502.00592. MemoryLLM
has neither store nor retriever.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from memjax.models import own_format, tensor_names
from memjax.models.config import ModelConfig
from memjax.models.families import from_hf_config
from memjax.models.language_model import LanguageModel
from memjax.models.lora import Frozen, LowRank
from memjax.models.mplus import Initial, MPlus, mplus
from memjax.models.mplus_state import MPlusConfig
from memjax.models.retriever import Retriever
from memjax.models.safetensors_folder import SafetensorsFile, SafetensorsFolder
from memjax.models.tensor_names import Tensor

BOS, POSITION, POOL = "bos_embedding", "new_memory_positional_emb", "memory"
STORE = ("ltm", "ltm_keys", "ltm_recall_frequencies", "ltm_ages")
ADAPTERS = {"write_adapter": "default", "read_adapter": "decoder_adapter"}
RETRIEVERS = {
    "query": "query_proj",
    "key": "key_proj",
    "encoder_query": "encoder_query_proj",
}
PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}

Shapes = Mapping[str, tuple[int, ...]]
Get = Callable[[str], Float32[np.ndarray, "..."]]


def load_official(
    path: Path | str,
    hf_config: Mapping[str, Any] | None = None,
    config: MPlusConfig | None = None,
) -> MPlus:
    """Reads a checkpoint of the official program; nothing in it is executed.

    Args:
        path: a folder of `config.json` and safetensors, or one safetensors file.
        hf_config: what `config.json` holds, of Llama's kind if it does not say; None is
            the folder's.
        config: the memory; None is `mplus_config_from_hf`. With retrieved=0 store and
            retriever of the checkpoint are passed over.

    Raises:
        ValueError: listing every tensor that is missing, unknown or of another shape;
            on a file without hf_config; as `mplus_config_from_hf` and `mplus`.
    """
    path = Path(path)
    if path.is_dir():
        found = SafetensorsFolder(path)
        hf_config = found.config if hf_config is None else hf_config
    else:
        found = SafetensorsFile(path)
    if hf_config is None:
        raise ValueError(f"{path} is a file and says nothing of its model: hf_config")
    hf_config = {"model_type": "llama"} | dict(hf_config)
    config = mplus_config_from_hf(hf_config) if config is None else config
    return _build(hf_config, config, found.shapes, found.get, str(path))


def mplus_config_from_hf(described: Mapping[str, Any]) -> MPlusConfig:
    """The memory that an official `config.json` describes, with memjax's semantics.

    The store has room for all that the program keeps at a time.

    Raises:
        ValueError: naming the key, if one is missing or not a number.
    """
    size = lambda key: _number(described, key, int)
    lora = described.get("lora_config")
    if not isinstance(lora, Mapping):
        raise ValueError(f"lora_config must be an object, got {lora!r}")
    tokens, long = size("num_tokens"), _number(described, "num_ltm_blocks", int, 0)
    common = dict(
        tokens=tokens,
        pool=(size("num_blocks") - long) * tokens,
        chunk=max(MPlusConfig.chunk, tokens),
        retrieved=long * tokens,
        rank=_number(lora, "r", int),
        alpha=float(_number(lora, "lora_alpha", float)),
    )
    if not long:
        return MPlusConfig(**common)
    recalls = _number(described, "initial_rf_when_moving_stm_to_ltm", float)
    decay = _number(described, "decay_frequency", float)
    every = size("update_ltm_frequency")
    if min(recalls, decay, every) <= 0:
        raise ValueError(
            "initial_rf_when_moving_stm_to_ltm, decay_frequency and "
            f"update_ltm_frequency must be positive, got {recalls}, {decay}, {every}"
        )
    batch = every * tokens
    start = _number(described, "ltm_initial_size", int, 0)
    return MPlusConfig(
        **common,
        store=max(-int(-recalls // decay) * batch, start + batch, long * tokens + 2 * batch),
        key_dim=size("selector_hidden_dim"),
        merge_every=every,
        recalls=recalls,
        decay=decay,
    )


def _number(described: Mapping[str, Any], key: str, kind: type, default: Any = None):
    value = described.get(key, default)
    if type(value) is int and kind is float:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def _build(
    described: Mapping[str, Any],
    config: MPlusConfig,
    shapes: Shapes,
    get: Get,
    where: str,
) -> MPlus:
    sizes = from_hf_config(described)
    plain = tensor_names.parameter_shapes(sizes)
    begin = lambda: LanguageModel(sizes, key=jax.random.key(0))
    learned = jax.eval_shape(
        lambda: _learned(mplus(begin(), config, key=jax.random.key(0)))
    )
    tensors = _tensors(_names(learned))
    expected = {_official(name): shape for name, shape in plain.items()}
    expected |= {
        tensor.name: tensor_names.stored_shape(tensor.layout, leaf.shape)
        for tensor, leaf in zip(tensors, jax.tree.leaves(learned), strict=True)
    }
    expected |= _memory_shapes(config, sizes, shapes)
    found = {
        name: shape
        for name, shape in shapes.items()
        if tensor_names.is_parameter(sizes, name) and not _passed_over(config, name)
    }
    own_format.require_tensors(expected, found, where)
    backbone = tensor_names.parameters_from_tensors(
        sizes, plain, lambda name: get(_official(name)), where
    )
    model = mplus(backbone, config, key=jax.random.key(0))
    values = [
        jnp.asarray(tensor_names.from_stored(get(t.name), t.layout, leaf.shape))
        for t, leaf in zip(tensors, jax.tree.leaves(learned), strict=True)
    ]
    _fill(model, jax.tree.unflatten(jax.tree.structure(learned), values))
    model.initial = _initial(config, len(sizes.mixers), get, where)
    return model


def _learned(model: MPlus) -> dict[str, Any]:
    """What is trained, layer by layer, shaped as in the file but for the layouts."""
    values: dict[str, Any] = {name: getattr(model, name).get_value() for name in ADAPTERS}
    values["bos"] = model.bos.get_value()[:, None]
    values["position"] = model.position.get_value()[None, None]
    if model.config.retrieved:
        for name in RETRIEVERS:
            whole = getattr(model, name).get_value()
            values[name] = [Retriever(*pair) for pair in zip(*whole, strict=True)]
    return values


def _fill(model: MPlus, values: Mapping[str, Any]) -> None:
    """Sets what `_learned` gave."""
    for name in ADAPTERS:
        getattr(model, name).set_value(values[name])
    model.bos.set_value(values["bos"][:, 0])
    model.position.set_value(values["position"][0, 0])
    if model.config.retrieved:
        for name in RETRIEVERS:
            whole = jax.tree.map(lambda *layers: jnp.stack(layers), *values[name])
            getattr(model, name).set_value(whole)


def _names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tensor of each leaf of what `_learned` gives."""

    # Any, because they stand where the parameters will.
    def into(name) -> Any:
        return Tensor(f"model.layers.{name}.weight", "into")

    def change(layer, target, adapter):
        at = f"{layer}.{PROJECTIONS[target]}"
        return LowRank(into(f"{at}.lora_A.{adapter}"), into(f"{at}.lora_B.{adapter}"))

    def both(layer, name):
        at = f"{layer}.self_attn.{name}"
        return Retriever(into(f"{at}.0"), into(f"{at}.2"))

    names: dict[str, Any] = {"bos": Tensor(BOS), "position": Tensor(POSITION)}
    for ours, theirs in ADAPTERS.items():
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
    return names


def _tensors(names: Any) -> list[Tensor]:
    return jax.tree.leaves(names, is_leaf=lambda node: isinstance(node, Tensor))


def _official(name: str) -> str:
    """A backbone's tensor in the program: adapted matrices lie one level deeper."""
    stem, dot, kind = name.rpartition(".")
    adapted = stem.endswith(tuple(PROJECTIONS.values()))
    return f"{stem}.base_layer.{kind}" if adapted else name


def _passed_over(config: MPlusConfig, name: str) -> bool:
    """Whether a tensor belongs to the store or the retriever, and neither is wanted."""
    parts = name.split(".")
    return not config.retrieved and (
        parts[0] in STORE or bool({*parts} & {*RETRIEVERS.values()})
    )


def _memory_shapes(
    config: MPlusConfig, sizes: ModelConfig, shapes: Shapes
) -> dict[str, tuple[int, ...]]:
    """Of the memory that texts start from; the store's layers are as long as the first."""
    layers, width = len(sizes.mixers), sizes.model_dim
    found = {POOL: (layers, config.pool, width)}
    if config.retrieved:
        count = next(iter(shapes.get("ltm.0", ())), 1)
        ends = zip(STORE, ((width,), (config.key_dim,), (), ()), strict=True)
        for name, end in ends:
            found |= {f"{name}.{layer}": (count, *end) for layer in range(layers)}
    return found


def _initial(config: MPlusConfig, layers: int, get: Get, where: str) -> Initial:
    pool = Frozen(jnp.asarray(get(POOL)))
    if not config.retrieved:
        return Initial(pool)
    each = lambda name: np.stack([get(f"{name}.{layer}") for layer in range(layers)])
    rows, keys, recalls, ages = map(each, STORE)
    if rows.shape[1] > config.store:
        raise ValueError(
            f"store must hold the {rows.shape[1]} rows of {where}, got {config.store}"
        )
    if np.any(recalls != recalls[0]):
        raise ValueError(f"{where}: ltm_recall_frequencies must be alike in all layers")
    if np.any((ages != np.round(ages)) | (ages < 0) | (ages >= 2**24)):
        raise ValueError(f"{where}: ltm_ages must be whole numbers in [0, 2^24)")
    return Initial(
        pool,
        *map(Frozen, map(jnp.asarray, (rows, keys, -ages.astype(np.int32), recalls[0]))),
    )
