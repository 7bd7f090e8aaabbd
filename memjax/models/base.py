"""The contract of language models."""

import sys
from collections.abc import Generator
from typing import Any, Protocol, cast, runtime_checkable

import jax
from flax import nnx
from flax.nnx import reprlib
from jaxtyping import Array, Bool, Float, Int, PyTree

from memjax.status import size
from memjax_kernels._src.stored_product import Stored

#: As many tokens as full attention can hold.
LONGEST = sys.maxsize
#: A memory: a pytree of the model's own type; every leaf has the batch first.
State = Any


@runtime_checkable
class Model(Protocol):
    """State and tokens in, state and logits out.

    `LanguageModel`, `HMT` and `MPlus` are such models, and flax modules: `nnx.split`
    takes them apart.
    """

    @property
    def backbone(self) -> Any:
        """The `LanguageModel` inside a memory; without one the model itself."""
        ...

    @property
    def vocab_size(self) -> int:
        """V; tokens are in [0, V)."""
        ...

    @property
    def width(self) -> int:
        """E, of the features."""
        ...

    @property
    def window(self) -> int:
        """Preferred number of tokens per call: a block, a segment or a chunk."""
        ...

    @property
    def reach(self) -> int | None:
        """Number of last tokens that the state can hold; those before leave it.

        None where all leave a trace, or full attention refuses more.
        """
        ...

    @property
    def first_scored(self) -> int:
        """Number of tokens at each window's start whose logits may read ahead.

        Above 0 where a model reads ahead inside a window, as HMT's summary does.
        """
        ...

    @property
    def can_pad(self) -> bool:
        """Whether `features` takes `lengths`."""
        ...

    def init_state(self, batch: int, /, capacity: int | None = None) -> State:
        """The empty memory of `batch` sequences.

        `capacity` is how many tokens full attention gets room for; what compresses
        its past ignores it.
        """
        ...

    def reset(self, state: State, mask: Bool[Array, " B"], /) -> State:
        """Empties the memory of the batch elements in `mask`."""
        ...

    def remaining(self, state: State, /) -> int | None:
        """Number of further tokens that the state can hold; None without a bound."""
        ...

    def reserve(self, state: State, tokens: int, /) -> State:
        """The same memory with room for `tokens` more; outside of jit.

        Raises:
            ValueError: if it cannot hold them.
        """
        ...

    def features(
        self,
        state: State,
        tokens: Int[Array, "B T"],
        /,
        *,
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[State, Float[Array, "B T E"]]:
        """Reads tokens into the memory; returns the head's inputs.

        With `lengths`, batch element b reads its first `lengths[b]` tokens, 0 to T.
        """
        ...

    def logits(self, features: Float[Array, "*B E"], /) -> Float[Array, "*B V"]:
        """Scores of the next token, in float32."""
        ...

    def __call__(
        self, state: State, tokens: Int[Array, "B T"], /
    ) -> tuple[State, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the memory after the last."""
        ...


def named_parameters(model: Any) -> list[tuple[Any, Any]]:
    """Paths and values of all parameters; a weight as its file has it is one value."""
    return jax.tree_util.tree_leaves_with_path(
        nnx.to_pure_dict(nnx.state(model)),
        is_leaf=lambda leaf: isinstance(leaf, Stored),
    )


class Sized:
    """A model whose `repr` has its sizes, and not its parameters."""

    def _shown(self) -> dict[str, Any]:
        """Attributes of the `repr` besides the number of parameters."""
        return cast(Any, self).config.sizes

    def __nnx_repr__(self) -> Generator[Any, None, None]:
        """Of thousands of arrays nothing could be seen; `nnx.display` shows them."""
        count = sum(leaf.size for _, leaf in named_parameters(self))
        leaves = jax.tree.leaves(nnx.state(cast(nnx.Module, self)))
        yield reprlib.Object(type(self), same_line=True)
        for name, value in self._shown().items():
            yield reprlib.Attr(name, value)
        yield reprlib.Attr("parameters", count)
        held = sum(x.size * x.dtype.itemsize for x in leaves)
        yield reprlib.Attr("size", size(held))


class FixedSizeMemory(Sized):
    """Members that memories of a fixed size around a backbone share.

    Their state holds a text of any length, and rows of a call may differ in length.
    """

    backbone: Any
    can_pad = True

    def _shown(self) -> dict[str, Any]:
        return {"config": getattr(self, "config", None), "backbone": self.backbone}

    @property
    def reach(self) -> int | None:
        """None: all that was read leaves a trace."""
        return None

    @property
    def first_scored(self) -> int:
        """0: no logit has seen what it predicts."""
        return 0

    @property
    def vocab_size(self) -> int:
        """V; tokens are in [0, V)."""
        return self.backbone.vocab_size

    @property
    def width(self) -> int:
        """E, the width of the features."""
        return self.backbone.width

    def remaining(self, state: State) -> None:
        """None: without a bound."""

    def reserve(self, state: State, tokens: int) -> State:
        """The same state."""
        return state

    def logits(self, features: Float[Array, "*B E"]) -> Float[Array, "*B V"]:
        """Scores of the next token, in float32."""
        return self.backbone.logits(features)


def commit_state(params: PyTree, state: State) -> State:
    """The state, committed to its device if parameters are committed to one.

    A checkpoint's parameters are, and so is the state that a call with them returns. A
    new state is not, for which `jax.jit` would compile the first call apart.
    """
    arrays = [x for x in jax.tree.leaves(params) if x.committed]
    if not arrays or len(arrays[0].sharding.device_set) > 1:
        return state
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)
