"""The full model, as the teacher of a model that `retrofit` made of it.

Both have the same weights: the teacher is computed from the retrofitted model, whose
chosen layers attend to everything again.

Shapes: B batch, T time, D model.
"""

from collections.abc import Collection
from typing import NamedTuple

from jaxtyping import Array, Float, Int

from memjax.mechanisms import Mechanism
from memjax.mechanisms.beside import BesideParams
from memjax.models.language_model.config import ModelConfig
from memjax.models.language_model.layers import run_block
from memjax.models.language_model.model import LanguageModel, build_once


class Taught(NamedTuple):
    """What the mixer of a layer reads in the full model, and what it makes of it."""

    x: Float[Array, "B T D"]
    y: Float[Array, "B T D"]


def teach(
    model: LanguageModel,
    teacher: ModelConfig,
    tokens: Int[Array, "B T"],
    layers: Collection[int],
) -> dict[int, Taught]:
    """Inputs and outputs of the full model's attention in these layers.

    Layers behind the last of them are not computed.

    Args:
        model: that `retrofit` made, without adapters.
        teacher: configuration of the model that it was made of.
        tokens: texts that are read whole.
        layers: numbers of layers.
    """
    found: dict[int, Taught] = {}
    h = model.enter(model.embed(tokens))
    for i in range(max(layers) + 1):
        block, mechanism = model.blocks[i], build_once(teacher.layers[i])

        def mix(params, memory, x, i=i, mechanism=mechanism):
            y = read_whole(mechanism, attention_params(params), x)
            if i in layers:
                found[i] = Taught(x, y)
            return memory, y

        _, h = run_block(model.config, mix, block.parameters(), None, h)
    return found


def attention_params(mixer):
    """The attention's parameters of a layer, with a memory beside it or without."""
    return mixer.attention if isinstance(mixer, BesideParams) else mixer


def read_whole(
    mechanism: Mechanism, params, x: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """The output of a mixer for a whole sequence, of which no state is kept."""
    if mechanism.whole is not None:
        return mechanism.whole(params, x, None)
    return mechanism.apply(params, mechanism.init_state(x.shape[0]), x)[1]
