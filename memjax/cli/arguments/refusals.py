"""One line for each way in which tyro refuses a command line.

tyro passes the refusal to a hook before it prints a page. The hook is private to tyro:
pyproject.toml pins the minor version, and the tests hold every line.
"""

import difflib
import sys
from collections.abc import Callable, Sequence

import tyro._errors as errors
from tyro._arguments import ArgumentDefinition

from memjax.checks import SHOWN_CHARACTERS, short

#: tyro's names of kinds of values.
KINDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "INT INT": "two whole numbers",
    "{None}|INT": "a whole number or None",
    "{None}|FLOAT": "a number or None",
    "{None}|{INT INT}": "two whole numbers or None",
    "{[INT [INT ...]]}|{auto}": "whole numbers or auto",
}
Options = Callable[[], Sequence[str]]


def explained(
    event: errors.ParseErrorEvent, words: Sequence[str], command: str, options: Options
) -> str | None:
    """The option, its value and the allowed values; None leaves the message to tyro.

    Args:
        event: of the hook.
        words: of the line, without the command.
        command: its name, and the preset.
        options: returns the names of all its options.
    """
    match event:
        case errors.UnrecognizedArgs():
            line = _unknown(event.tokens[0], words, options)
        case errors.InvalidChoice():
            choices = ", ".join(event.choices)
            near = _nearest(event.value, event.choices, 1)
            name = event.argument.display_name()
            line = f"{name} must be one of {choices}, got {short(event.value)}{near}"
        case errors.BadValue(reason="too_few_values"):
            name = event.argument.display_name()
            if name.startswith("-"):
                line = f"{name} needs a value"
            else:
                line = _misspelt(words, options) or f"{name} is missing"
        case errors.MissingArgs():
            about = "; ".join(_missing(found.arg) for found in event.missing_arguments)
            line = _misspelt(words, options)
            line = line or f"{command.split()[0]} lacks an argument: {about}"
        case errors.InstantiationFailure(argument=None):
            line = _of_group(event.message)
        case errors.InstantiationFailure():
            assert event.argument is not None
            name, kind = event.argument.display_name(), event.argument.lowered.metavar
            wanted = KINDS.get(str(kind), kind)
            line = f"{name} must be {wanted}, got {_given(name, words)}"
        case _:
            return None
    if line.startswith(("--", "no option")):
        line += f"; see memjax {command} --help"
    return line


def _missing(argument: ArgumentDefinition) -> str:
    """The help of an argument; an option's with its name."""
    name, text = argument.display_name(), argument.field.helptext or ""
    text = " ".join(str(text).split()).strip(".")
    return f"{name}, {text}" if name.startswith("-") else text


def _of_group(message: str) -> str:
    """The message of a configuration, which names the field, with the path to it."""
    # Only the exception that tyro handles now has the path, such as "config.loop".
    path = str(getattr(sys.exception(), "arg", ""))
    group = path.removeprefix("__tyro-dummy-inner__").strip(".")
    group = group.removeprefix("config").strip(".")
    names_a_field = message.partition(" ")[0].isidentifier()
    return f"{group}.{message}" if group and names_a_field else message


def _unknown(token: str, words: Sequence[str], options: Options) -> str:
    """An option that does not exist, with the nearest, or a surplus word."""
    if token.startswith("-"):
        name = token.partition("=")[0]
        return f"no option {short(name)}{_nearest(name, options(), 3)}"
    before = words[words.index(token) - 1] if token in words[1:] else None
    behind = f" after {before}" if before else ""
    return f"{short(token)}{behind} is one word too many"


def _misspelt(words: Sequence[str], options: Options) -> str:
    """The first option that does not exist: its value may have gone elsewhere."""
    known = options()
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name.replace("_", "-") not in known:
            return f"no option {short(name)}{_nearest(name, known, 3)}"
    return ""


def _given(option: str, words: Sequence[str]) -> str:
    """The value of an option on the line."""
    for i, word in enumerate(words):
        if word.startswith(f"{option}="):
            return short(word.partition("=")[2])
        if word == option:
            values = []
            for value in words[i + 1 :]:
                if value.startswith("--"):
                    break
                values.append(value)
            return short(" ".join(values))
    return "another"


def _nearest(name: str, known: Sequence[str], most: int) -> str:
    near = difflib.get_close_matches(name[:SHOWN_CHARACTERS], known, n=most)
    # Without quotes: options are shown as they are typed.
    either = " or ".join(", ".join(near).rsplit(", ", 1))
    return f" (did you mean {either}?)" if near else ""
