"""The figures as tables: on a terminal, and as a section of a Markdown page."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console, Group

from deploy.reports import terminal
from deploy.reports.model import ReportTable
from tools import markdown
from tools.bench.figures import SpeedRow, memory, rows
from tools.bench.rounds import BenchResult
from tools.markdown import write_section
from tools.provenance import describe

_HEAD = """# Benchmarks

Every section below was written by the command that stands in it (`python -m tools.bench --markdown FILE`), with the
day and the machine.
"""


def tables(found: BenchResult) -> list[ReportTable]:
    """All tables of a run; those with nothing in them are left out."""
    engines = [
        (engine, f"{resident:.0f} MiB", f"{peak:.0f} MiB", ", ".join(map(" ".join, found.versions[engine].items())))
        for engine, (resident, peak) in memory(found).items()
    ]
    made = [
        *_speed_tables(found),
        _table("Memory of each engine's processes", ("engine", "resident", "peak", "versions"), engines),
        _table(
            "Left out",
            ("engine", "why, and how to get it"),
            [(one.name, one.reason.splitlines()[0]) for one in found.left_out],
        ),
    ]
    return [table for table in made if table.rows]


def write_markdown(found: BenchResult, path: Path, section: str) -> None:
    """Put the section into the page: in the place of the one of that name, or at its end."""
    parts = [f"## {section}\n", f"`{found.provenance['command']}`\n", f"{describe(found.provenance)}\n"]
    parts += [f"{table.title}\n\n{markdown.table(table)}\n" for table in tables(found)]
    write_section(path, "bench", section, "\n".join(parts), head=_HEAD)


def print_report(found: BenchResult, console: Console) -> None:
    """Print all tables and where they come from."""
    console.print(Group(*map(terminal.table, tables(found)), describe(found.provenance)))


def _table(title: str, columns: Sequence[str], lines: Sequence[tuple[str, ...]]) -> ReportTable:
    return ReportTable(title, columns, lines, numbers=range(1, len(columns)), whole=(0,))


def _speed_tables(found: BenchResult) -> list[ReportTable]:
    """One table a case."""
    what = {
        "decode": "tokens a second after the first token",
        "whole": "tokens a second of the whole batch",
        "first-token": "tokens of the prompts a second, until the first token",
        "prefix-hit": "tokens of prompts that were answered just before a second, until the first token",
    }[found.plan.measure]
    made = []
    for case, group in groupby(rows(found), key=lambda row: row.case):
        lines = list(group)
        against = next((row.ratio.against for row in lines if row.ratio is not None), "")
        ratio = f"ratio to {against}" if against else "ratio"
        drafts = ("accepted length", "acceptance by position")
        columns = ("engine", "tokens/s", "from ... to", ratio, "first token", *drafts, "same text")
        title = f"{case}: {what} (n = {max(row.speed.num_samples for row in lines)})"
        made.append(_table(title, columns, [_speed_line(row) for row in lines]))
    return made


def _speed_line(row: SpeedRow) -> tuple[str, ...]:
    speed, ratio, drafts = row.speed, row.ratio, row.acceptance
    return (
        row.engine,
        f"{speed.median:.1f}",
        f"{speed.low:.1f} ... {speed.high:.1f}",
        "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} ... {ratio.high:.2f})",
        f"{row.first_token_s * 1e3:.0f} ms",
        "" if drafts is None else f"{drafts.length:.2f}",
        "" if drafts is None else " ".join(f"{share:.2f}" for share in drafts.per_position),
        "" if row.agreement is None else f"{row.agreement:.0%}",
    )
