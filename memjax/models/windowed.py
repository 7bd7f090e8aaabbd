"""The memory-free baseline made of a model with attention: a window over its keys."""

from memjax.mechanisms.base import check_sizes
from memjax.models.language_model import LanguageModel, with_config


def with_window(model: LanguageModel, window: int) -> LanguageModel:
    """The same parameters, every attention layer seeing the last `window` tokens.

    Reads texts of any length in constant memory. Up to `window` tokens from the start
    of a text it computes what full attention does.

    Args:
        model: all of whose layers are "attention" or "sliding_window".
        window: tokens that a query sees, its own included.

    Raises:
        ValueError: if window is below 1, a layer is another mechanism, or the model's
            positions are a learned table, which ends.
    """
    check_sizes(window=window)
    config = model.config
    if others := set(config.mixers) - {"attention", "sliding_window"}:
        raise ValueError(
            f"model must have attention in every layer, got {sorted(others)} as well"
        )
    if config.architecture.positions == "learned":
        raise ValueError(
            "model must have positions='rope' to read on in a window, got 'learned'"
        )
    mixers = ("sliding_window",) * len(config.mixers)
    return with_config(model, mixers=mixers, window=window)
