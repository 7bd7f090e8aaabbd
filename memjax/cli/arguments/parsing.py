"""Parsing of a command line into the call of a command, or an error.

`train`, `finetune` and `aot` take a configuration: a preset by its name, or the file of
any run with `--config`. Its fields are their options, so the parser is built for it.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
import tyro._errors

from memjax.checks import nearest, require_known, short
from memjax.cli.arguments.mechanisms import REGISTRY
from memjax.cli.arguments.refusals import explained

Call = Callable[[], int]


class Configured(NamedTuple):
    """A command that takes a configuration.

    Attributes:
        function: takes the configuration as its argument `config`.
        presets: configurations by name.
        read: returns the configuration of a file, and further options that it implies.
    """

    function: Callable[..., int]
    presets: Callable[[], Mapping[str, Any]]
    read: Callable[[Path], tuple[Any, dict[str, Any]]]


def deferred(function: Callable[..., int]) -> Callable[..., Call]:
    """The command as a function that returns the call instead of making it.

    This separates a refused option from an error while the command runs.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        return functools.partial(function, *args, **kwargs)

    return call


def parse(
    argv: list[str],
    commands: Mapping[str, Callable[..., int]],
    configured: Mapping[str, Configured],
) -> Call:
    """The call for a command line.

    Raises:
        ValueError: the line is wrong; the message says where.
        SystemExit: with code 0, after --help.
    """
    names = (*configured, *commands)
    if not argv:
        raise ValueError(f"a command is missing: {', '.join(names)}")
    name, words = argv[0], argv[1:]
    require_known("command", name, names)
    if name in configured:
        return _configured(name, words, configured[name])
    return _parsed(deferred(commands[name]), words, name)


def _configured(name: str, words: list[str], command: Configured) -> Call:
    """The call of a command that takes a configuration."""
    file, words = taken(words, "--config")
    preset, words = _preset(words)
    implied: dict[str, Any] = {}
    if file is not None:
        if preset is not None:
            raise ValueError(
                f"give either a preset or --config, got {short(preset)} and "
                f"--config {short(file)}"
            )
        config, implied = command.read(Path(file))
        shown = f"{name} --config {file}"
    else:
        presets = command.presets()
        _require_preset(name, preset, tuple(presets))
        config, shown = presets[preset or ""], f"{name} {preset}"
    words = for_all_stages(words, config)
    return _parsed(_with_config(command.function, config, implied), words, shown)


def for_all_stages(words: list[str], config: Any) -> list[str]:
    """The words, with options that all stages have given to each of them.

    `--loop.steps 5` becomes `--stage1.loop.steps 5 --stage2.loop.steps 5`, but not for
    a stage whose own option is on the line.
    """
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    stages = {n: _fields(x) for n, x in values.items() if hasattr(x, "loop")}
    if len(stages) < 2:
        return words
    shared = set.intersection(*stages.values()) - {*values}
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    found: list[str] = []
    for option, *rest in groups:
        name, equals, value = option.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        # A flag is `--no-field` where it is turned off.
        field = name.partition(".")[0].replace("-", "_")
        if not {field, field.removeprefix("no_")} & shared:
            found += [option, *rest]
            continue
        for stage in stages:
            if (own := f"--{stage}.{name}") not in given:
                found += [f"{own}{equals}{value}", *rest]
    return found


def _fields(config: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}


def _parsed(call: Callable[..., Call], words: list[str], command: str) -> Call:
    """The result of the parser; a refusal becomes a ValueError.

    Args:
        call: a deferred command.
        words: of the line, without the command.
        command: its name, and the preset.
    """
    settings: Any = {
        "prog": f"memjax {command}",
        "config": (tyro.conf.CascadeSubcommandArgs,),
        "registry": REGISTRY,
    }

    def options() -> list[str]:
        page = io.StringIO()
        with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
            tyro.cli(call, args=["--help"], **settings)
        found = (word.strip(",") for word in page.getvalue().split())
        return [word for word in found if word.startswith("--") and word != "--help"]

    def refuse(event: tyro._errors.ParseErrorEvent) -> None:
        if line := explained(event, words, command, options):
            raise ValueError(line)

    with tyro._errors.on_parse_error(refuse):
        return tyro.cli(call, args=words, **settings)


def taken(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option, or None, and the other words."""
    for i, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.partition("=")[2], words[:i] + words[i + 1 :]
        if word == option:
            if i + 1 == len(words):
                raise ValueError(f"{option} needs a value")
            return words[i + 1], words[:i] + words[i + 2 :]
    return None, words


def _preset(words: list[str]) -> tuple[str | None, list[str]]:
    """The first word that is neither an option nor a value, and the other words."""
    before = ["", *words]
    for i, word in enumerate(words):
        value = before[i].startswith("-") and "=" not in before[i]
        if not word.startswith("-") and not value:
            return word, words[:i] + words[i + 1 :]
    return None, words


def _require_preset(command: str, preset: str | None, known: tuple[str, ...]) -> None:
    """Raises ValueError unless the preset is known; the list is too long for a line."""
    where = f"`memjax {command} --help` lists them"
    if preset is None:
        raise ValueError(
            f"a preset is missing, such as {known[0]} or {known[1]}, or --config FILE; "
            f"{where}"
        )
    if preset not in known:
        raise ValueError(f"no preset {short(preset)}{nearest(preset, known)}; {where}")


def _with_config(
    function: Callable[..., int], config: Any, implied: Mapping[str, Any]
) -> Callable[..., Call]:
    """The command with this configuration, and the implied defaults."""
    call = deferred(function)
    # Otherwise the parser takes the types of the command itself.
    del call.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    kind = Annotated[type(config), tyro.conf.arg(name="")]
    given = {"config": config, **implied}
    parameters = [
        part.replace(
            default=given.get(name, part.default),
            annotation=kind if name == "config" else part.annotation,
        )
        for name, part in inspect.signature(function).parameters.items()
    ]
    call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    call.__annotations__ = function.__annotations__ | {"config": kind}
    return call
