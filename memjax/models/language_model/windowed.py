"""The same parameters with bounded attention: a window, or a maximal length."""

import dataclasses
from collections.abc import Sequence

from memjax.checks import check_sizes
from memjax.mechanisms import AttentionConfig, MixerConfig, SlidingWindowConfig
from memjax.models.language_model.config import ModelConfig, heads_of, kinds
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.rebuilt import with_config

#: What a window can take the place of.
PlainAttention = AttentionConfig | SlidingWindowConfig


def with_window(model: LanguageModel, window: int, sinks: int = 0) -> LanguageModel:
    """The same parameters, with attention limited to the last `window` tokens.

    Reads sequences of any length in constant memory. The first `window` + `sinks`
    tokens of a sequence get the same result as with full attention.

    Args:
        model: all of whose layers are full attention or sliding windows.
        window: tokens that a query sees, its own included.
        sinks: first tokens of the sequence that it sees beside them. Without any, a
            pretrained model fails beyond the window (Xiao et al. 2023,
            https://arxiv.org/abs/2309.17453); 4 are enough.

    Raises:
        ValueError: if window is below 1, there are more sinks than it has tokens, a
            layer is another mechanism, or the model's positions are a learned table,
            which ends.
    """
    check_sizes(window=window)
    config = model.config
    attention = [m for m in config.mixers if isinstance(m, PlainAttention)]
    if len(attention) < len(config.mixers):
        raise ValueError(
            f"model must have attention in every layer, got {kinds(config)}"
        )
    require_unbounded_positions(config)
    windows = (limited(mixer, window, sinks) for mixer in attention)
    return with_config(model, mixers=tuple(windows))


def limited(mixer: PlainAttention, window: int, sinks: int) -> SlidingWindowConfig:
    """An attention layer that sees the last `window` tokens and the sinks."""
    return SlidingWindowConfig(**vars(heads_of(mixer)), window=window, sinks=sinks)


def require_unbounded_positions(config: ModelConfig) -> None:
    """Raises ValueError where positions are learned: the window slides on for ever."""
    if config.architecture.learned_positions:
        raise ValueError(
            "model must have RoPE to read past its window, got learned_positions="
            f"{config.architecture.learned_positions}"
        )


def with_wider_windows(
    model: LanguageModel, layers: Sequence[int], more: int
) -> LanguageModel:
    """The same parameters, with windows of some layers that are longer by `more`.

    Args:
        model: whose layers of these numbers are sliding windows.
        layers: their numbers.
        more: tokens, at least 1.

    Raises:
        ValueError: if such a layer is no window, or more is below 1.
    """
    check_sizes(more=more)
    mixers = list(model.config.layers)
    for layer in layers:
        mixer = mixers[layer]
        if not isinstance(mixer, SlidingWindowConfig):
            kind = type(mixer).__name__
            raise ValueError(f"layers must be windows, got {layer}, {kind}")
        mixers[layer] = dataclasses.replace(mixer, window=mixer.window + more)
    return with_config(model, mixers=tuple(mixers))


def with_capacity(model: LanguageModel, capacity: int) -> LanguageModel:
    """The same parameters, caches of full attention that hold `capacity` tokens."""
    mixers = (
        dataclasses.replace(m, capacity=capacity, initial_slots=None)
        if isinstance(m, AttentionConfig)
        else m
        for m in model.config.mixers
    )
    return with_config(model, mixers=tuple(mixers))


def with_max_length(model: LanguageModel, length: int, remat: bool) -> LanguageModel:
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
    # A window as long as the sequence is full attention, whose state is smaller.
    mixers = tuple(_attention_within(mixer, length) for mixer in config.mixers)
    return with_config(model, mixers=mixers, remat=remat and config.remat)


def _attention_within(mixer: MixerConfig, length: int) -> MixerConfig:
    """The mixer of a layer for sequences of at most `length` tokens."""
    if isinstance(mixer, AttentionConfig):
        return dataclasses.replace(mixer, capacity=length, initial_slots=None)
    if isinstance(mixer, SlidingWindowConfig) and mixer.window + mixer.sinks >= length:
        return AttentionConfig(**vars(heads_of(mixer)), capacity=length)
    return mixer
