"""Parts of reports on a terminal; texts are printed unchanged, whatever a server wrote into them."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.reports.model import Kind, ReportTable

STYLES: Mapping[Kind, str] = {"ok": "green", "bad": "bold red", "unclear": "yellow", "none": "dim", "": ""}


def table(shown: ReportTable) -> Table:
    """A table as rich prints it."""
    made = Table(title=Text(shown.title), title_justify="left")
    for place, column in enumerate(shown.columns):
        justify = "right" if place in shown.numbers else "left"
        made.add_column(Text(column), justify=justify, overflow="fold", no_wrap=place in shown.whole)  # type: ignore[arg-type]
    for row in shown.cells():
        made.add_row(*(Text(cell.text, style=STYLES[cell.kind]) for cell in row))
    return made


def print_facts(facts: Mapping[str, object], out: Console, indent: int = 2) -> None:
    """Names with their values, one a line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        out.print(Text(f"{'':{indent}}{name:{width}}  {value}"), soft_wrap=True)
