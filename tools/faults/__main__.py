"""`python -m tools.faults`: known faults, put back, and engines without a fault."""

from collections.abc import Collection
from pathlib import Path

import click

from deploy.cli.console import Failure, MainGroup, a_file, err, out
from deploy.options import check_writable, write_json
from deploy.reports import terminal
from deploy.reports.progress import View
from tools.faults.mutants import MUTANTS
from tools.faults.report import clean_table, detection_table, write_clean, write_detection
from tools.faults.run import VOCAB_SIZE, alarms_of, audit_clean, audit_mutants
from tools.faults.watched import FAULTS, SOUND, watch_faults, write_table

_DETECTION, _WATCH = (Path("docs/runs") / name for name in ("detection.md", "watch.md"))


@click.group(cls=MainGroup)
def main() -> None:
    """Check that faults would be noticed, and that nothing is where there is none."""


@main.command()
@click.option(
    "--watched", is_flag=True, help="Serve some of them behind the proxy of `truespec watch`, until its referee alarms."
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Only faults whose names begin so. May be given several times."
)
@click.option("--json", "json_file", type=a_file, help="Write the findings to this file.")
@click.option(
    "--page",
    type=a_file,
    help="Put the table into this page; in a checkout the default is docs/runs/detection.md, with --watched "
    "docs/runs/watch.md.",
)
def find(watched: bool, only: tuple[str, ...], json_file: Path | None, page: Path | None) -> None:
    """Put every known fault into an engine, and report what finds it and how soon."""
    check_writable(json_file, "--json")
    if watched:
        _faults_watched(page or (_in_a_checkout(_WATCH) if not only else None), only, json_file)
        return
    names = _beginning_with(only, MUTANTS)
    page = page or (_in_a_checkout(_DETECTION) if not only else None)  # the page has all of them
    check_writable(page, "--page")
    with View(err) as view:
        findings = audit_mutants(names, view)
    out.print(terminal.table(detection_table(findings)))
    if page is not None:
        write_detection(findings, page)
    write_json(json_file, [one.as_dict() for one in findings])
    missed = [f"{one.fault}: nobody found it" for one in findings if one.delay is None]
    if missed:
        raise Failure("\n".join(missed))


def _beginning_with(prefixes: tuple[str, ...], names: Collection[str]) -> list[str]:
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            raise Failure(f"--only: no fault begins with {prefix!r}.")
    return [name for name in names if name.startswith(prefixes or "")]


def _in_a_checkout(page: Path) -> Path | None:
    return page if page.is_file() else None


def _faults_watched(page: Path | None, only: tuple[str, ...], json_file: Path | None) -> None:
    names = _beginning_with(only, (SOUND, *FAULTS))
    check_writable(page, "--page")
    with View(err) as view:
        found = watch_faults(names, view)
    if page is not None:
        write_table(found, page)
    write_json(json_file, [one.as_dict() for one in found])
    if wrong := [f"{one.fault}, {one.way}: {one.found or 'nothing'} was found" for one in found if one.is_wrong]:
        raise Failure("\n".join(wrong))


@main.command()
@click.argument("positions", type=click.IntRange(min=1))
@click.option("--json", "json_file", type=a_file, help="Write the runs to this file.")
@click.option("--page", type=a_file, help="Put the table into this page.")
def clean(positions: int, json_file: Path | None, page: Path | None) -> None:
    """Serve POSITIONS tokens in every setting without a fault, and report every alarm: there should be none."""
    check_writable(json_file, "--json")
    check_writable(page, "--page")
    with View(err) as view:
        runs = audit_clean(positions, view)
    out.print(terminal.table(clean_table(runs)))
    if page is not None:
        write_clean(runs, page, f"a table of {VOCAB_SIZE} tokens")
    write_json(json_file, [one.as_dict() for one in runs])
    if alarms := alarms_of(runs):
        raise Failure("\n".join(alarms))


if __name__ == "__main__":
    main()
