"""AdamW with warm-up, cosine decay and clipping (Elastic Memory, Table 9)."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from memjax.checks import check_numbers, check_positive, check_sizes, require_instance
from memjax.training.distributed.sharding import leaf_name

# Roles by the last part of a parameter's name, as memjax and flax name them. Shapes do
# not tell: biases of heads, and norms of queries, are matrices.
UNDECAYED = re.compile(
    r"(.*_)?(norm|bias)|scale|shift"  # norms and biases
    r"|decay|log_rate|bound|skip|amount"  # numbers that decays and gates start from
    r"|initial_memory|summary_prompt|bos|position"  # prompts of HMT and M+
)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Hyperparameters; the defaults are the paper's.

    Attributes:
        learning_rate: the peak, reached after the warm-up.
        warmup_ratio: share of the steps in which it rises linearly, in [0, 1).
        final_ratio: learning rate after the last step over the peak, in [0, 1].
        beta1: decay of the mean.
        beta2: decay of the variance.
        epsilon: added to its root.
        weight_decay: decoupled; see `decays` for the parameters that have none.
        decay_vectors: weight decay on all parameters, as HMT is trained.
        max_gradient_norm: gradients longer than this are scaled down to it; infinity
            leaves them all.
        schedule_steps: steps of warm-up and cosine, >= 1; the rate stays as it is from
            there on. None is all steps of the run.
    """

    learning_rate: float = 2e-3
    warmup_ratio: float = 0.01
    final_ratio: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-7
    weight_decay: float = 0.1
    decay_vectors: bool = False
    max_gradient_norm: float = 1.0
    schedule_steps: int | None = None

    def __post_init__(self):
        check_positive(learning_rate=self.learning_rate, epsilon=self.epsilon)
        # Infinity does not clip.
        check_positive(most=math.inf, max_gradient_norm=self.max_gradient_norm)
        names = ("warmup_ratio", "final_ratio", "beta1", "beta2", "weight_decay")
        check_numbers(**{name: getattr(self, name) for name in names})
        for name in ("warmup_ratio", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.schedule_steps is not None:
            check_sizes(schedule_steps=self.schedule_steps)
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(f"final_ratio must be in [0, 1], got {self.final_ratio}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be >= 0, got {self.weight_decay}")


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up, then a cosine to the last of `steps`."""
    steps = config.schedule_steps or steps
    warmup = round(config.warmup_ratio * steps)
    return optax.warmup_cosine_decay_schedule(
        # The first update would do nothing at a rate of 0.
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        # optax needs at least one step after the warm-up.
        decay_steps=max(steps, warmup + 1),
        end_value=config.final_ratio * config.learning_rate,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Builds the transformation for a run of `steps` steps, at least 1.

    Raises:
        ValueError: on anything else, by name.
    """
    require_instance("config", config, OptimizerConfig)
    check_sizes(steps=steps)
    return optax.chain(
        # Before Adam: its moments must not see the long gradients.
        optax.stateless(functools.partial(_clipped, config.max_gradient_norm)),
        optax.adamw(
            schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(
                lambda path, _: config.decay_vectors or decays(leaf_name(path)), params
            ),
        ),
    )


def _clipped(longest, gradients, params):
    """The gradients, scaled down to this norm if theirs is larger."""
    # One factor for all. XLA merges a quotient of a quotient, then takes each layer's
    # gradient from the loop's once more, at a place that makes its update a kernel of
    # its own: compiling a step for CPUs took twice as long.
    norm = optax.tree.norm(gradients)
    factor = jnp.where(norm < longest, 1.0, longest / norm)
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)


def decays(name: str) -> bool:
    """Whether a parameter has weight decay, by its role.

    Norms, biases, decay rates, skips, mixing amounts and prompts have none.

    Args:
        name: the path of the parameter, as in `blocks/0/mechanism/query_bias`.
    """
    return UNDECAYED.fullmatch(name.rpartition("/")[2]) is None


def with_rates(
    transform: optax.GradientTransformation, rates: Mapping[str, float]
) -> optax.GradientTransformation:
    """`transform` with other learning rates for some parameters.

    Args:
        transform: its state stays as it is.
        rates: relative to that of `transform`, by part of the parameter's path:
            `position`, or `balance/amount` in each layer.
    """

    def rate(path):
        name = f"/{leaf_name(path)}/"
        return next((rates[part] for part in rates if f"/{part}/" in name), 1.0)

    def update(updates, state, params=None):
        updates, state = transform.update(updates, state, params)

        # After the transformation: scaled gradients would make no difference to Adam.
        def scale(path, x):
            return x * rate(path)

        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformation(transform.init, update)
