"""Add a memory to chosen layers of a pretrained model, and windows to the others.

    model = add_memory(model, memory="lattice", layers=(3, 9), window=256, key=key)

A chosen layer keeps its projections. With placement="beside" it becomes a hybrid of a
sliding window and a memory (`memjax.mechanisms.hybrid`) that has no part in the output
at first: the model starts as the windowed one. With "instead" it becomes Elastic
Memory (`elastic_memory`), which needs no parameter that attention has not. All other
attention layers become windows with sinks.

The model reads a text of any length in constant memory. `initialise_from_teacher`
initialises the new parameters from full attention, `memjax finetune retrofit` trains
them.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, cast, get_args

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray

from memjax.checks import (
    check_key,
    check_sizes,
    joined,
    require_instance,
    require_known,
    short,
)
from memjax.mechanisms import CELLS, ElasticMemoryConfig, HybridConfig, MechanismConfig
from memjax.mechanisms.cells.base import CellConfig
from memjax.mechanisms.elastic_memory import fitted
from memjax.mechanisms.hybrid import hybrids, init_memory, require_cell
from memjax.mechanisms.layers.heads import HeadsConfig
from memjax.models.language_model.config import ModelConfig, build_once, period
from memjax.models.language_model.model import LanguageModel
from memjax.models.language_model.rebuilt import replace_mechanisms
from memjax.models.language_model.windowed import (
    limit_layer,
    require_unbounded_positions,
)
from memjax.nnx.params import as_arrays, as_params
from memjax_kernels import HippoSampling

# The type of the command line's choices; type checkers need names written out.
if TYPE_CHECKING:
    MemoryName = str
else:
    MemoryName = Literal[*CELLS]
MemoryHeads = Literal["query", "key_value"]
Placement = Literal["beside", "instead"]
ELASTIC = "elastic"


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """Sizes of a named memory; None is its default.

    Attributes:
        heads: a memory for each query head, "query", or for each head of keys and
            values, "key_value", shared by the queries of its group as those are.
        key_dim: width of a head's keys; `head_dim`.
        value_dim: of its values; `head_dim`.
        slots: of each head, where the memory has slots.
        chunk_size: tokens with gradients at one memory.
        order: N, coefficients per channel of Elastic Memory.
        sampling: where in the past Elastic Memory is read; "uniform".
    """

    heads: MemoryHeads | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    slots: int | None = None
    chunk_size: int | None = None
    order: int | None = None
    sampling: HippoSampling | None = None

    def __post_init__(self):
        if self.heads is not None:
            require_known("heads", self.heads, get_args(MemoryHeads))
        words = ("heads", "sampling")
        check_sizes(**{n: x for n, x in self.given.items() if n not in words})

    @property
    def given(self) -> dict[str, Any]:
        """Those that are not None."""
        return {name: x for name, x in vars(self).items() if x is not None}


def add_memory(
    model: LanguageModel,
    *,
    memory: str | CellConfig | ElasticMemoryConfig,
    layers: Sequence[int],
    window: int,
    sinks: int = 4,
    placement: Placement = "beside",
    options: MemoryOptions = MemoryOptions(),
    key: PRNGKeyArray,
) -> LanguageModel:
    """The model with a memory in chosen layers, and windows in all other attention.

    Args:
        model: with RoPE, pretrained; it stays as it is, and the result shares its
            arrays. Layers that are no attention stay as they are.
        memory: by its name, one of `MemoryName`, as large as the layer's heads: one
            memory head a query head; or a configuration of that many heads.
        layers: numbers of attention layers, the first is 0.
        window: tokens that a query sees, its own included; with "instead" the block of
            the chosen layers.
        sinks: first tokens of the text that it sees as well.
        placement: "beside" the window or, Elastic Memory alone, "instead" of it.
        options: of a memory that is named.
        key: of the new parameters.

    Raises:
        ValueError: on layers that there are not, that are no attention, given twice or
            not at all; an unknown memory, or one with heads that do not fit; a window
            shorter than the sinks; a model with learned positions.
    """
    require_instance("model", model, LanguageModel)
    require_instance("options", options, MemoryOptions)
    check_key(key)
    config = retrofitted(
        model.config, memory, layers, window, sinks, placement, options
    )
    new = replace_mechanisms(model, config, tuple(map(build_once, config.layers)))
    added = hybrids(config.layers)
    for layer in set(layers) & set(added):
        block, layer_key = new.blocks[layer], jax.random.fold_in(key, layer)
        params = init_memory(added[layer], as_arrays(block.mechanism), layer_key)
        # The attention's own variables, with adapters if it has them.
        own = as_params(params._replace(attention=None))
        block.mechanism = nnx.data(own._replace(attention=block.mechanism))
    return new


def retrofitted(
    config: ModelConfig,
    memory: str | CellConfig | ElasticMemoryConfig,
    layers: Sequence[int],
    window: int,
    sinks: int,
    placement: Placement,
    options: MemoryOptions = MemoryOptions(),
) -> ModelConfig:
    """The configuration of `add_memory`'s model; raises as it does."""
    require_known("placement", placement, get_args(Placement))
    if isinstance(memory, str):
        require_known("memory", memory, get_args(MemoryName))
    elif options.given:
        raise ValueError(
            f"options must not be given with a configured memory, got {options.given}"
        )
    check_layers(config, layers)
    require_unbounded_positions(config)
    mechanisms: list[MechanismConfig] = []
    for i, mechanism in enumerate(config.layers):
        heads = mechanism.plain_attention
        if heads is None:
            mechanisms.append(mechanism)
        elif i not in layers:
            mechanisms.append(limit_layer(heads, window, sinks))
        elif placement == "instead":
            mechanisms.append(_elastic(memory, heads, window, options))
        else:
            limited, chosen = limit_layer(heads, window, sinks), memory
            if isinstance(chosen, str):
                chosen = memory_config(chosen, limited, options)
            require_cell(chosen)
            mechanisms.append(HybridConfig(limited, cast(CellConfig, chosen)))
    return dataclasses.replace(config, mechanisms=period(mechanisms))


def check_layers(config: ModelConfig, layers: Sequence[int]) -> None:
    """Raises ValueError unless `layers` are numbers of different attention layers."""
    numbers = isinstance(layers, Iterable) and not isinstance(layers, str)
    if not numbers or not all(
        type(i) is not bool and isinstance(i, SupportsIndex) for i in layers
    ):
        raise ValueError(f"layers must be numbers of layers, got {short(layers)}")
    if not layers:
        raise ValueError("layers must be at least one, got none")
    faults = []
    for layer in dict.fromkeys(layers):
        if not 0 <= layer < config.num_layers:
            faults.append(f"{layer} is not in [0, {config.num_layers})")
        elif config.layers[layer].plain_attention is None:
            kind = type(config.layers[layer]).__name__
            faults.append(f"{layer} is a {kind}, not attention")
        elif list(layers).count(layer) > 1:
            faults.append(f"{layer} is given twice")
    if faults:
        raise ValueError(f"layers={tuple(layers)}: {joined(faults)}")


def attention_layers(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers that `add_memory` can choose."""
    layers = enumerate(config.layers)
    return tuple(i for i, mechanism in layers if mechanism.plain_attention is not None)


def memory_layers(config: ModelConfig) -> tuple[int, ...]:
    """Numbers of the hybrid layers."""
    return tuple(hybrids(config.layers))


def memory_config(name: str, heads: HeadsConfig, options: MemoryOptions) -> Any:
    """The memory of this name for a hybrid with these heads.

    Raises:
        ValueError: on a size that this memory has not.
    """
    require_known("memory", name, tuple(CELLS))
    kind, given = CELLS[name], options.given
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    if "heads" in given and "num_kv_heads" not in fields:
        shared = given.pop("heads") == "key_value"
        given["num_heads"] = heads.num_kv_heads if shared else heads.num_heads
    defaults = dict(
        # The gates read keys and values of a token, of all heads.
        model_dim=2 * heads.num_kv_heads * heads.head_dim,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        key_dim=heads.head_dim,
        value_dim=heads.head_dim,
    )
    for field, value in given.items():
        if field not in fields:
            raise ValueError(
                f"options.{field} must be None with memory={name!r}, got {value}"
            )
    return kind(**({n: x for n, x in defaults.items() if n in fields} | given))


def _elastic(
    memory: str | CellConfig | ElasticMemoryConfig,
    heads: HeadsConfig,
    window: int,
    options: MemoryOptions,
) -> ElasticMemoryConfig:
    """Elastic Memory in the place of an attention layer."""
    if not isinstance(memory, str):
        return fitted(memory, heads, window)
    if memory != ELASTIC:
        raise ValueError(
            f"placement='instead' needs memory={ELASTIC!r}, got {memory!r}"
        )
    for name, value in options.given.items():
        if name not in ("order", "sampling"):
            raise ValueError(
                f"options.{name} must be None with placement='instead', got {value}"
            )
    return ElasticMemoryConfig(**vars(heads.heads), block=window, **options.given)
