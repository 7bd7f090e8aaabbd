"""Save M+ and MemoryLLM, under the official program's names.

The folder is read by `load_mplus` and, by its names and `config.json`, by the program.
"""

import ml_dtypes
import numpy as np

from memjax.config_io import to_record
from memjax.models.checkpoints import own_format
from memjax.models.checkpoints.saving import Contents, plain_contents
from memjax.models.language_model.config import Dtype
from memjax.models.language_model.model import LanguageModel
from memjax.models.mplus.checkpoints import tensor_names as mplus_names
from memjax.models.mplus.checkpoints.hf_config import describe
from memjax.models.mplus.config import MPlusConfig
from memjax.models.mplus.state import Initial
from memjax.models.mplus.weights import MPlusWeights

#: The program's name for its class.
MODEL_TYPE = "memoryllm"
#: Key of the `MPlusConfig` in `config.json`, which the program does not read.
RECORD = "memjax_mplus"


def contents(
    weights: MPlusWeights, initial: Initial | None, plain: LanguageModel, dtype: Dtype
) -> Contents:
    """Content of the folder of `MPlus.save`.

    Raises:
        ValueError: as `MPlus.save`.
    """
    config = weights.config
    rows = None if initial is None else _require_ages(initial, dtype)
    inside = plain_contents(plain.config, plain)
    record = {"config": to_record(config), "initial_rows": rows}
    memory = describe(config, rows or 0) | {RECORD: record}
    described = own_format.around_backbone(inside.config, MODEL_TYPE, memory)
    tensors = _named(weights, initial, inside.tensors)
    return Contents(described, tensors, is_public=False)


def _require_ages(initial, dtype):
    """Number of rows of the initial store; the dtype must hold their ages."""
    if initial.born is None:
        return 0
    ages = -np.asarray(initial.born.get_value())
    # Ages are stored among the floats, and bfloat16 counts to 256 only.
    if dtype == "bfloat16" and np.any(ages.astype(ml_dtypes.bfloat16) != ages):
        raise ValueError(
            "dtype must be 'float32' to hold the initial store's ages of up to "
            f"{ages.max()}, got {dtype!r}"
        )
    return ages.shape[1]


def _named(weights, initial, backbone):
    for name, value in backbone:
        yield mplus_names.of_backbone(name), value
    yield from mplus_names.learned_tensors(weights)
    if initial is not None:
        yield from mplus_names.of_memory(initial)
        if not weights.config.num_retrieved:
            # Without it MemoryLLM would not read its pool.
            yield mplus_names.WRITTEN, np.ones((), np.uint8)


def require_official(config: MPlusConfig, where: str) -> None:
    """Raises ValueError unless the official program has such a memory."""
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
