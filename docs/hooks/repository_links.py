"""Links from pages to files of the repository that are not part of the site.

They are written relative to the page, as `../memjax/nnx/memory.py`, so that they work
where the repository is read. The site has only `docs/`: there they lead to `repo_url`
of `mkdocs.yml`, or become plain text, with the path, as long as none is set. Plots of
results are copied to the site. Links of notebooks to pages get the pages' names there.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[(?P<text>[^\]\n]+)\]\((?P<target>\.\./[^)\s]+)\)")
_PAGE = re.compile(r'href="([^":]+)\.md(?=["#])')


class Link(NamedTuple):
    """A link out of `docs/`: what it stands in, and the path from the root."""

    markdown: str
    text: str
    path: str


def repository_links(markdown: str, page: str) -> Iterator[Link]:
    """The links of a page that lead out of `docs/`.

    Args:
        markdown: of the page.
        page: its path in `docs/`.
    """
    folder = posixpath.dirname(posixpath.join("docs", page))
    for match in _LINK.finditer(markdown):
        target = match["target"].split("#")[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if not path.startswith("docs/"):
            yield Link(match[0], match["text"], path)


def on_files(files: Any, config: Any) -> Any:
    """Adds the plots that pages show; mkdocs calls it before it reads the pages."""
    from mkdocs.structure.files import File

    for page in files.documentation_pages():
        if page.src_uri.endswith(".md"):
            for link in repository_links(page.content_string, page.src_uri):
                if link.path.endswith(".png") and link.path not in files.src_uris:
                    path = str(ROOT / link.path)
                    plot = File.generated(config, link.path, abs_src_path=path)
                    files.append(plot)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrites those links; mkdocs calls it for every page.

    Raises:
        ValueError: on a file that is not there, naming page and file.
    """
    for link in list(repository_links(markdown, page.file.src_uri)):
        if not (ROOT / link.path).exists():
            raise ValueError(f"{page.file.src_uri}: {link.path} does not exist")
        if link.path.endswith(".png"):
            # The site's root is docs/, one folder below the repository's.
            shown = link.markdown.replace("](../", "](")
        elif config.repo_url:
            url = f"{config.repo_url.rstrip('/')}/blob/main/{link.path}"
            shown = f"[{link.text}]({url})"
        elif "/" in link.text or link.path.endswith(link.text):
            shown = link.text
        else:
            shown = f"{link.text} (`{link.path}`)"
        markdown = markdown.replace(link.markdown, shown)
    return markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Lets links of notebooks to pages lead there: mkdocs-jupyter keeps the `.md`."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return _PAGE.sub(r'href="\1.html', html)
