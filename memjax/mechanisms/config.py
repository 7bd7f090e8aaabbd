"""The configuration of a mechanism, as language models and training use it."""

from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import PyTree

from memjax.checks import short
from memjax.mechanisms.base import Mechanism
from memjax.mechanisms.layers.heads import HeadsConfig


@runtime_checkable
class MechanismConfig(Protocol):
    """Configuration of a mechanism: a frozen dataclass.

    `memjax.mechanisms.MECHANISMS` lists those of the package by name.
    `MechanismDefaults` has the optional members.
    """

    name: ClassVar[str]

    @property
    def model_dim(self) -> int:
        """Width of the layer's input and output."""
        ...

    def build(self) -> Mechanism:
        """The mechanism of these sizes."""
        ...

    def param_axes(self) -> PyTree:
        """Sharding axes of the parameters: their tree, with a tuple for each array.

        A tuple has "model" (divided as the model's width is), "heads" or None for each
        axis of the array; missing ones at the end are None.
        """
        ...

    @property
    def attention(self) -> HeadsConfig | None:
        """Heads of its attention, or of a hybrid's window; None without attention."""
        ...

    @property
    def plain_attention(self) -> HeadsConfig | None:
        """Itself where the state is a cache of keys and values alone, else None."""
        ...

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens; None without a limit."""
        ...

    @property
    def tokens_per_call(self) -> int | None:
        """Preferred number of tokens per call: a window or block; None for any."""
        ...

    @property
    def divides_tokens(self) -> bool:
        """Whether devices may share the tokens of a sequence inside the mechanism."""
        ...

    def keys_per_query(self, length: int) -> float:
        """Mean number of keys that a query attends to in a text of `length` tokens."""
        ...

    def within(self, length: int) -> "MechanismConfig":
        """The same function of texts of up to `length` tokens, with a smaller state."""
        ...


def require_config(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a mechanism's configuration."""
    if not hasattr(value, "build") or isinstance(value, type):
        raise ValueError(
            f"{name} must be a mechanism's configuration, such as "
            f"memjax.mechanisms.TrellisConfig(...), got {short(value)}"
        )


class MechanismDefaults:
    """Optional members of `MechanismConfig`: no attention and no limits."""

    @property
    def attention(self) -> HeadsConfig | None:
        """None: a mechanism without attention."""
        return None

    @property
    def plain_attention(self) -> HeadsConfig | None:
        """None: a mechanism that compresses."""
        return None

    @property
    def max_length(self) -> int | None:
        """None: texts of any length."""
        return None

    @property
    def tokens_per_call(self) -> int | None:
        """None: any number."""
        return None

    @property
    def divides_tokens(self) -> bool:
        """False: each device reads all tokens."""
        return False

    def keys_per_query(self, length: int) -> float:
        """0: a mechanism without attention."""
        return 0.0

    def within(self, length: int) -> "MechanismConfig":
        """Itself: the state has one size."""
        return self  # pyright: ignore[reportReturnType]
