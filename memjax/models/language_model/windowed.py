"""The same parameters, attention over less: a window, or texts of bounded length."""

from memjax.checks import check_sizes
from memjax.models.language_model.model import LanguageModel, with_config


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


def with_texts_of(model: LanguageModel, length: int, remat: bool) -> LanguageModel:
    """The same model for texts of at most `length` tokens, with states no larger.

    Args:
        model: the model.
        length: of the longest text.
        remat: False turns the model's own off, where whole texts are recomputed.

    Raises:
        ValueError: if the model's positions end before.
    """
    config = model.config
    if "attention" in config.mixers and length > config.capacity:
        raise ValueError(
            f"segment and sensory make texts of {length} tokens with two prompts; the "
            f"backbone's positions allow {config.capacity}"
        )
    # A window that sees all of a text is full attention, whose state is smaller.
    mixers = tuple(
        "attention" if mixer == "sliding_window" and config.window >= length else mixer
        for mixer in config.mixers
    )
    remat = remat and config.remat
    return with_config(model, mixers=mixers, capacity=length, remat=remat)
