"""From words to a call of a command, or to an error that says what is wrong.

`train` and `finetune` take a configuration: a preset by its name, or with `--config`
the file of any run. Its fields are their options, so the parser is built for that one.
"""

import contextlib
import functools
import inspect
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from memjax.checks import nearest, require_known, short
from memjax.cli.arguments.mechanisms import REGISTRY
from memjax.cli.arguments.unframed import explained

Call = Callable[[], int]


class Configured(NamedTuple):
    """A command that takes a configuration.

    Attributes:
        function: its argument `config` is the configuration.
        presets: configurations by name.
        read: the configuration of a file, and further options that it implies.
    """

    function: Callable[..., int]
    presets: Callable[[], Mapping[str, Any]]
    read: Callable[[Path], tuple[Any, dict[str, Any]]]


def deferred(function: Callable[..., int]) -> Callable[..., Call]:
    """A command whose parsing returns the call instead of making it.

    So a wrong option can be told from an error while the command runs.
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
    """The call that a command line asks for.

    Raises:
        ValueError: the line is wrong; the message says where.
        SystemExit: with code 0, after --help.
    """
    names = (*configured, *commands)
    if not argv:
        raise ValueError(f"a command is missing: {', '.join(names)}")
    if argv[0] not in ("--help", "-h"):
        require_known("command", argv[0], names)
    if argv[0] in configured:
        return _configured(argv[0], argv[1:], configured[argv[0]])
    app = tyro.extras.SubcommandApp()
    for name, function in commands.items():
        app.command(name=name)(deferred(function))
    return _explaining(
        lambda words: app.cli(args=words, prog="memjax", registry=REGISTRY),
        argv,
        argv[:1],
    )


def _configured(name: str, words: list[str], command: Configured) -> Call:
    """The call of a command that takes a configuration."""
    file, words = _taken(words, "--config")
    preset, words = _preset(words)
    implied: dict[str, Any] = {}
    if file is not None:
        if preset is not None:
            raise ValueError(
                f"give either a preset or --config, got {short(preset)} and "
                f"--config {short(file)}"
            )
        config, implied = command.read(Path(file))
        shown = f"memjax {name} --config {file}"
    else:
        presets = command.presets()
        _require_preset(name, preset, tuple(presets))
        config, shown = presets[preset or ""], f"memjax {name} {preset}"
    call = _with_config(command.function, config, implied)
    parser = lambda words: tyro.cli(
        call,
        args=words,
        prog=shown,
        config=(tyro.conf.CascadeSubcommandArgs,),
        registry=REGISTRY,
    )
    return _explaining(parser, words, shown.split()[1:], skip=0)


def _taken(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option, None if it is not there, and the other words."""
    for i, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.partition("=")[2], words[:i] + words[i + 1 :]
        if word == option:
            if i + 1 == len(words):
                raise ValueError(f"{option} needs a value")
            return words[i + 1], words[:i] + words[i + 2 :]
    return None, words


def _preset(words: list[str]) -> tuple[str | None, list[str]]:
    """The first word that is neither an option nor its value, and the others."""
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
    """The command with this configuration, and other defaults of some options."""
    call = deferred(function)
    # Else the parser would ask the command itself for its types.
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


def _explaining(
    parser: Callable[[list[str]], Call],
    words: list[str],
    shown: list[str],
    skip: int = 1,
) -> Call:
    """What the parser gives; its complaint becomes a ValueError.

    Args:
        parser: of tyro; prints a framed page and exits where a line is wrong.
        words: the line.
        shown: the command with its preset, for the message.
        skip: words of the line that name the command.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return parser(words)
    except SystemExit as stop:
        if stop.code != 2:
            raise
    options = lambda: _options(parser, words[:skip])
    raise ValueError(explained(complaint.getvalue(), words[skip:], shown, options))


def _options(parser: Callable[[list[str]], Any], command: list[str]) -> list[str]:
    """The names of a command's options, as its help has them."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        parser([*command, "--help"])
    found = re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", page.getvalue())
    return [name for name in dict.fromkeys(found) if name != "--help"]
