"""One table, shown in three ways."""

import io

from rich.console import Console

from deploy.reports import html_pages, terminal
from deploy.reports.model import Cell, ReportTable
from tools import markdown

TABLE = ReportTable(
    "Of [x] & y",
    ("probe", "verdict", "tokens"),
    [(Cell("a [b] | c", detail="Is it <so>?"), Cell("failed", "bad"), "1,200"), ("d\ne", Cell("passed", "ok"), "7")],
    numbers=(2,),
)


def test_a_terminal_shows_texts_as_they_are_and_verdicts_in_colour() -> None:
    plain, coloured = io.StringIO(), io.StringIO()
    Console(file=plain, width=60, color_system=None).print(terminal.table(TABLE))
    lines = [line.rstrip() for line in plain.getvalue().splitlines()]
    assert (lines[0], lines[4]) == ("Of [x] & y", "│ a [b] | c │ failed  │  1,200 │")
    assert "Is it" not in plain.getvalue()
    Console(file=coloured, width=60, force_terminal=True, color_system="standard").print(terminal.table(TABLE))
    assert "\x1b[1;31mfailed" in coloured.getvalue() and "\x1b[32mpassed" in coloured.getvalue()


def test_a_page_escapes_texts_and_marks_columns() -> None:
    page = html_pages.table(TABLE)
    assert page.startswith(
        '<div class="scrolled"><table><tr><th>probe</th><th>verdict</th><th class="number" data-name="tokens">'
    )
    assert "<td>a [b] | c<small>Is it &lt;so&gt;?</small></td>" in page
    assert '<td><span class="bad">failed</span></td><td class="number" data-name="tokens">1,200</td>' in page


def test_markdown_keeps_a_row_in_one_line() -> None:
    assert markdown.table(TABLE).splitlines() == [
        "| probe | verdict | tokens |",
        "|---|---|---:|",
        "| a [b] \\| c | failed | 1,200 |",
        "| d e | passed | 7 |",
    ]
