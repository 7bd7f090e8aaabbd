"""Checks of arguments: errors name the argument, its value and what is allowed."""

import difflib
from collections.abc import Sequence


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size below 1, naming it."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def check_positive(**values: float) -> None:
    """Raises ValueError for a number that is not above 0 (NaN is not), naming it."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def require_known(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    """Raises ValueError unless `value` is allowed, with the nearest that is."""
    if value in allowed:
        return
    words = [word for word in allowed if isinstance(word, str)]
    near = difflib.get_close_matches(str(value), words, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}{hint}")
