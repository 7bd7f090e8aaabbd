"""Model FLOPs of a training token."""

import jax
from flax import nnx
from jaxtyping import PyTree

from memjax.mechanisms import MechanismConfig
from memjax.models import LanguageModel
from memjax.models.language_model.layers import Block


def flops_per_token(model: LanguageModel, length: int) -> float:
    """Floating-point operations of a token's forward and backward pass.

    6 N + 12 sum_l H K A. N are the parameters that a token is multiplied with: all
    matrices, of experts those of the chosen, the embedding only where it is the output
    head too. H K is the width of all query heads of layer l, and A the mean number of
    positions that a query attends to, causally and within the layer's window. A
    multiply-add is two operations. Updates of a memory's state and recomputation in the
    backward pass are not counted.

    Args:
        model: its structure; shapes for parameters are enough.
        length: tokens of a sample in one update.
    """
    attention = sum(_attended(mechanism, length) for mechanism in model.config.layers)
    return 6.0 * _multiplied(model) + 12.0 * attention


def flops_per_tuned_token(
    backbone: LanguageModel, trained: PyTree, frozen: PyTree
) -> float:
    """`flops_per_token` with frozen parameters.

    4 N + 2 N', or 6 N where nothing is frozen: gradients pass through all N, and N'
    parameters get one. Neither attention, whose positions depend on the memory, nor the
    memory itself is counted.

    Args:
        backbone: its structure, without added parameters.
        trained: parameters that are trained; shapes are enough.
        frozen: those that are not.
    """
    if not jax.tree.leaves(frozen):
        return 6.0 * _multiplied(backbone)
    return 4.0 * _multiplied(backbone) + 2.0 * _matrices(trained)


def _matrices(params: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(params) if x.ndim > 1)


def _multiplied(model: LanguageModel) -> int:
    """Parameters in matrix products with a token."""
    config = model.config
    _, params, _ = nnx.split(model, nnx.Param, ...)
    matrices = _matrices(params)
    if not config.tied_head:
        # A row is looked up, and multiplied with nothing.
        matrices -= config.vocab_size * (
            config.architecture.embedding_dim or config.model_dim
        )
    matrices -= sum(_unchosen(block) for block in model.blocks)
    return matrices - config.architecture.learned_positions * config.model_dim


def _unchosen(block: Block) -> int:
    """Parameters of those experts of a layer that a token does not choose."""
    mixture = block.style.experts
    if mixture is None:
        return 0
    each = _matrices(block.feed_forward.routed) // mixture.num_experts
    return each * (mixture.num_experts - mixture.experts_per_token)


def _attended(mechanism: MechanismConfig, length: int) -> float:
    """Mean positions that a query attends to, times the width of all heads."""
    heads = mechanism.attention
    if heads is None:
        return 0.0
    return mechanism.keys_per_query(length) * heads.num_heads * heads.head_dim
