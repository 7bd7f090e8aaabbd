"""Renders a chat template; the program of the process that `chat_template` starts.

A template is a stranger's program: besides Jinja's sandbox it has limits of time,
memory and output. The environment is that of transformers. Reads a request as JSON from
stdin and writes the texts, or an error, as JSON to stdout. Imports Jinja alone, so that
it starts quickly.
"""

import datetime
import json
import resource
import sys
from typing import Any

import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks what the model writes."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The text inside, whose variables end with it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class Namespace(jinja2.utils.Namespace):
    """Refuses names that begin with an underscore, which the sandbox guards."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *others = args
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"the name {name!r} is not safe")
        super().__setitem__(name, value)


class MakeDict:
    """`dict` as a template sees it, without the type's own methods."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


def raise_exception(message: str) -> None:
    """Lets a template refuse what it is given."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """The time of day, for a template's head."""
    return datetime.datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment() -> jinja2.Environment:
    """Transformers' environment: a template reaches data only, and cannot change it."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    made.filters["tojson"] = tojson
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": MakeDict(),
        "namespace": Namespace,
    }
    return made


def render(template: jinja2.Template, values: dict[str, Any], longest: int) -> str:
    """The text; ValueError if it is longer than `longest`."""
    parts, length = [], 0
    for part in template.generate(**values):
        parts.append(part)
        length += len(part)
        if length > longest:
            raise ValueError(f"it writes more than {longest:,} characters")
    return "".join(parts)


def main() -> None:
    """Answers the request."""
    request = json.load(sys.stdin)
    for name, limit in request["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))
    try:
        template = environment().from_string(request["source"])
        longest = request["longest"]
        texts = [render(template, values, longest) for values in request["values"]]
        answer = {"texts": texts}
    except MemoryError:
        answer = {"error": "it takes too much memory"}
    # A template may fail as any program does.
    except Exception as error:
        answer = {"error": str(error) or type(error).__name__}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
