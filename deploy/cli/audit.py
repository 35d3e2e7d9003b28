"""`truespec audit`: a server, from outside."""

from pathlib import Path
from typing import Any

import click

from deploy.cli.console import a_file, err, key_option, out, say
from deploy.options import FiniteRange, api_key, check_writable, server_url
from deploy.reports.progress import View
from speculative.errors import ConfigError


@click.group()
def audit() -> None:
    """Check whether the answers of a server are its model's own.

    Exits with 1 when something was found, and with 2 when the server could not be audited.
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
