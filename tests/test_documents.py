"""The documents: every relative link and anchor leads somewhere, and every `truespec` command shown is one."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

from tests.support.command_lines import fault, in_shell
from tests.support.loops import for_each
from tests.support.project_files import ROOT, project_files
from tests.test_architecture import ROOMS
from tools.site import github_slug

_FENCE = re.compile(r"^(?P<marks>`{3,}|~{3,})(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=marks)[ \t]*$", re.M | re.S)
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
_LINK = re.compile(
    r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^\s<>)]+)>?(?:\s+\"[^\"]*\")?\s*\)"
    r"|\b(?:src|srcset|href)=\"([^\"]+)\""
)
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*$", re.M)
_ANCHOR = re.compile(r"\b(?:id|name)=\"([^\"]+)\"")
_SHELLS = ("", "sh", "bash", "shell", "console", "text")
# History: commands of the changelog, and of a section that says how and when it was measured, are those of their day.
_HISTORY = {"CHANGELOG.md"}
_RECORD = re.compile(r"^<!-- (?P<by>[\w-]+)[^\n]*: [^\n]* -->\n.*?^<!-- end of (?P=by)[^\n]* -->\n", re.M | re.S)


def documents() -> list[Path]:
    """Every Markdown file that is part of the project."""
    return [ROOT / name for name in project_files("*.md")]


each_document = for_each(documents(), lambda path: str(path.relative_to(ROOT)))


def prose(path: Path) -> str:
    """The text without code."""
    return _CODE.sub("`code`", _FENCE.sub("", path.read_text(encoding="utf-8")))


def current(path: Path) -> str:
    """The text without what is history."""
    return "" if path.name in _HISTORY else _RECORD.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """What a fragment may name, as GitHub makes it of headings."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found: set[str] = set(_ANCHOR.findall(text))
    for heading in _HEADING.findall(text):
        slug = github_slug(re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading), "-")  # of links their text
        number, name = 0, slug
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found


def links(path: Path) -> Iterator[str]:
    """Targets that lie within the project."""
    for written, embedded in _LINK.findall(prose(path)):
        target = written or embedded
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


@each_document
def test_links_and_anchors_lead_somewhere(path: Path) -> None:
    broken = []
    for target in links(path):
        place, _, fragment = unquote(target).partition("#")
        file = (path.parent / place).resolve() if place else path
        if not file.exists() or not file.is_relative_to(ROOT):
            broken.append(f"{target}: there is no such file")
        elif fragment and file.suffix == ".md" and fragment not in anchors(file):
            broken.append(f"{target}: {file.name} has no such heading")
    assert not broken, "\n".join(broken)


def test_every_page_is_two_clicks_from_the_readme() -> None:
    pages = {ROOT / "README.md"}
    for _ in range(2):
        pages |= {
            (page.parent / unquote(target).partition("#")[0]).resolve()
            for page in pages
            if page.suffix == ".md"
            for target in links(page)
            if not target.startswith("#")
        }
    far = [page for page in documents() if page.is_relative_to(ROOT / "docs") and page not in pages]
    assert not far, "link it from the README, or from a page that the README links"


@each_document
def test_commands_in_blocks_are_whole_commands_of_ours(path: Path) -> None:
    wrong = []
    for block in _FENCE.finditer(current(path)):
        if block["language"].strip() in _SHELLS:
            for words in in_shell(block["text"]):
                if (found := fault(words)) is not None:
                    wrong.append(f"truespec {' '.join(words)}: {found}")
    assert not wrong, "\n".join(wrong)


@each_document
def test_commands_in_the_text_exist_with_their_options(path: Path) -> None:
    wrong = []
    for _, code in _CODE.findall(_FENCE.sub("", current(path))):
        for written in alternatives(" ".join(code.split())):
            for words in in_shell(written):
                if (found := fault(words, whole=False)) is not None:
                    wrong.append(f"{code}: {found}")
    assert not wrong, "\n".join(wrong)


@each_document
def test_lists_are_lists_on_the_site_too(path: Path) -> None:
    """Unlike GitHub, Python-Markdown wants a blank line before a list, and four spaces before one within another."""
    text = _FENCE.sub("", path.read_text(encoding="utf-8"))
    assert not re.findall(r"^(?![-*|>#]|\d+\. |<!--)\S.*\n(?:[-*]|\d+\.) .*", text, re.M), (
        "a blank line goes before a list"
    )
    assert not re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", text, re.M), "a list within a list is indented by four spaces"


def alternatives(code: str) -> list[str]:
    """`a b|c` is `a b` and `a c`; spaces around the bar would make it the shell's."""
    for word in code.split(" "):
        if "|" in word.strip("|"):
            return [written for choice in word.split("|") for written in alternatives(code.replace(word, choice, 1))]
    return [code]


def test_the_operations_guide_says_what_to_do_at_each_alert() -> None:
    alerts = {slug for slug in anchors(ROOT / "docs" / "runbooks.md") if slug.startswith("truespec")}
    guide = {target.partition("#")[2] for target in links(ROOT / "docs" / "operations.md") if "runbooks.md#" in target}
    assert alerts and guide == alerts


@each_document
def test_files_that_a_page_names_exist(path: Path) -> None:
    top = "|".join([*ROOMS, "dashboards", "deploy", "docs", "helm", "tests", "tools"])
    text = current(path)
    named = re.findall(rf"(?<![\w./-])(?:{top})/[\w./-]*[\w/]", text)
    missing = {name for name in named if "NAME" not in name and not (ROOT / name).exists()}
    modules = [f"/{file}" for file in project_files("*.py")]
    # A page shortens some paths to their ends.
    ends = [end for end in re.findall(r"`([\w/]+\.py)`", text) if "NAME" not in end]
    missing |= {end for end in ends if not any(module.endswith(f"/{end}") for module in modules)}
    assert not missing


@for_each(sorted((ROOT / "docs").rglob("*.svg")), lambda path: path.name)
def test_pictures_are_self_contained_and_say_what_they_show(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg" and root.get("viewBox")
    assert root.findtext(f"{svg}title") and root.findtext(f"{svg}desc"), "for those who cannot see it"
    text = path.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert not re.findall(r"(?:href|src)=\"(?!#)|url\((?!#)|<script", text), "it loads nothing"
