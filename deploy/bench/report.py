"""The figures as tables: on a terminal, and as a section of a Markdown page."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table

from deploy.bench.figures import MeasuredAcceptance, SpeedRow, memory, rows, steps
from deploy.bench.rounds import BenchResult
from deploy.reports.provenance import describe
from deploy.reports.sections import write_section

_HEAD = """# Benchmarks

Every section below was written by the command that stands in it (`truespec bench --markdown FILE`), with the day and
the machine.
"""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of texts."""

    title: str
    columns: tuple[str, ...]
    lines: Sequence[tuple[str, ...]]


def grids(found: BenchResult) -> list[Grid]:
    """All tables of a run; those with nothing in them are left out."""
    made = [
        *_speed_grids(found),
        *_step_grids(found),
        _own_tools_grid(found),
        _engine_grid(found),
        _missing_grid(found),
    ]
    return [grid for grid in made if grid.lines]


def render(found: BenchResult) -> RenderableType:
    """For a terminal."""
    tables: list[RenderableType] = []
    for grid in grids(found):
        table = Table(title=grid.title, title_justify="left")
        for index, column in enumerate(grid.columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0, overflow="fold")
        for line in grid.lines:
            table.add_row(*line)
        tables.append(table)
    return Group(*tables, describe(found.provenance))


def write_markdown(found: BenchResult, path: Path, section: str, plots: Sequence[Path] = ()) -> None:
    """Put the section into the page: in the place of the one of that name, or at its end."""
    write_section(path, "bench", section, _markdown(found, section, path, plots), head=_HEAD)


def print_report(found: BenchResult, console: Console) -> None:
    """Print all tables and where they come from."""
    console.print(render(found))


def _markdown(found: BenchResult, section: str, path: Path, plots: Sequence[Path]) -> str:
    parts = [f"## {section}\n", f"`{found.provenance['command']}`\n", f"{describe(found.provenance)}\n"]
    for grid in grids(found):
        lines = [grid.columns, ("---", *["---:"] * (len(grid.columns) - 1)), *grid.lines]
        table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        parts.append(f"{grid.title}\n\n{table}\n")
    for plot in plots:
        if plot.suffix == ".png":  # on a ground of its own, light or dark
            parts.append(f"![Bars: tokens a second of each engine ({plot.stem})]({_relative(plot, path.parent)})\n")
    return "\n".join(parts)


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _speed_grids(found: BenchResult) -> list[Grid]:
    """One table a case."""
    what = "after the first token" if found.plan.measure == "decode" else "of the whole batch"
    made = []
    for case, group in groupby(rows(found), key=lambda row: row.case):
        lines = list(group)
        against = next((row.ratio.against for row in lines if row.ratio is not None), "")
        ratio = f"ratio to {against}" if against else "ratio"
        drafts = ("accepted length", "acceptance by position")
        columns = ("engine", "tokens/s", "from ... to", ratio, "first token", *drafts, "same text")
        title = f"{case}: tokens a second {what} (n = {max(row.speed.num_samples for row in lines)})"
        made.append(Grid(title, columns, [_speed_line(row) for row in lines]))
    return made


def _speed_line(row: SpeedRow) -> tuple[str, ...]:
    speed, ratio = row.speed, row.ratio
    return (
        row.engine,
        f"{speed.median:.1f}",
        f"{speed.low:.1f} ... {speed.high:.1f}",
        "" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} ... {ratio.high:.2f})",
        f"{row.first_token_s * 1e3:.0f} ms",
        *_acceptance_cells(row.acceptance),
        "" if row.agreement is None else f"{row.agreement:.0%}",
    )


def _acceptance_cells(found: MeasuredAcceptance | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    return f"{found.length:.2f}", " ".join(f"{share:.2f}" for share in found.per_position)


def _step_grids(found: BenchResult) -> list[Grid]:
    """One table a case."""
    columns = ("engine", "step", "target", "drafter", "vocabulary", "checks", "overhead")
    made = []
    for case, group in groupby(steps(found), key=lambda step: step.case):
        lines = []
        for step in group:
            parts = (step.target_ms, step.drafter_ms, step.vocabulary_ms, step.checks_ms, step.other_ms)
            shares = (f"{part:.1f} ms, {part / step.total_ms:.1%}" for part in parts)
            lines.append((step.engine, f"{step.total_ms:.1f} ms", *shares))
        made.append(Grid(f"{case}: where the time of our steps goes", columns, lines))
    return made


def _engine_grid(found: BenchResult) -> Grid:
    lines = [
        (engine, f"{resident:.0f} MiB", f"{peak:.0f} MiB", ", ".join(map(" ".join, found.versions[engine].items())))
        for engine, (resident, peak) in memory(found).items()
    ]
    return Grid("Memory of each engine's processes", ("engine", "resident", "peak", "versions"), lines)


def _own_tools_grid(found: BenchResult) -> Grid:
    lines = [
        (one.engine, str(one.case), f"{one.here:.1f}", f"{one.own:.1f}", f"{one.share:.2f}") for one in found.own_tools
    ]
    columns = ("engine", "case", "tokens/s here", "tokens/s by its own tool", "ratio")
    return Grid("Other engines here and in their own benchmark tools", columns, lines)


def _missing_grid(found: BenchResult) -> Grid:
    lines = [(one.name, one.reason.splitlines()[0]) for one in found.left_out]
    return Grid("Left out", ("engine", "why, and how to get it"), lines)
