"""A report on a terminal; texts are printed unchanged, whatever a server wrote into them."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.reports.model import Document, Facts, Kind, ReportTable, Shown, Timeline

_STYLES: Mapping[Kind, str] = {"ok": "green", "bad": "bold red", "unclear": "yellow", "none": "dim", "": ""}


def print_document(shown: Document, out: Console) -> None:
    """The verdict, then what it rests on."""
    out.print(Text(shown.verdict.text, style=_STYLES[shown.verdict.kind]), soft_wrap=True)
    for note in shown.notes:
        out.print(Text(note), soft_wrap=True)
    for section in shown.sections:
        blocks = [block for block in section.blocks if not isinstance(block, Timeline)]
        if blocks:
            out.print(Text(f"\n{section.title}", style="bold"))
        for block in blocks:
            if isinstance(block, ReportTable):
                out.print(table(block))
            elif isinstance(block, Shown):
                where = f" ({block.where})" if block.where else ""
                out.print(Text.assemble((block.title, "bold red"), where), soft_wrap=True)
                print_facts(block.facts, out)
                if block.example:
                    out.print(Text(f"  {block.named}:"))
                    print_facts(block.example, out, indent=4)
            else:
                print_facts(block, out)


def table(shown: ReportTable) -> Table:
    """A table as rich prints it."""
    made = Table(title=Text(shown.title) if shown.title else None, title_justify="left")
    for place, name in enumerate(shown.columns):
        justify = "right" if place in shown.numbers else "left"
        made.add_column(Text(name), justify=justify, overflow="fold", no_wrap=place in (*shown.numbers, *shown.whole))  # type: ignore[arg-type]
    for row in shown.cells():
        made.add_row(*(Text(cell.text, style=_STYLES[cell.kind]) for cell in row))
    return made


def print_facts(facts: Facts, out: Console, indent: int = 2) -> None:
    """Names with their values, one a line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        out.print(Text(f"{'':{indent}}{name:{width}}  {value}"), soft_wrap=True)
