"""MkDocs' hooks for the documentation's site: pages from outside of docs/, and links that lead there.

The documents are written for the repository. The site has the README as its first page, and the changelog, the
guide for contributors and the chart's values beside the pages of docs/; links to any other file lead to the repository.
MkDocs' own objects are Any here: a release uses `relinked` where there is no MkDocs.
"""

import os
import posixpath
import re
import unicodedata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "helm/truespec/README.md": "chart.md",
}
_FENCED = re.compile(r"^(?P<marks>`{3,}|~{3,}).*?^(?P=marks)[ \t]*$", re.M | re.S)
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(<?([^\s<>)]+)>?\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def github_slug(heading: str, separator: str) -> str:
    """The anchor that GitHub makes of a heading."""
    kept = (sign for sign in heading.strip().lower() if sign in " -_" or unicodedata.category(sign)[0] in "LN")
    return "".join(kept).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Have headings the anchors that the documents' links name."""
    config.mdx_configs["toc"]["slugify"] = github_slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of docs/."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead each link of a page to where its file is on the site, or in the repository."""
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    base = f"{config.repo_url}/blob/{os.environ.get('REPOSITORY_REF', 'main')}" if config.repo_url else None
    return relinked(markdown, source, page.file.src_uri, base)


def relinked(markdown: str, source: str, page: str | None, base: str | None) -> str:
    """A document with its links as they are to be elsewhere.

    Args:
        markdown: the document.
        source: its path in the repository, to which its links are relative.
        page: its path on the site; None = it is not on the site, and all its links lead to the repository.
        base: URL of the repository's files; None = links that would lead there become plain text.
    """

    def lead(found: re.Match[str]) -> str:
        text, target = found.groups()
        if _ELSEWHERE.match(target):
            return found[0]
        path, _, fragment = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        anchor = f"#{fragment}" if fragment else ""
        if page is not None and (ours := PAGES.get(path) or path.removeprefix("docs/")) != path:
            return f"{text}({posixpath.relpath(ours, posixpath.dirname(page) or '.')}{anchor})"
        if base is None:
            return text.removeprefix("[").removesuffix("]")
        where = base.replace("/blob/", "/raw/", 1) if text.startswith("!") else base
        return f"{text}({where}/{path}{anchor})"

    parts, end = [], 0
    for block in _FENCED.finditer(markdown):
        parts += [_LINK.sub(lead, markdown[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, _LINK.sub(lead, markdown[end:])])
