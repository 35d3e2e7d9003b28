"""`truespec dashboards`: build and upload what Grafana and Prometheus read."""

import os
from pathlib import Path

import click

from deploy.cli.console import Failure, MainGroup, say
from deploy.options import read_secret


@click.group(cls=MainGroup)
def dashboards() -> None:
    """Write or upload Grafana dashboards and Prometheus rules."""


@dashboards.command("build")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Write below this folder.")
def dashboards_build(out: Path) -> None:
    """Write Grafana's dashboards and Prometheus' rules.

    The chart brings its own.
    """
    from dashboards import build

    try:
        names = build.write(out)
    except OSError as error:
        raise Failure(f"--out {out}: {error.filename} cannot be written: {error.strerror}.") from error
    for name in names:
        say(f"written: {out / name}")


@dashboards.command("push")
@click.option("--url", envvar="GRAFANA_URL", required=True, help="The Grafana server's URL. [env: GRAFANA_URL]")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read the token from this file instead of GRAFANA_TOKEN.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be done, and do nothing.")
@click.option("--overwrite", is_flag=True, help="Replace pages even if somebody saved them in the meantime.")
def dashboards_push(url: str, token_file: Path | None, dry_run: bool, overwrite: bool) -> None:
    """Upload the dashboards to Grafana's folder truespec.

    The token is read from GRAFANA_TOKEN or a file.
    """
    from dashboards import build

    try:
        from dashboards.push import Change, PushError, Server, push
    except ModuleNotFoundError as error:
        raise Failure("This needs grafana-api: pip install -e '.[grafana]' in the checkout.") from error
    token = read_secret(token_file, "--token-file") if token_file else os.environ.get("GRAFANA_TOKEN")
    if not token:
        raise Failure("There is no token: set GRAFANA_TOKEN or give --token-file.")

    def show(change: Change) -> None:
        say(f"{'would be ' if dry_run and change.action != 'unchanged' else ''}{change.action}: {change.what}")

    try:
        push(Server(url, token), build.dashboards(), dry_run=dry_run, overwrite=overwrite, progress=show)
    except PushError as error:
        raise Failure(str(error)) from error
