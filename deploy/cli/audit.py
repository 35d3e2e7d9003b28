"""`truespec audit`: a server, from outside; known faults, put back; and engines without a fault."""

from pathlib import Path
from typing import Any

import click

from deploy.cli.console import Failure, a_file, err, key_option, out, say
from deploy.options import FiniteRange, api_key, beginning_with, check_writable, server_url, write_json
from deploy.reports.progress import View
from speculative.errors import ConfigError

_DETECTION, _AUDIT, _WATCH = (Path("docs/runs") / name for name in ("detection.md", "audits.md", "watch.md"))


@click.group()
def audit() -> None:
    """Check whether the answers of a server or an engine are its model's own, and whether a fault would be noticed.

    Exits with 1 when something was found or missed, and with 2 when the server could not be audited.
    """


@audit.command("server")
@click.argument("url")
@click.option("--model", help="Compare with these weights: a catalogue name, a folder or a hub id.")
@click.option("--served", help="Audit this one of the server's models; the default is the first.")
@click.option("--beside", help="Compare with this server of the same model, which runs without speculation.")
@click.option("--destructive", is_flag=True, help="Also send requests that have killed servers.")
@click.option("--only", multiple=True, metavar="PROBE", help="Run only this probe. May be given several times.")
@click.option(
    "--budget",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="Ask for a few hundred answers or for thousands.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=1),
    default=120,
    show_default=True,
    help="Give up on a request after this many seconds.",
)
@key_option
@click.option("--json", "json_file", type=a_file, help="Write the findings to this file.")
@click.option("--html", "html_file", type=a_file, help="Write a report for a browser to this file.")
@click.option("--page", type=a_file, help="Put the tables into this Markdown page.")
@click.option("--section", help="With --page: the name of the section to replace.")
def audit_server(
    url: str, page: Path | None, section: str | None, json_file: Path | None, html_file: Path | None, **options: Any
) -> None:
    """Audit the running server at URL with requests alone."""
    from deploy.exchange.dialect import AuditFailed
    from deploy.probes.command import AuditOptions, audit_url, put_into, show

    try:
        for option, path in {"--json": json_file, "--html": html_file, "--page": page}.items():
            check_writable(path, option)
        for named, address in {"URL": url, "--beside": options["beside"]}.items():
            if address is not None:
                server_url(address, named)
        key = api_key(options.pop("api_key_file"))
        with View(err) as view:
            found = audit_url(AuditOptions(url, api_key=key, **options), view, json_file)
    except (AuditFailed, ConfigError) as error:
        say(f"Error: {error}", err)
        raise click.exceptions.Exit(2) from error
    show(found, out, json_file, html_file)
    if page is not None:
        put_into(page, found, section or f"{found.facts['model']} at {url}")
    if found.findings:
        raise click.exceptions.Exit(1)


@audit.command("faults")
@click.option("--outside", is_flag=True, help="Serve each fault over HTTP and look for it with requests alone.")
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
    help="Put the table into this page; in a checkout the default is docs/runs/detection.md, with --outside "
    "docs/runs/audits.md, with --watched docs/runs/watch.md.",
)
def audit_faults(
    outside: bool, watched: bool, only: tuple[str, ...], json_file: Path | None, page: Path | None
) -> None:
    """Put every known fault into an engine, and report what finds it and how soon."""
    check_writable(json_file, "--json")
    if outside and watched:
        raise click.UsageError("--outside and --watched are two runs; choose one.")
    if watched:
        _faults_watched(page or (_in_a_checkout(_WATCH) if not only else None), only, json_file)
        return
    if outside:
        _faults_from_outside(page or _in_a_checkout(_AUDIT), only, json_file)
        return
    from deploy.faults.mutants import MUTANTS
    from deploy.faults.report import detection_table, write_detection
    from deploy.faults.run import audit_mutants
    from deploy.reports import terminal

    names = beginning_with(only, list(MUTANTS), "fault")
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


def _in_a_checkout(page: Path) -> Path | None:
    return page if page.is_file() else None


def _faults_from_outside(page: Path | None, only: tuple[str, ...], json_file: Path | None) -> None:
    from deploy.faults.outside import audit_faults, servable

    names = servable(only)
    check_writable(page, "--page")
    with View(err) as view:
        found = audit_faults(names, page, view)
    write_json(json_file, [one.as_dict() for one in found])
    wrong = [f"{one.fault}, {one.way}" for one in found if one.is_false_alarm]
    if wrong:
        raise Failure(f"Servers without a fault were found at fault: {'; '.join(wrong)}.")


def _faults_watched(page: Path | None, only: tuple[str, ...], json_file: Path | None) -> None:
    from deploy.faults.watched import FAULTS, SOUND, watch_faults, write_table

    names = beginning_with(only, (SOUND, *FAULTS), "watched fault")
    check_writable(page, "--page")
    with View(err) as view:
        found = watch_faults(names, view)
    if page is not None:
        write_table(found, page)
    write_json(json_file, [one.as_dict() for one in found])
    if wrong := [f"{one.fault}, {one.way}: {one.found or 'nothing'} was found" for one in found if one.is_wrong]:
        raise Failure("\n".join(wrong))


@audit.command("clean")
@click.argument("positions", type=click.IntRange(min=1))
@click.option("--model", help="Serve this model instead of a table: a name, a folder or a hub id. Requires --head.")
@click.option("--head", help="The draft head of --model: a name or a folder.")
@click.option("--json", "json_file", type=a_file, help="Write the runs to this file.")
@click.option("--page", type=a_file, help="Put the table into this page.")
def audit_clean(positions: int, model: str | None, head: str | None, json_file: Path | None, page: Path | None) -> None:
    """Serve POSITIONS tokens in every setting without a fault, and report every alarm: there should be none."""
    from deploy.faults.model import AuditedModel
    from deploy.faults.report import clean_table, write_clean
    from deploy.faults.run import VOCAB_SIZE, alarms_of
    from deploy.faults.run import audit_clean as run
    from deploy.reports import terminal

    check_writable(json_file, "--json")
    check_writable(page, "--page")
    with View(err) as view:
        runs = run(positions, view, None if model is None else AuditedModel.find(model, head).serve)
    out.print(terminal.table(clean_table(runs)))
    if page is not None:
        write_clean(runs, page, model or f"a table of {VOCAB_SIZE} tokens")
    write_json(json_file, [one.as_dict() for one in runs])
    if alarms := alarms_of(runs):
        raise Failure("\n".join(alarms))
