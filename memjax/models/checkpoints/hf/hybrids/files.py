"""Other forms of the files of published models with recurrent layers.

Qwen3.5 is published as a model of pictures and text, whose text is read alone. OLMo
Hybrid, saved by transformers, has other names and another division of its filters.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from memjax.checks import short
from memjax.models.checkpoints.hf.fields import read_entry
from memjax.models.checkpoints.hf.hybrids.fla.bounds import divided_bounds
from memjax.models.language_model.config import ModelConfig

logger = logging.getLogger(__name__)

#: model_type of a file with a `text_config` -> that of its text.
TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
# Beginnings of names, where "model." may be missing.
_TEXT = "model.language_model."
_NOT_TEXT = ("model.visual.", "visual.", "mtp.")
_FIRST_EMBEDDING = {"backbone.embedding.weight": "backbone.embeddings.weight"}
Get = Callable[[str], np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a `config.json` that describes the text model; all of most files.

    Raises:
        ValueError: if the part is missing or of another model.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in TEXT_OF:
        return config
    text, expected = read_entry(config, "text_config", dict), TEXT_OF[model_type]
    found = text.get("model_type", expected)
    if found != expected:
        raise ValueError(
            f"text_config.model_type must be {expected!r}, got {short(found)}"
        )
    # The head is the outer model's.
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return text | {"model_type": expected, "tie_word_embeddings": tied}


def text_tensors(
    family: str, config: ModelConfig, shapes: Shapes, get: Get, where: str
) -> tuple[Shapes, Get]:
    """Shapes of the tensors by the names of `tensor_names`, and a reader by them.

    Tensors of pictures and of further heads are passed over and counted in one line.

    Args:
        family: model_type of the text model.
        config: of the text model.
        shapes: of a file's tensors.
        get: reads one by its name in the file.
        where: the checkpoint's name in errors and lines.

    Raises:
        ValueError: if no tensor is the text model's.
    """
    match family:
        case "qwen3_5_text" | "qwen3_5_moe_text" | "qwen3_next":
            return _of_qwen(shapes, get, where)
        case "olmo_hybrid":
            return _of_olmo(config, shapes, get)
        case "mamba" | "mamba2" | "falcon_mamba":
            return _of_mamba(shapes, get)
        case "hgrn2":
            return divided_bounds(config, shapes, get)
    return shapes, get


def _of_qwen(shapes: Shapes, get: Get, where: str) -> tuple[Shapes, Get]:
    names = {}
    for name in shapes:
        if not name.startswith(_NOT_TEXT):
            beginning = _TEXT if name.startswith(_TEXT) else "language_model."
            plain = name.removeprefix(beginning)
            names["model." + plain if plain != name else name] = name
    passed = len(shapes) - len(names)
    if passed and not names:
        raise ValueError(
            f"{where}: all {passed} tensors are of pictures ('model.visual.*') or of "
            "further heads ('mtp.*'), none of the text model"
        )
    if passed:
        logger.warning(
            "%s: %d tensors of pictures and of further heads are not read",
            where,
            passed,
        )

    def by_name(name):
        return get(names[name])

    return {ours: shapes[name] for ours, name in names.items()}, by_name


def _of_mamba(shapes: Shapes, get: Get) -> tuple[Shapes, Get]:
    """The embedding has another name in the first files."""
    names = {_FIRST_EMBEDDING.get(name, name): name for name in shapes}

    def by_name(name):
        return get(names[name])

    return {ours: shapes[name] for ours, name in names.items()}, by_name


def _of_olmo(config: ModelConfig, shapes: Shapes, get: Get) -> tuple[Shapes, Get]:
    """transformers' own form: filters in thirds, one name for all second norms."""
    found = dict(shapes)
    readers: dict[str, Callable[[], np.ndarray]] = {}
    for i, mechanism in enumerate(config.layers):
        at = f"model.layers.{i}"
        if mechanism.attention is not None:
            theirs = f"{at}.feedforward_layer_norm.weight"
            if theirs in found:
                ours = f"{at}.post_attention_layernorm.weight"
                found[ours] = found.pop(theirs)
                readers[ours] = functools.partial(get, theirs)
        else:
            memory: Any = mechanism
            names = [f"{at}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
            keys = memory.key_heads * memory.key_dim
            ends = (0, keys, 2 * keys, 2 * keys + memory.num_heads * memory.value_dim)
            if sum(found.get(name, (0,))[0] for name in names) != ends[-1]:
                # Wrong in any form, which names the tensors.
                continue
            for name, (first, last) in zip(
                names, itertools.pairwise(ends), strict=True
            ):
                found[name] = (last - first, *found[name][1:])
                readers[name] = functools.partial(_rows, names, get, first, last)

    def read(name):
        return readers[name]() if name in readers else get(name)

    return found, read


def _rows(names: Sequence[str], get: Get, first: int, last: int) -> np.ndarray:
    """Rows of several tensors joined."""
    return np.concatenate([get(name) for name in names])[first:last]
