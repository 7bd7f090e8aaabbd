"""Load M+ and MemoryLLM, under the official program's names.

`load_mplus` reads what `MPlus.save` wrote, `load_official` a checkpoint of the
official program.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from memjax.config_io import from_record
from memjax.models.adapters import Frozen
from memjax.models.checkpoints import own_format, own_model
from memjax.models.checkpoints.hf import parameters, tensor, tensor_names
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.safetensors_file import SafetensorsFile
from memjax.models.checkpoints.hf.safetensors_folder import (
    SafetensorsFolder,
    require_no_pickle,
)
from memjax.models.language_model.config import Dtype, ModelConfig
from memjax.models.language_model.model import LanguageModel
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.checkpoints import tensor_names as mplus_names
from memjax.models.mplus.checkpoints.hf_config import mplus_config_from_hf
from memjax.models.mplus.checkpoints.saving import MODEL_TYPE, RECORD, require_official
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.state import Initial

# Tensors that are no floats.
FLAGS = {mplus_names.WRITTEN: "U8"}
# The program's ages are float32, which counts no further.
OLDEST = 2**24

Shapes = Mapping[str, tuple[int, ...]]
Get = Callable[[str], Float32[np.ndarray, "..."]]


class Source(NamedTuple):
    """A checkpoint: its configuration, tensors' shapes, their reader, and its name."""

    described: Mapping[str, Any]
    shapes: Shapes
    get: Get
    where: str


def load_official(
    path: Path | str,
    hf_config: Mapping[str, Any] | None = None,
    config: MPlusConfig | None = None,
    *,
    dtype: Dtype = "float32",
) -> MPlus:
    """Reads a checkpoint of the official program.

    Args:
        path: a folder of `config.json` and safetensors, or one safetensors file.
        hf_config: what `config.json` holds, of Llama's kind if it does not say; None is
            the folder's.
        config: the memory, with retrieval "learned" if there is a store; None is
            `mplus_config_from_hf`. With num_retrieved=0 store and retriever of the
            checkpoint are passed over.
        dtype: of the activations. RoPE's frequencies are float32 with any, where the
            program rounds them with its weights.

    Raises:
        ValueError: listing every tensor that is missing, unknown or of another shape;
            on a file without hf_config, a memory that was never written, a store larger
            than the config's, or ages and frequencies that are none; as
            `mplus_config_from_hf` and `add_mplus`.
    """
    path = Path(path)
    if path.is_dir():
        found = SafetensorsFolder(path, FLAGS)
        hf_config = found.config if hf_config is None else hf_config
    elif hf_config is None:
        raise ValueError(f"hf_config must be given: {path} is no folder that has one")
    else:
        require_no_pickle(path)
        found = SafetensorsFile(path, others=FLAGS)
    if hf_config.get("model_type", MODEL_TYPE) == MODEL_TYPE:
        # The program's own name for its class: the backbone inside is a Llama.
        hf_config = own_format.of_backbone(dict(hf_config) | {"model_type": "llama"})
    if not hf_config.get("map_from_hidden_states", True):
        raise ValueError(
            f"{path}: map_from_hidden_states must be true, as published, got "
            f"{hf_config['map_from_hidden_states']!r}"
        )
    if config is None:
        config = mplus_config_from_hf(hf_config, _start(found))
    # Without a second adapter the first reads as well.
    alone = hf_config.get("add_decoder_lora", True) is False
    reader = mplus_names.WRITER if alone else mplus_names.READER
    rows = next(iter(found.shapes.get("ltm.0", ())), 1)
    source = Source(hf_config, found.shapes, found.get, str(path))
    return _build(source, config, rows, reader, dtype)


def load_mplus(folder: Path | str, *, dtype: Dtype = "float32") -> MPlus:
    """Reads a folder of `MPlus.save`.

    Args:
        folder: of `config.json` and safetensors.
        dtype: of the activations.

    Raises:
        ValueError: as `load_official`, or if `MPlus.save` did not write the folder.
    """
    found = SafetensorsFolder(Path(folder), FLAGS)
    record = found.config.get(RECORD)
    if not isinstance(record, dict) or set(record) != {"config", "initial_rows"}:
        raise ValueError(
            f"{folder}: config.json must hold config and initial_rows under {RECORD}, "
            f"got {record!r}; load_official reads the program's checkpoints"
        )
    config: MPlusConfig = from_record(
        MPlusConfig, record["config"], f"{folder}: {RECORD}.config"
    )
    rows = record["initial_rows"]
    if rows is not None and (type(rows) is not int or rows < 0):
        raise ValueError(
            f"{folder}: {RECORD}.initial_rows must be null or at least 0, got {rows!r}"
        )
    described = own_format.of_backbone(found.config)
    source = Source(described, found.shapes, found.get, str(folder))
    return _build(source, config, rows, mplus_names.READER, dtype)


def _build(
    source: Source, config: MPlusConfig, rows: int | None, reader: str, dtype: Dtype
) -> MPlus:
    """The model, with an initial pool and `rows` in its store, or with neither."""
    require_official(config, source.where)
    sizes, plain, read_backbone = _backbone(source, dtype)

    # Shapes alone, to name every tensor that is wrong before one is read.
    def begin():
        return LanguageModel(sizes, key=jax.random.key(0))

    learned = jax.eval_shape(
        lambda: mplus_names.learned(
            add_mplus(begin(), config, key=jax.random.key(0)).weights
        )
    )
    tensors = mplus_names.of_learned(learned, reader)
    expected = {mplus_names.of_backbone(name): shape for name, shape in plain.items()}
    expected |= {
        named.name: tensor.stored_shape(named.layout, leaf.shape)
        for named, leaf in zip(tensors, jax.tree.leaves(learned), strict=True)
    }
    layers = sizes.num_layers
    if rows is not None:
        shapes = mplus_names.memory_shapes(config, layers, sizes.model_dim, rows)
        expected |= shapes
    if mplus_names.WRITTEN in source.shapes:
        expected[mplus_names.WRITTEN] = ()
    found = {
        name: shape
        for name, shape in source.shapes.items()
        if tensor_names.is_parameter(sizes, name)
        and (config.num_retrieved or not mplus_names.belongs_to_store(name))
    }
    own_format.require_tensors(expected, found, source.where)
    get = source.get
    start = add_mplus(read_backbone(), config, key=jax.random.key(0)).weights
    values = [
        own_model.on_device(tensor.from_stored(get(t.name), t.layout, leaf.shape))
        for t, leaf in zip(tensors, jax.tree.leaves(learned), strict=True)
    ]
    # Everything drawn with the key above is replaced by the checkpoint's values.
    weights = mplus_names.with_learned(
        start, jax.tree.unflatten(jax.tree.structure(learned), values)
    )
    if rows is None:
        return MPlus(weights)
    return MPlus(weights, _initial(source, config, layers, rows))


def _backbone(
    source: Source, dtype: Dtype
) -> tuple[ModelConfig, Shapes, Callable[[], LanguageModel]]:
    """Its sizes, the shapes of its tensors under their plain names, and its reader."""
    described, where = source.described, source.where

    def get(name):
        return source.get(mplus_names.of_backbone(name))

    if described.get("model_type") == own_format.MODEL_TYPE:
        sizes = own_model.read_config(described, dtype, where)
        plain = own_model.parameter_shapes(sizes)

        def read():
            return own_model.build_model(described, plain, get, dtype, where)
    else:
        sizes = from_hf_config(described, dtype)
        plain = parameters.parameter_shapes(sizes)

        def read():
            return parameters.parameters_from_tensors(sizes, plain, get, where)

    return sizes, plain, read


def _start(found: SafetensorsFile | SafetensorsFolder) -> Sequence[float] | None:
    """Frequencies of the rows that a checkpoint's store begins with, if it has any."""
    name = f"{mplus_names.STORE[2]}.0"
    # Tensors of wrong shapes are named later, all of them at once.
    if len(found.shapes.get(name, ())) != 1:
        return None
    recalls = found.get(name)
    return recalls.tolist() if np.all(np.isfinite(recalls)) else None


def _initial(source: Source, config: MPlusConfig, layers: int, rows: int) -> Initial:
    get, where = source.get, source.where
    if mplus_names.WRITTEN in source.shapes and not get(mplus_names.WRITTEN):
        raise ValueError(
            f"{where}: {mplus_names.WRITTEN} must not be 0: then "
            f"{mplus_names.POOL!r} was never written, and is noise"
        )
    pool = Frozen(own_model.on_device(get(mplus_names.POOL)))
    if not config.num_retrieved or not rows:
        return Initial(pool)
    if rows > config.store_size:
        raise ValueError(
            f"store_size must have room for the {rows} rows that {where} begins with, "
            f"got {config.store_size}"
        )

    def each(name):
        return np.stack([get(f"{name}.{layer}") for layer in range(layers)])

    vectors, keys, recalls, ages = map(each, mplus_names.STORE)
    # Our store has one frequency a row for all layers, as the program's are in fact.
    if not np.all((recalls == recalls[0]) & np.isfinite(recalls)):
        raise ValueError(
            f"{where}: ltm_recall_frequencies must be finite and alike in all layers"
        )
    if not np.all((ages == np.round(ages)) & (ages >= 0) & (ages < OLDEST)):
        raise ValueError(f"{where}: ltm_ages must be whole numbers in [0, {OLDEST})")
    least = config.min_store_size_from(recalls[0].tolist())
    if config.store_size < least:
        raise ValueError(
            f"store_size must be at least {least}, with the {rows} that {where} "
            f"begins with and their recall frequencies, got {config.store_size}"
        )
    return Initial(
        pool,
        rows=Frozen(jnp.asarray(vectors)),
        keys=Frozen(jnp.asarray(keys)),
        born=Frozen(jnp.asarray(-ages.astype(np.int32))),
        recalls=Frozen(jnp.asarray(recalls[0])),
    )
