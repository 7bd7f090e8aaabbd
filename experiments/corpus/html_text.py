"""HTML pages of manuals and essays as plain text."""

import re
from html.parser import HTMLParser

_PARAGRAPHS = frozenset(
    "p div h1 h2 h3 h4 h5 h6 blockquote pre table section dl".split()
)
_LINES = frozenset("br li tr dt dd ul ol hr".split())
_SKIPPED_TAGS = frozenset("script style head nav footer".split())
_SKIPPED_CLASSES = frozenset(
    "headerlink sphinxsidebar related chlinktop chlinkbot chlinkprevnexttop "
    "chlinkprevnextbot".split()
)
_BULLET = "* "
_MAIN = re.compile(r'<([a-z]+)\b[^>]*\brole="main"')


def html_to_text(page: str) -> str:
    """Returns the readable text of a page: paragraphs apart, `<pre>` as it stands.

    Only the element with role="main" is read where there is one. Scripts, navigation
    and Sphinx's link marks are left out.
    """
    main = _MAIN.search(page)
    extractor = _Extractor()
    extractor.feed(page[main.start() :] if main else page)
    extractor.close()
    text = "".join(extractor.parts)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


class _Extractor(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._inside_pre = 0
        self._at_line_start = True
        self._skipping = ""
        self._skip_depth = 0
        self._main = ""
        self._main_depth = 0
        self._past_main = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if self._skipping:
            self._skip_depth += tag == self._skipping
            return
        classes = (attributes.get("class") or "").split()
        if tag in _SKIPPED_TAGS or not _SKIPPED_CLASSES.isdisjoint(classes):
            self._skipping, self._skip_depth = tag, 1
            return
        if attributes.get("role") == "main":
            self._main = tag
        self._main_depth += tag == self._main
        self._break(tag)
        self._inside_pre += tag == "pre"
        if tag == "li":
            self.parts.append(_BULLET)

    def handle_endtag(self, tag: str) -> None:
        if self._skipping:
            self._skip_depth -= tag == self._skipping
            if not self._skip_depth:
                self._skipping = ""
            return
        if self._inside_pre and tag == "pre":
            self._inside_pre -= 1
        if tag not in ("br", "hr", "li"):
            self._break(tag)
        if tag == self._main:
            self._main_depth -= 1
            self._past_main = self._past_main or self._main_depth == 0

    def handle_data(self, data: str) -> None:
        if self._skipping or self._past_main:
            return
        if not self._inside_pre:
            data = re.sub(r"\s+", " ", data)
            data = data.lstrip() if self._at_line_start else data
        if data:
            self.parts.append(data)
            self._at_line_start = data.endswith("\n")

    def _break(self, tag: str) -> None:
        if self.parts and self.parts[-1] == _BULLET:
            return
        if tag in _PARAGRAPHS:
            self.parts.append("\n\n")
        elif tag in _LINES:
            self.parts.append("\n")
        else:
            return
        self._at_line_start = True
