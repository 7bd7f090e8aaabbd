"""What every language model of the library is, whatever remembers inside it."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

#: A memory: a pytree whose type the model chooses; every leaf has the batch first.
State = Any


@runtime_checkable
class Model(Protocol):
    """State and tokens in, state and logits out.

    `LanguageModel`, `HMT` and `MPlus` are such models, and flax modules: `nnx.split`
    takes them apart.
    """

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
        """Tokens of a call that is read quickly: a block, a segment, a chunk."""
        ...

    @property
    def first_scored(self) -> int:
        """Tokens at the start of each window whose logits may have seen them.

        Above 0 where a model reads ahead inside a window, as HMT's summary does.
        """
        ...

    def init_state(self, batch: int, /) -> State:
        """The empty memory of `batch` sequences."""
        ...

    def reset(self, state: State, mask: Bool[Array, " B"], /) -> State:
        """Empties the memory of the batch elements in `mask`."""
        ...

    def remaining(self, state: State, /) -> int | None:
        """How many more tokens the state can take; None where there is no bound."""
        ...

    def features(
        self, state: State, tokens: Int[Array, "B T"], /
    ) -> tuple[State, Float[Array, "B T E"]]:
        """Reads tokens into the memory; returns what the head sees."""
        ...

    def logits(self, features: Float[Array, "*B E"], /) -> Float[Array, "*B V"]:
        """Scores of the next token, in float32."""
        ...

    def __call__(
        self, state: State, tokens: Int[Array, "B T"], /
    ) -> tuple[State, Float[Array, "B T V"]]:
        """Next-token logits at every position, and the memory after the last."""
        ...
