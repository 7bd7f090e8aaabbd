"""Checks of arguments: errors name the argument, its value and what is allowed."""

import dataclasses
import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

#: Characters of a value, and names of a list, that a message shows.
SHOWN_CHARACTERS, SHOWN_NAMES = 200, 10


def short(value: Any) -> str:
    """A value for a message, truncated if long.

    Plain values are quoted, as `repr` does; exceptions give their message.
    """
    try:
        text = str(value) if isinstance(value, BaseException) else repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number too long
        text = f"a value of type {type(value).__name__}"
    return _cut(text)


def printable(text: str, keep: str = "") -> str:
    """The text with control characters escaped: a terminal would obey them.

    Args:
        text: of any origin.
        keep: control characters that stay.
    """
    escape = ("Cc", "Cs", "Zl", "Zp")
    return "".join(
        repr(c)[1:-1] if unicodedata.category(c) in escape and c not in keep else c
        for c in text
    )


def listed(names: Iterable[Any]) -> str:
    """Names for a message: the first ten, and the number of the others."""
    names = list(names)
    shown = ", ".join(map(short, names[:SHOWN_NAMES]))
    more = len(names) - SHOWN_NAMES
    return f"{shown} and {more:,} more" if more > 0 else shown


def joined(faults: Sequence[str]) -> str:
    """Faults for a message: the first ten, and the number of the others."""
    more = len(faults) - SHOWN_NAMES
    rest = (f"and {more:,} more",) if more > 0 else ()
    return "; ".join((*map(_cut, faults[:SHOWN_NAMES]), *rest))


def _cut(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS]}... ({len(text):,} characters)"


#: Largest sizes by name. Beyond them a program compiles or runs for hours, or runs out
#: of memory, without a message.
LARGEST = {
    "num_layers": 1024,
    "order": 8640,  # of HiPPO, whose matrix is order by order; the paper's largest
    "memory_tokens": 2**20,
    "bank_blocks": 2**16,
    "window": 2**24,
    "block": 2**24,
    "capacity": 2**24,
    "chunk_size": 2**16,  # whose products are chunk by chunk
    "tokens": 2**24,
}
#: Of any other: positions and steps are int32.
LARGEST_SIZE = 2**31 - 1


def check_sizes(*, least: int = 1, **sizes: int) -> None:
    """Raises ValueError for a size below `least` or above that in `LARGEST`, naming it.

    And for anything but an integer: True is no size.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise ValueError(f"{name} must be an integer, got {short(size)}")
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
        most = LARGEST.get(name, LARGEST_SIZE)
        if size > most:
            raise ValueError(f"{name} must be at most {most:,}, got {short(size)}")


def check_numbers(**values: Any) -> None:
    """Raises ValueError, with its name, for anything but a number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} must be a number, got {short(value)}")


def check_flags(config: Any) -> None:
    """Raises ValueError unless a config's options to turn on are True or False.

    A text would count as True, "no" too.
    """
    for field in dataclasses.fields(config):
        if isinstance(field.default, bool):
            require_instance(field.name, getattr(config, field.name), bool)


def check_positive(*, most: float = 1e38, **values: float) -> None:
    """Raises ValueError, with its name, for a number that is not above 0, or NaN.

    Nor may it be above `most`; beyond 1e38 it would be infinite in float32.
    """
    check_numbers(**values)
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
        if value > most:
            raise ValueError(f"{name} must be at most {most:g}, got {short(value)}")


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed out of range."""
    whole = hasattr(seed, "__index__") and not isinstance(seed, bool)
    if not whole or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {short(seed)}")


def require_instance(name: str, value: Any, kind: type) -> None:
    """Raises ValueError unless `value` is of this kind."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, got {short(value)}")


def require_all(name: str, values: Any, kind: type) -> None:
    """Raises ValueError unless `values` is a sequence of this kind alone."""
    require_instance(name, values, Sequence)
    for i, value in enumerate(values):
        require_instance(f"{name}[{i}]", value, kind)


def check_key(key: Any) -> None:
    """Raises ValueError unless `key` may be a key of `jax.random`."""
    # One key, typed or as jax.random.PRNGKey gives it.
    kind, axes = str(getattr(key, "dtype", "")), getattr(key, "ndim", None)
    if axes != (0 if kind.startswith("key<") else 1 if kind == "uint32" else -1):
        raise ValueError(f"key must be a jax.random.key(...), got {short(key)}")


def nearest(value: Any, known: Sequence[str]) -> str:
    """Hint for a message: the most similar name; "" if none is similar."""
    near = difflib.get_close_matches(str(value)[:SHOWN_CHARACTERS], known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def require_known(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    """Raises ValueError unless `value` is allowed, with the most similar that is."""
    if value in allowed:
        return
    words = [word for word in allowed if isinstance(word, str)]
    raise ValueError(
        f"{name} must be one of {tuple(allowed)}, got {short(value)}"
        f"{nearest(value, words)}"
    )
