"""What the parser says on a framed page, said in a line.

The page is taken apart by its own phrases. One that is not known is given whole,
without the frame.
"""

import difflib
import re
from collections.abc import Callable, Sequence

from memjax.checks import SHOWN_CHARACTERS, short

#: What the parser calls kinds of values.
KINDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "INT INT": "two whole numbers",
    "{None}|INT": "a whole number or None",
    "{None}|FLOAT": "a number or None",
    "{None}|{INT INT}": "two whole numbers or None",
}
_FRAME = re.compile("[\u2500-\u257f]")
_TAIL = re.compile(r"(?:For full helptext|Perhaps you meant|Available subcommands).*")
_BOLD = re.compile(r"\[/?[a-z ]+\]")


def explained(
    page: str,
    words: Sequence[str],
    command: Sequence[str],
    options: Callable[[], Sequence[str]],
) -> str:
    """Which option, what it got and what is allowed.

    Args:
        page: what the parser printed.
        words: the line, without the command.
        command: its name, and the preset.
        options: the names of all its options, asked for where one is not known.
    """
    said = " ".join(_BOLD.sub("", _FRAME.sub(" ", page)).split())
    for pattern, explain in _RULES:
        if found := pattern.search(said):
            line = explain(found, words, options)
            if line.startswith(("--", "no option")):
                line += f"; see memjax {' '.join(command)} --help"
            return line
    return _TAIL.sub("", said).strip()


def _bad_value(found: re.Match, words: Sequence[str], _: object) -> str:
    """A value of the wrong kind, or one that a configuration refuses."""
    option, reason = found["name"], _TAIL.sub("", found["reason"]).strip()
    reason, _, about = reason.partition(" Argument helptext: ")
    if not option.startswith("--"):
        # A group of fields is refused as a whole, and its message names the field.
        group = option.removeprefix("__tyro-dummy-inner__").strip(".")
        group = re.sub(r"^config\.?", "", group)
        return f"{group}.{reason}" if group and re.match(r"\w+ ", reason) else reason
    of = re.escape(option)
    kind = re.match(rf"{of} ((?:[A-Z]+|\{{.*?\}})(?:[ |](?:[A-Z]+|\{{.*?\}}))*)", about)
    wanted = KINDS.get(kind[1], kind[1]) if kind else f"of its kind ({reason})"
    return f"{option} must be {wanted}, got {_given(option, words)}"


def _bad_choice(found: re.Match, words: Sequence[str], _: object) -> str:
    choices = re.findall(r"'(.*?)'", found["choices"])
    near = _nearest(found["value"], choices, 1)
    return (
        f"{found['name']} must be one of {', '.join(choices)}, got "
        f"{short(found['value'])}{near}"
    )


def _unknown(
    found: re.Match, words: Sequence[str], options: Callable[[], Sequence[str]]
) -> str:
    """Words that are no option, and those that may have been meant."""
    token = _TAIL.sub("", found["tokens"]).split(", ")[0].strip()
    if token.startswith("-"):
        name = token.partition("=")[0]
        return f"no option {short(name)}{_nearest(name, options(), 3)}"
    before = words[words.index(token) - 1] if token in words[1:] else None
    behind = f" after {before}" if before else ""
    return f"{short(token)}{behind} is one word too many"


def _no_value(
    found: re.Match, words: Sequence[str], options: Callable[[], Sequence[str]]
) -> str:
    if found["name"].startswith("-"):
        return f"{found['name']} needs a value"
    return _misspelt(words, options) or f"{found['name']} is missing"


def _misspelt(words: Sequence[str], options: Callable[[], Sequence[str]]) -> str:
    """The first option that there is not: its value may have gone elsewhere."""
    known = options()
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name.replace("_", "-") not in known:
            return f"no option {short(name)}{_nearest(name, known, 3)}"
    return ""


def _missing(
    found: re.Match, words: Sequence[str], options: Callable[[], Sequence[str]]
) -> str:
    if misspelt := _misspelt(words, options):
        return misspelt
    about = (
        _TAIL.sub("", found["about"])
        .replace(". (required)", ";")
        .replace(" (required)", ";")
        .strip("; ")
    )
    about = re.sub("^[A-Z]+ ", "", about)
    return f"{found['command']} lacks an argument: {about}"


_RULES: tuple[tuple[re.Pattern, Callable[..., str]], ...] = (
    (re.compile(r"Error parsing (?P<name>\S+): (?P<reason>.*)"), _bad_value),
    (
        re.compile(
            r"invalid choice '(?P<value>.*?)' for argument '(?P<name>\S+)'\. "
            r"Expected one of \((?P<choices>.*?)\)"
        ),
        _bad_choice,
    ),
    (re.compile(r"Missing value for argument '(?P<name>\S+)'"), _no_value),
    (re.compile(r"Missing from memjax (?P<command>\S+): (?P<about>.*)"), _missing),
    (re.compile(r"Unrecognized options: (?P<tokens>.*)"), _unknown),
)


def _given(option: str, words: Sequence[str]) -> str:
    """What stands behind an option on the line."""
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
    return f" (did you mean {_either(near)}?)" if near else ""


def _either(names: Sequence[str]) -> str:
    """Names with commas and an "or", without quotes."""
    return " or ".join(", ".join(names).rsplit(", ", 1))
