"""Operations that a model's equations need for a token of training."""

import jax
from flax import nnx

from memjax.mechanisms import (
    AttentionConfig,
    ElasticMemoryConfig,
    MixerConfig,
    SlidingWindowConfig,
)
from memjax.models import LanguageModel
from memjax.models.language_model.config import attention_of


def flops_per_token(model: LanguageModel, length: int) -> float:
    """Floating-point operations of a token's forward and backward pass.

    6 N + 12 sum_l H K A. N are the parameters that a token is multiplied with: all
    matrices, the embedding only where it is the output head too. H K is the width of
    all query heads of layer l, and A how many positions a query attends to on average,
    causally and within the layer's window. A multiply-add is two operations. What a
    memory does to its state is not counted, nor what is computed again in the backward
    pass: both would only make the devices look busier.

    Args:
        model: its structure; shapes for parameters are enough.
        length: tokens of a sample in one update.
    """
    config = model.config
    _, params, _ = nnx.split(model, nnx.Param, ...)
    matrices = sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1)
    if not config.tied_head:
        # A row is looked up, and multiplied with nothing.
        matrices -= config.vocab_size * (
            config.architecture.embedding_dim or config.model_dim
        )
    matrices -= config.architecture.learned_positions * config.model_dim
    attention = sum(_attended(mixer, length) for mixer in config.layers)
    return 6.0 * matrices + 12.0 * attention


def _attended(mixer: MixerConfig, length: int) -> float:
    """Positions that a query attends to on average, times the width of all heads."""
    heads = attention_of(mixer)
    match heads:
        case AttentionConfig():
            positions = _mean_causal(length, min(heads.capacity, length))
        case SlidingWindowConfig():
            positions = _mean_causal(length, heads.window) + (
                heads.sinks if length > heads.window else 0
            )
        case ElasticMemoryConfig():
            # Its block, and where there was one before, the points of its memory.
            positions = _mean_causal(min(length, heads.block), heads.block)
            positions += heads.samples * max(0.0, 1 - heads.block / length)
        case _:
            return 0.0
    return positions * heads.num_heads * heads.head_dim


def _mean_causal(length: int, window: int) -> float:
    """Mean over `length` positions of how many of the last `window` are there."""
    seen = min(length, window)
    return (seen * (seen + 1) / 2 + (length - seen) * window) / length
