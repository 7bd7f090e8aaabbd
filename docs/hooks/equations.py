r"""Turns the LaTeX of the pages into MathML when the site is built.

Browsers draw MathML by themselves: the site needs no script and no font of another
host. An equation is `$...$` in a line, or `$$...$$` in lines of its own.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What the Markdown extension arithmatex makes of an equation.
_EQUATION = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<latex>.*?)\\[)\]]</(?P=tag)>',
    re.DOTALL,
)
# A command that the converter does not know stays in the text as it is.
_UNKNOWN = re.compile(r"\\[A-Za-z]+")


def on_page_content(text: str, page: Any, **_: Any) -> str:
    """Replaces the equations of a page; mkdocs calls it for every page.

    Raises:
        ValueError: on a command of LaTeX that is not known, naming the page.
    """

    def mathml(match: re.Match[str]) -> str:
        latex = html.unescape(match["latex"])
        display = "block" if match["tag"] == "div" else "inline"
        found = convert(latex, display=display)
        if unknown := _UNKNOWN.search(found):
            where = page.file.src_uri
            raise ValueError(f"{where}: {unknown[0]} is not known in {latex!r}")
        return found

    return _EQUATION.sub(mathml, text)
