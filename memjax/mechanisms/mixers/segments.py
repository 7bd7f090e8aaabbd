"""Mechanisms whose `apply`, `whole` and packed rows are one function of a segment.

Shapes: B batch, T time, D model.
"""

import functools
from collections.abc import Callable
from typing import Protocol

from jaxtyping import Array, Bool, Float, PyTree

from memjax.mechanisms.base import Mechanism, Packed, check_input, refuse_mask
from memjax.mechanisms.config import MechanismConfig
from memjax.mechanisms.layers import documents


class Read(Protocol):
    """A segment: the state after it, and its outputs.

    With `starts`, documents of a packed row begin where it is True.
    """

    def __call__(
        self,
        params: PyTree,
        state: PyTree,
        x: Float[Array, "B T D"],
        starts: Bool[Array, "B T"] | None = None,
        /,
    ) -> tuple[PyTree, Float[Array, "B T D"]]: ...


def mechanism(
    config: MechanismConfig,
    init_params: Callable,
    init_state: Callable,
    step: Callable,
    read: Callable,
) -> Mechanism:
    """The mechanism of functions that take the configuration first.

    Args:
        config: sizes.
        init_params: see `Mechanism`.
        init_state: see `Mechanism`.
        step: see `Mechanism`.
        read: (config, *) of `Read`.
    """
    read_segment: Read = functools.partial(read, config)
    empty = functools.partial(init_state, config)

    def checked_step(params, state, x):
        check_input(x, config.model_dim, state)
        return step(config, params, state, x)

    def apply(params, state, x):
        check_input(x, config.model_dim, state)
        return read_segment(params, state, x)

    def whole(params, x, mask=None):
        refuse_mask(mask)
        return apply(params, empty(x.shape[0]), x)[1]

    def packed(params, x, starts):
        documents.check_starts(starts, x)
        # A row's first token starts a document whatever `starts` says of it.
        starts = starts.at[:, 0].set(True)
        return read_segment(params, empty(x.shape[0]), x, starts)[1]

    return Mechanism(
        init_params=functools.partial(init_params, config),
        init_state=empty,
        step=checked_step,
        apply=apply,
        whole=whole,
        packed=Packed(packed),
    )
