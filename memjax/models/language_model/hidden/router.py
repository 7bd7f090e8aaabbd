"""Routers of mixtures of experts: which experts a token has, and their weights.

Those of published models, of logits l = x W_r in float32, for the k chosen:

    softmax                w_e = softmax(l)_e                           Qwen 2
    softmax, renormalized  the same over their sum, which is the        Qwen 3,
                           softmax of the chosen logits alone           Granite 4
    sigmoid                s = sigmoid(l), chosen by s + b;             DeepSeek-V3,
                           w_e = s_e over their sum                     Nemotron-H, Kimi

The sigmoid's b is not learned by gradients: it balances the load of the experts. There
experts may be chosen inside the best groups of neighbours alone: DeepSeek-AI (2024),
https://arxiv.org/abs/2412.19437, equations 12 to 16.

Shapes: D model, E experts, k experts of a token.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from memjax.checks import check_flags, check_positive, check_sizes, require_known
from memjax_kernels._src.common.cpu import exact_product

RouterKind = Literal["softmax", "sigmoid"]


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of a mixture of experts, and its router.

    Attributes:
        num_experts: E.
        experts_per_token: k, at most E.
        hidden_dim: F, width inside each expert.
        router: what weights are made of; see the head of this module.
        renormalize: whether the k weights are divided by their sum.
        groups: equal groups of neighbouring experts, with "sigmoid"; the score of a
            group is the sum of its two largest s + b.
        chosen_groups: groups of the largest score, inside which a token chooses.
        scale: the weights are multiplied by it.
        shared_dim: width inside the shared expert; 0 is none.
        shared_gate: whether that is multiplied by a sigmoid of the token.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    router: RouterKind = "softmax"
    renormalize: bool = True
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    shared_dim: int = 0
    shared_gate: bool = False

    def __post_init__(self):
        sizes = ("num_experts", "experts_per_token", "hidden_dim", "groups")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        check_sizes(chosen_groups=self.chosen_groups)
        check_sizes(least=0, shared_dim=self.shared_dim)
        check_positive(scale=self.scale)
        check_flags(self)
        require_known("router", self.router, get_args(RouterKind))
        if self.num_experts % self.groups:
            raise ValueError(
                f"groups must divide the {self.num_experts} experts, got {self.groups}"
            )
        if self.groups > 1 and self.router != "sigmoid":
            raise ValueError(
                f"groups must be 1 with router={self.router!r}, got {self.groups}"
            )
        if self.chosen_groups > self.groups:
            raise ValueError(
                f"chosen_groups must be at most groups={self.groups}, got "
                f"{self.chosen_groups}"
            )
        candidates = self.num_experts // self.groups * self.chosen_groups
        if self.experts_per_token > candidates:
            raise ValueError(
                "experts_per_token must be at most the number of experts to choose "
                f"from, {candidates}, got {self.experts_per_token}"
            )
        if self.shared_gate and not self.shared_dim:
            raise ValueError("shared_gate must be False without a shared expert")


def route(
    config: ExpertsConfig,
    router: tuple[Float[Array, "D E"], Float[Array, " E"] | None],
    x: Float[Array, "*B D"],
) -> tuple[Int[Array, "*B k"], Float32[Array, "*B k"]]:
    """The experts of each token, and their weights.

    Args:
        config: the mixture's.
        router: its matrix, and its bias with "sigmoid".
        x: tokens.
    """
    weight, bias = router
    logits = exact_product(x.astype(jnp.float32), weight.astype(jnp.float32))
    k = config.experts_per_token
    if config.router == "softmax":
        values, chosen = jax.lax.top_k(logits, k)
        # Divided by the sum of the chosen, the exponentials of all others cancel.
        over = values if config.renormalize else logits
        total = jax.nn.logsumexp(over, axis=-1, keepdims=True)
        return chosen, config.scale * jnp.exp(values - total)
    scores = jax.nn.sigmoid(logits)
    _, chosen = jax.lax.top_k(_in_best_groups(config, scores, bias), k)
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.renormalize:
        # Scores of 0 would divide by 0.
        weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
    return chosen, config.scale * weights


def _in_best_groups(config, scores, bias):
    """Scores to choose by: with the bias, -inf outside of the best groups."""
    biased = scores + bias.astype(jnp.float32).reshape((1,) * (scores.ndim - 1) + (-1,))
    if config.chosen_groups == config.groups:
        return biased
    grouped = biased.reshape(*biased.shape[:-1], config.groups, -1)
    best, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    _, chosen = jax.lax.top_k(best.sum(axis=-1), config.chosen_groups)
    allowed = jax.nn.one_hot(chosen, config.groups, dtype=bool).any(axis=-2)
    return jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased.shape)
