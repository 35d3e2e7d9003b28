"""Parts of reports on a Markdown page, and the sections of a page that a command writes."""

import re
from pathlib import Path

from deploy.reports.model import ReportTable


def table(shown: ReportTable) -> str:
    """A table."""
    rule = ["---:" if place in shown.numbers else "---" for place in range(len(shown.columns))]
    rows = [[_cell(cell.text) for cell in row] for row in shown.cells()]
    head = f"| {' | '.join(map(_cell, shown.columns))} |\n|{'|'.join(rule)}|"
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in rows)])


def write_section(path: Path, command: str, name: str, body: str, *, head: str) -> None:
    """Put a section into the page: in the place of the one of that name, or at its end.

    Args:
        path: the page; made, folders included, where it is missing.
        command: who writes it, such as `bench`; with `name` it marks the section.
        name: of the section.
        body: Markdown.
        head: what a new page begins with.
    """
    page = path.read_text(encoding="utf-8") if path.exists() else head
    page = with_section(page, command, name, body)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def with_section(page: str, command: str, name: str, body: str) -> str:
    """The page with a section in the place of the one of that name, or at its end."""
    begin, end = f"<!-- {command}: {name} -->", f"<!-- end of {command} -->"
    text = f"{begin}\n{body.rstrip()}\n{end}\n"
    there = re.compile(re.escape(begin) + r"\n.*?" + re.escape(end) + r"\n", re.DOTALL)
    return there.sub(lambda _: text, page) if there.search(page) else f"{page.rstrip()}\n\n{text}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
