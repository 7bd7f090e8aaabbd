"""Settings of M+ in the official program's `config.json`, in and out."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from memjax.models.mplus.checkpoints import tensor_names as mplus_names
from memjax.models.mplus.config import MPlusConfig, most_rows

# No setting of a sound file is larger.
LARGEST = 1e9


def mplus_config_from_hf(
    described: Mapping[str, Any], start: Sequence[float] | None = None
) -> MPlusConfig:
    """The memory that an official `config.json` describes, with memjax's semantics.

    The store has room for all that the program keeps at a time.

    Args:
        described: what `config.json` holds.
        start: recall frequencies of the rows that the store begins with; None is 0 for
            all of `ltm_initial_size`, as published.

    Raises:
        ValueError: naming the key, if one is missing or not a number of its kind, or
            if the program's store would grow without bound.
    """
    lora = described.get("lora_config")
    if not isinstance(lora, Mapping):
        raise ValueError(f"lora_config must be an object, got {lora!r}")
    tokens = _size(described, "num_tokens", 1)
    long = _size(described, "num_ltm_blocks", 0, 0)
    common: Any = dict(
        num_memory_tokens=tokens,
        # The program counts retrieved blocks among its blocks of memory.
        pool_size=(_size(described, "num_blocks", long + 1) - long) * tokens,
        chunk_size=max(MPlusConfig.chunk_size, tokens),
        num_retrieved=long * tokens,
        rank=_size(lora, "r", 1),
        alpha=_positive(lora, "lora_alpha"),
    )
    if not long:
        return MPlusConfig(**common)
    recalls = _positive(described, "initial_rf_when_moving_stm_to_ltm")
    decay = _positive(described, "decay_frequency")
    every = _size(described, "update_ltm_frequency", 1)
    batch = every * tokens
    size = _size(described, "ltm_initial_size", 0, 0)
    rows = {0.0: size} if start is None else collections.Counter(start)
    try:
        kept = most_rows(batch, long * tokens, recalls, decay, rows)
    except ValueError as error:
        raise ValueError(
            "initial_rf_when_moving_stm_to_ltm and decay_frequency are recalls and "
            f"decay: {error}"
        ) from error
    return MPlusConfig(
        **common,
        # Fewer rows could not be retrieved, nor one update stored.
        store_size=max(kept, long * tokens, tokens),
        key_dim=_size(described, "selector_hidden_dim", 1),
        merge_every=every,
        recalls=recalls,
        decay=decay,
    )


def describe(config: MPlusConfig, rows: int) -> dict[str, Any]:
    """The program's keys of `config.json`, for a store that begins with `rows`."""
    long = -(-config.num_retrieved // config.num_memory_tokens)
    targets = [place.split(".")[1] for place in mplus_names.PROJECTIONS.values()]
    found = {
        "architectures": ["MPlus" if long else "MemoryLLM"],
        "num_tokens": config.num_memory_tokens,
        "num_blocks": config.pool_size // config.num_memory_tokens + long,
        "add_bos_embedding": True,
        "drop_memory_per_layer": True,
        "add_decoder_lora": True,
        "lora_config": {
            "inference_mode": False,
            "r": config.rank,
            "lora_alpha": config.alpha,
            "lora_dropout": 0.0,
            "target_modules": targets,
        },
    }
    if not long:
        return found
    return found | {
        "num_ltm_blocks": long,
        "ltm_initial_size": rows,
        "update_ltm_mode": "immediate",
        "update_ltm_frequency": config.merge_every,
        "decay_frequency": config.decay,
        "initial_rf_when_moving_stm_to_ltm": config.recalls,
        "add_selector": True,
        "selector_hidden_dim": config.key_dim,
        "num_selector_layers": 2,
        "map_from_hidden_states": True,
        "detach_hidden_state": True,
        "add_encoder_retriever": True,
    }


def _size(
    described: Mapping[str, Any], key: str, least: int, default: int | None = None
) -> int:
    value = described.get(key, default)
    # `type`, as True is an int to isinstance.
    if type(value) is not int or not least <= value <= LARGEST:
        raise ValueError(
            f"{key} must be a whole number in [{least}, {LARGEST:g}], got {value!r}"
        )
    return value


def _positive(described: Mapping[str, Any], key: str) -> float:
    value: Any = described.get(key)
    if type(value) not in (int, float) or not 0 < value <= LARGEST:
        raise ValueError(f"{key} must be a number in (0, {LARGEST:g}], got {value!r}")
    return float(value)
