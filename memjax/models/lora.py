"""LoRA: a frozen model and small trained changes to its matrices.

    W x  becomes  W x + (alpha / r) B A x,    A [r, in] normal, B [out, r] zero

Hu et al. (2021), https://arxiv.org/abs/2106.09685, equation 3. B starts at zero, so an
adapted model starts as the model it was made from. Everything else is frozen: the
embedding, the head, norms, biases, gates and filters of memories. (HMT's program adapts
the embedding too; its paper does not say so.)

An adapted matrix W is `Adapted(W, A, B, alpha / r)` in its layer; `adapters.py` freezes
a model and merges its adapters.

Shapes: I input axes, O output axes, R rank.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from memjax.checks import (
    check_key,
    check_positive,
    check_sizes,
    require_instance,
    require_known,
)
from memjax.mechanisms.layers.projections import Adapted
from memjax.models.adapters import freeze
from memjax.models.language_model.config import kinds
from memjax.models.language_model.model import LanguageModel
from memjax.nnx.params import as_params

Target = Literal[
    "query",
    "key",
    "query_key",
    "value",
    "output",
    "gate",
    "input_gate",
    "selection",
    "pace",
    "up",
    "down",
]


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which matrices are adapted, and how much.

    Attributes:
        rank: r, of the change of each matrix.
        alpha: the change is scaled by alpha / r.
        targets: projections of attention and recurrent layers (the latter have queries
            and keys as one, "query_key"), and matrices of feed-forwards.
    """

    rank: int = 8
    alpha: float = 32.0
    targets: tuple[Target, ...] = get_args(Target)

    def __post_init__(self):
        require_instance("targets", self.targets, Sequence)
        check_sizes(rank=self.rank, targets=len(self.targets))
        check_positive(alpha=self.alpha)
        for target in self.targets:
            require_known("targets", target, get_args(Target))


class LowRank(NamedTuple):
    """A and B of one matrix."""

    down: Float[Array, "*I R"]
    up: Float[Array, " R *O"]


def add_lora(
    model: LanguageModel, config: LoraConfig, key: PRNGKeyArray, first_layer: int = 0
) -> LanguageModel:
    """The model with everything frozen and the targets' changes to train.

    Args:
        model: left as it is; the result shares its arrays.
        config: which matrices.
        key: of the A.
        first_layer: layers before it have no adapters, and the backward pass ends
            there.

    Raises:
        ValueError: the model has adapters already, or none of the targets.
    """
    require_instance("model", model, LanguageModel)
    require_instance("config", config, LoraConfig)
    check_key(key)
    model = freeze(model)
    count = 0
    for i, block in enumerate(model.blocks):
        if i < first_layer:
            continue
        for place, name in enumerate(("mechanism", "feed_forward")):
            params = getattr(block, name, None)
            names = targets_in(params, config.targets)
            if names:
                # One key a layer and part: other targets elsewhere do not change what
                # is drawn.
                here = jax.random.fold_in(key, 2 * i + place)
                changes = init_changes(params, names, config.rank, here)
                scale = config.alpha / config.rank
                new = adapted(params, as_params(changes), scale)
                setattr(block, name, nnx.data(new))
                count += 1
    if not count:
        raise ValueError(
            f"targets={config.targets} are none of the model's: its mechanisms are "
            f"{kinds(model.config)}"
        )
    return model


def adapted(params: Any, changes: dict[str, LowRank], scale: float) -> Any:
    """The parameters of a mechanism or feed-forward, with LoRA applied."""
    for path, change in changes.items():
        params = _with(params, path, Adapted(_at(params, path), *change, scale))
    return params


def init_changes(
    params: Any, names: Sequence[str], rank: int, key: PRNGKeyArray
) -> dict[str, LowRank]:
    """A drawn and B zero for each matrix that `targets_in` has named."""
    keys = jax.random.split(key, len(names))
    draw = functools.partial(_low_rank, params, rank)
    return dict(zip(names, map(draw, names, keys), strict=True))


def targets_in(params: Any, targets: Sequence[Target]) -> list[str]:
    """The targets of a mechanism or feed-forward, as paths.

    A mechanism of several names them in `lora_parts`.
    """
    parts = getattr(params, "lora_parts", None)
    if parts is None:
        matrices = getattr(params, "lora_targets", ())
        return [t for t in targets if t in matrices and getattr(params, t) is not None]
    return [
        f"{part}.{path}"
        for part in parts
        for path in targets_in(getattr(params, part), targets)
    ]


def _at(params, path):
    return functools.reduce(getattr, path.split("."), params)


def _with(params, path, value):
    """The parameters with another array at a path."""
    first, _, rest = path.partition(".")
    new = _with(getattr(params, first), rest, value) if rest else value
    return params._replace(**{first: new})


def _low_rank(params, rank, path, key):
    weight = _at(params, path)
    # An output sums over heads and their widths; all others over one axis.
    several = path.rpartition(".")[2] == "output" and weight.ndim == 3
    inputs = weight.shape[: 2 if several else 1]
    outputs = weight.shape[len(inputs) :]
    draw = jax.nn.initializers.lecun_normal(tuple(range(len(inputs))), -1)
    return LowRank(
        down=draw(key, (*inputs, rank), jnp.float32),
        # B is zero, so that the adapted model starts as the model that it was made
        # from.
        up=jnp.zeros((rank, *outputs), jnp.float32),
    )
