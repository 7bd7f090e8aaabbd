"""The same parameters with bounded attention: a window, or a maximal length."""

from collections.abc import Sequence

from memjax.checks import check_sizes, require_instance
from memjax.mechanisms import SlidingWindowConfig
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.mechanisms.sliding_window import widened
from memjax.models.language_model.config import ModelConfig, kinds
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.rebuilt import replace_config


def limit_attention(model: LanguageModel, window: int, sinks: int = 0) -> LanguageModel:
    """The same parameters, with attention limited to the last `window` tokens.

    Reads sequences of any length in constant memory. The first `window` + `sinks`
    tokens of a sequence get the same result as with full attention.

    Args:
        model: with full attention or sliding windows. Layers without attention stay as
            they are: their memory is constant.
        window: tokens that a query sees, its own included.
        sinks: first tokens of the sequence that it sees as well. Without any, a
            pretrained model fails beyond the window (Xiao et al. 2023,
            https://arxiv.org/abs/2309.17453); 4 are enough.

    Raises:
        ValueError: if window is below 1, there are more sinks than it has tokens, no
            layer attends, one attends beside a memory, or the model's positions are a
            learned table, which ends.
    """
    require_instance("model", model, LanguageModel)
    check_sizes(window=window)
    config = model.config
    attends = [m for m in config.mechanisms if m.attention is not None]
    if not attends or not all(m.plain_attention for m in attends):
        raise ValueError(
            "model must have layers of attention alone, and others without any, got "
            f"{kinds(config)}"
        )
    require_unbounded_positions(config)
    windows = (
        limit_layer(m.attention, window, sinks) if m.attention else m
        for m in config.mechanisms
    )
    return replace_config(model, mechanisms=tuple(windows))


def limit_layer(heads: HeadsConfig, window: int, sinks: int) -> SlidingWindowConfig:
    """An attention layer that sees the last `window` tokens and the sinks."""
    return SlidingWindowConfig(**vars(heads.heads), window=window, sinks=sinks)


def require_unbounded_positions(config: ModelConfig) -> None:
    """Raises ValueError where positions are learned: a table of positions ends."""
    if config.architecture.learned_positions:
        raise ValueError(
            "model must have RoPE to read past its window, got learned_positions="
            f"{config.architecture.learned_positions}"
        )


def widen_windows(
    model: LanguageModel, layers: Sequence[int], more: int
) -> LanguageModel:
    """The same parameters, with windows of some layers that are longer by `more`.

    Args:
        model: with sliding windows in these layers.
        layers: their numbers.
        more: tokens, at least 1.

    Raises:
        ValueError: if such a layer is no window, or more is below 1.
    """
    check_sizes(more=more)
    mechanisms = list(model.config.layers)
    for layer in layers:
        if not 0 <= layer < len(mechanisms):
            raise ValueError(f"layers must be in [0, {len(mechanisms)}), got {layers}")
        window = widened(mechanisms[layer], more)
        if window is None:
            kind = type(mechanisms[layer]).__name__
            raise ValueError(f"layers must be windows, got {layer}, {kind}")
        mechanisms[layer] = window
    return replace_config(model, mechanisms=tuple(mechanisms))


def set_capacity(model: LanguageModel, capacity: int) -> LanguageModel:
    """The same parameters, caches of full attention that hold `capacity` tokens."""
    mechanisms = (
        m if m.max_length is None else m.within(capacity)
        for m in model.config.mechanisms
    )
    return replace_config(model, mechanisms=tuple(mechanisms))


def limit_length(model: LanguageModel, length: int, remat: bool) -> LanguageModel:
    """The same model for sequences of at most `length` tokens, with states no larger.

    Args:
        model: the model.
        length: of the longest sequence.
        remat: False turns off the model's own rematerialization, because the caller
            recomputes whole segments.

    Raises:
        ValueError: if the model has fewer positions.
    """
    config = model.config
    if config.capacity is not None and length > config.capacity:
        raise ValueError(
            f"segment and sensory make sequences of {length} tokens with two prompts; "
            f"the backbone's positions allow {config.capacity}"
        )
    # A window as long as the sequence is full attention, with a smaller state.
    mechanisms = tuple(mechanism.within(length) for mechanism in config.mechanisms)
    return replace_config(model, mechanisms=mechanisms, remat=remat and config.remat)
