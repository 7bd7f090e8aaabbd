"""Settings of a program, whose types say what is allowed, and its command line.

    @dataclasses.dataclass(frozen=True)
    class Config(Options):
        steps: Count = 100
        seeds: Seeds = (0, 1, 2)

    def main(config: Flags[Config]) -> None: ...

Settings are checked where they are made, before any work. All items of a list differ,
and a list is empty only where that is its default.
"""

import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin
from typing import get_type_hints as hints_of

import tyro

from memjax.checks import LARGEST, LARGEST_SIZE, require_known
from memjax.leaving import flushed
from memjax.training.locks.lock import LockedError

#: Of an interval over seeds.
MIN_SEEDS = 3


def within(least: float, most: float = LARGEST_SIZE) -> Callable[[str, float], None]:
    """Allows numbers from `least` to `most`."""

    def check(name: str, value: float) -> None:
        # NaN is in no range.
        if not least <= value <= most:
            raise ValueError(f"{name} must be in [{least}, {most}], got {value}")

    return check


def among(*known: str) -> Callable[[str, str], None]:
    """Allows these names."""
    return lambda name, value: require_known(name, value, known)


def ascending(name: str, values: Sequence[float]) -> None:
    """Raises ValueError unless numbers ascend."""
    if sorted(values) != [*values]:
        raise ValueError(f"{name} must ascend, got {values}")


def enough_seeds(name: str, seeds: Sequence[int]) -> None:
    """Raises ValueError unless there are seeds enough for an interval over them."""
    if len(seeds) < MIN_SEEDS:
        raise ValueError(f"{name} must be at least {MIN_SEEDS} seeds, got {seeds}")


def whole_windows(name: str, tokens: int, window: int) -> None:
    """Raises ValueError unless tokens are a multiple of windows, two at least."""
    if tokens % window or tokens < 2 * window:
        raise ValueError(f"{name} must be 2 or more times {window=}, got {tokens}")


def folder(name: str, path: Path, of_file: bool = False) -> None:
    """Raises ValueError unless a folder, or that of a file, can be made and written."""
    there = path.absolute().parent if of_file else path.absolute()
    while not os.path.lexists(there):
        there = there.parent
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        why = f"{name} must be in a folder that can be written, got {path}: not {there}"
        raise ValueError(why) from error


def require_corpus(name: str, source: str, held_out: int = 8) -> None:
    """Raises ValueError if a source of documents is a folder that is missing.

    `held_out` are the test documents of each kind that it should have.
    """
    form, _, path = source.partition(":")
    if form == "folder" and not Path(path).exists():
        command = f"python -m experiments.corpus.comparison --destination {path}"
        command += f" --held-out {held_out}" * (held_out > 8)
        raise ValueError(
            f"{name} must be a folder that exists, got {source}: make it by {command}"
        )


#: A folder that is written, and a file.
Folder = Annotated[Path, folder]
Output = Annotated[Path, functools.partial(folder, of_file=True)]
Count = Annotated[int, within(1)]
Counts = Annotated[tuple[Count, ...], ascending]
Natural = Annotated[int, within(0)]
Tokens = Annotated[int, within(1, LARGEST["tokens"])]
#: A learning rate.
Rate = Annotated[float, within(1e-8, 1.0)]
Seed = Annotated[int, within(0, 2**32 - 1)]
Seeds = Annotated[tuple[Seed, ...], enough_seeds]
Chosen = TypeVar("Chosen")
#: Settings as the argument of `main`: their options have no prefix.
Flags = Annotated[Chosen, tyro.conf.arg(name="")]


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings that are checked by the types of their fields."""

    def __post_init__(self):
        hints = hints_of(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == () != field.default:
                raise ValueError(f"{field.name} must not be empty, got ()")
            _check(field.name, value, hints[field.name])


def _check(name: str, value: Any, hint: Any) -> None:
    kind, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    kinds = get_args(kind)
    if get_origin(kind) is Literal:
        require_known(name, value, kinds)
    if get_origin(kind) is tuple:
        if kinds[-1] is ...:
            if len({*value}) < len(value):
                raise ValueError(f"{name} must all be distinct, got {value}")
            kinds = kinds[:1] * len(value)
        for i, (item, of) in enumerate(zip(value, kinds, strict=True)):
            _check(f"{name}[{i}]", item, of)
    for check in filter(callable, limits):
        check(name, value)


def run(main: Callable[..., int | None]) -> NoReturn:
    """Runs a program with its command line; bad input is one line and exit code 2."""

    @functools.wraps(main)
    def checked(**given: Any) -> int | None:
        hints = hints_of(main, include_extras=True)
        for name, value in given.items():
            _check(name, value, hints[name])
        return main(**given)

    with flushed():
        try:
            code = tyro.cli(checked, description=sys.modules[main.__module__].__doc__)
        except (ValueError, LockedError) as error:
            print(f"error: {error}", file=sys.stderr)
            code = 2
        sys.exit(code)
