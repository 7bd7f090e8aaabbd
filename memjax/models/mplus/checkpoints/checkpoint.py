"""M+ and MemoryLLM in and out of files, under the official program's names.

`mplus_names` lists them. What `save_mplus` writes is read by `load_mplus` and, by its
names and `config.json`, by the program; what the program wrote by `load_official`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float32

from memjax.config_io import from_record, to_record
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.hf import tensor_names
from memjax.models.checkpoints.hf.config import from_hf_config
from memjax.models.checkpoints.hf.export import to_hf_config
from memjax.models.checkpoints.hf.safetensors_file import SafetensorsFile
from memjax.models.checkpoints.hf.safetensors_folder import (
    SafetensorsFolder,
    require_no_pickle,
)
from memjax.models.checkpoints.hf.safetensors_write import write_folder
from memjax.models.checkpoints.text_interface import TextInterface
from memjax.models.language_model.config import Dtype, ModelConfig
from memjax.models.language_model.model import LanguageModel
from memjax.models.lora import Frozen, merge_lora
from memjax.models.mplus.build import add_mplus
from memjax.models.mplus.checkpoints import tensor_names as mplus_names
from memjax.models.mplus.checkpoints.hf_config import describe, mplus_config_from_hf
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.model import MPlus
from memjax.models.mplus.state import Initial

#: The program's name for its class.
MODEL_TYPE = "memoryllm"
#: Where `config.json` keeps the `MPlusConfig`, beside what the program reads.
RECORD = "memjax_mplus"
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
    """Reads what `save_mplus` wrote.

    Args:
        folder: of `config.json` and safetensors.
        dtype: of the activations.

    Raises:
        ValueError: as `load_official`, or if `save_mplus` did not write the folder.
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


def save_mplus(
    model: MPlus,
    folder: Path | str,
    text: TextInterface | None = None,
    *,
    origin: str = "",
    readme: str | None = None,
    dtype: Dtype = "float32",
) -> None:
    """Writes a folder that `load_mplus` and, by its names, the official program read.

    The model_type is "memoryllm", the program's own, which transformers refuses.

    Args:
        model: M+ or MemoryLLM; what was injected is in its state, see `memory_state`.
        folder: must not exist, or be empty; it appears whole or not at all.
        text: tokenizer, chat template, and how to draw; None is none.
        origin: the model that the backbone was.
        readme: the model card; None is none.
        dtype: of the saved numbers.

    The program's R is a multiple of K, and rounded up for it where ours is none.

    Raises:
        ValueError: if the folder holds something, dtype cannot hold the initial
            store's ages, or attention finds the rows of the store, which no model of
            the program's does.
    """
    _require_the_programs(model.config, str(folder))
    backbone, initial = merge_lora(model.backbone), model.initial
    born = None if initial is None else initial.born
    rows = None if initial is None else 0
    if born is not None:
        ages = -np.asarray(born.get_value())
        rows = ages.shape[1]
        # Ages are stored among the floats, and bfloat16 counts to 256 only.
        if dtype == "bfloat16" and np.any(ages.astype(ml_dtypes.bfloat16) != ages):
            raise ValueError(
                "dtype must be 'float32' to hold the initial store's ages of up to "
                f"{ages.max()}, got {dtype!r}"
            )
    try:
        described = to_hf_config(backbone.config)
        tensors = tensor_names.tensors_from_parameters(backbone)
    except ValueError:
        described = own_format.to_config(backbone)
        tensors = own_format.named_tensors(backbone)
    record = {"config": to_record(model.config), "initial_rows": rows}
    memory = describe(model.config, rows or 0) | {RECORD: record}
    described = own_format.around_backbone(described, MODEL_TYPE, memory, origin)
    named, files = _named(model, tensors), (text or TextInterface()).files(readme)
    write_folder(Path(folder), described, named, files, dtype=dtype)


def _named(
    model: MPlus, backbone: Iterator[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in backbone:
        yield mplus_names.of_backbone(name), value
    yield from mplus_names.learned_tensors(model.weights)
    if model.initial is not None:
        yield from mplus_names.of_memory(model.initial)
        if not model.config.num_retrieved:
            # Without it MemoryLLM would not read its pool.
            yield mplus_names.WRITTEN, np.ones((), np.uint8)


def _build(
    source: Source, config: MPlusConfig, rows: int | None, reader: str, dtype: Dtype
) -> MPlus:
    """The model, with an initial pool and `rows` in its store, or with neither."""
    _require_the_programs(config, source.where)
    sizes, plain, read_backbone = _backbone(source, dtype)
    # Shapes alone, to name every tensor that is wrong before one is read.
    begin = lambda: LanguageModel(sizes, key=jax.random.key(0))
    learned = jax.eval_shape(
        lambda: mplus_names.learned(
            add_mplus(begin(), config, key=jax.random.key(0)).weights
        )
    )
    tensors = mplus_names.of_learned(learned, reader)
    expected = {mplus_names.of_backbone(name): shape for name, shape in plain.items()}
    expected |= {
        tensor.name: tensor_names.stored_shape(tensor.layout, leaf.shape)
        for tensor, leaf in zip(tensors, jax.tree.leaves(learned), strict=True)
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
        jnp.asarray(tensor_names.from_stored(get(t.name), t.layout, leaf.shape))
        for t, leaf in zip(tensors, jax.tree.leaves(learned), strict=True)
    ]
    # Everything drawn with the key above is replaced by the checkpoint's values.
    weights = mplus_names.with_learned(
        start, jax.tree.unflatten(jax.tree.structure(learned), values)
    )
    if rows is None:
        return MPlus(weights)
    return MPlus(weights, _initial(source, config, layers, rows))


def _require_the_programs(config: MPlusConfig, where: str) -> None:
    if config.stored != "output":
        raise ValueError(
            f"{where}: stored must be 'output' in a checkpoint of the official "
            f"program's kind, got {config.stored!r}"
        )
    if config.by_attention:
        raise ValueError(
            f"{where}: retrieval must be 'learned' in a checkpoint of the official "
            "program's kind, which keeps a retriever and hidden states, got "
            f"{config.retrieval!r}"
        )


def _backbone(
    source: Source, dtype: Dtype
) -> tuple[ModelConfig, Shapes, Callable[[], LanguageModel]]:
    """Its sizes, the shapes of its tensors under their plain names, and its reader."""
    described, where = source.described, source.where
    get = lambda name: source.get(mplus_names.of_backbone(name))
    if described.get("model_type") == own_format.MODEL_TYPE:
        sizes = own_format.read_config(described, dtype, where)
        plain = own_format.parameter_shapes(sizes)
        read = lambda: own_format.build_model(described, plain, get, dtype, where)
    else:
        sizes = from_hf_config(described, dtype)
        plain = tensor_names.parameter_shapes(sizes)
        read = lambda: tensor_names.parameters_from_tensors(sizes, plain, get, where)
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
    pool = Frozen(jnp.asarray(get(mplus_names.POOL)))
    if not config.num_retrieved or not rows:
        return Initial(pool)
    if rows > config.store_size:
        raise ValueError(
            f"store_size must have room for the {rows} rows that {where} begins with, "
            f"got {config.store_size}"
        )
    each = lambda name: np.stack([get(f"{name}.{layer}") for layer in range(layers)])
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
    parts = (vectors, keys, -ages.astype(np.int32), recalls[0])
    return Initial(pool, *(Frozen(jnp.asarray(part)) for part in parts))
