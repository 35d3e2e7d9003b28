"""`truespec config`: check, complete and document configurations."""

import re
from contextlib import nullcontext
from pathlib import Path

import click

from deploy.cli.application import application_of, application_options
from deploy.cli.console import out, say
from deploy.run.own_model import OwnModel
from serve_app.config.files import load_config
from speculative.errors import ConfigError


@click.group()
def config() -> None:
    """Check configurations and document their settings."""


@config.command("check")
@application_options
@click.option("--file-only", is_flag=True, help="Check only the file, not whether this machine can serve it.")
@click.option("--address", help="Check whether this Ray cluster can serve it (auto, or host:port), not this machine.")
@click.option(
    "--as-values",
    is_flag=True,
    envvar="TRUESPEC_CHECK_AS_VALUES",
    help="With --file-only: FILE was made by the Helm chart; call its settings as the chart's values do.",
)
def config_check(
    file: Path | None, own: OwnModel | None, file_only: bool, address: str | None, as_values: bool
) -> None:
    """Check a configuration, and whether this machine can serve it; each fault is reported with its field and the fix.

    The check covers files, models and drafters, optional packages, GPUs, CPUs and memory. Nothing is fetched.
    """
    if file_only and address is not None:
        raise click.UsageError("--file-only checks no cluster; give it or --address.")
    if as_values and (file is None or not file_only):
        raise click.UsageError("--as-values reads the file that the chart makes; give it with --file-only.")
    if as_values and file is not None:
        _check_values(file)
        return
    checked, named = application_of(file, own), file or f"--model {own and own.source}"
    if own is None or file_only:
        say(f"{named}: fine")
    if file_only:
        return
    from deploy.run.cluster import connected
    from deploy.run.machine import Machine
    from deploy.run.preflight import check_cluster, check_machine

    config = checked.application.effective_args
    with nullcontext() if address is None else connected(address):
        found = check_machine(config, Machine.here()) if address is None else check_cluster(config)
    found.require_servable(named)
    say("This machine can serve it." if address is None else "The cluster has what it asks for.")
    for hint in found.hints:
        say(f"hint: {hint}")


def _check_values(file: Path) -> None:
    """Check what the chart made of its values, and name these in what is wrong."""
    place = "the chart's values, under config"
    try:
        load_config(file, place)
    except ConfigError as error:
        named = re.sub(rf"^{re.escape(place)}: applications\[0\]\.args\.(?!pools)", "config.", str(error), flags=re.M)
        named = re.sub(rf"^{re.escape(place)}: applications\[0\]\.args\.pools", "pools", named, flags=re.M)
        raise ConfigError(re.sub(r"^(pools\.\w+\.)num_(?=[cg]pus)", r"\1", named, flags=re.M)) from error
    say("The configuration that the chart makes of its values: fine")


@config.command("show")
@application_options
def config_show(file: Path | None, own: OwnModel | None) -> None:
    """Print a configuration with every default filled in, as a configuration that can be served.

    FILE may be the name of one that comes with truespec: demo, monolith, resilient, vllm, own; or a recipe for a large
    model: recipes/llama-3.3-70b, recipes/qwen3-32b, recipes/gpt-oss-120b, recipes/deepseek-v3.
    """
    from deploy.run.written_out import effective_config

    out.print(effective_config(application_of(file, own)), end="", markup=False, soft_wrap=True)


@config.command("values")
@application_options
def config_values(file: Path | None, own: OwnModel | None) -> None:
    """Print a configuration as values of the Helm chart, which then serves the same: helm install -f -.

    Images, memory, volumes and secrets are not included; set them in a values file.
    """
    from deploy.run.written_out import chart_values

    out.print(chart_values(application_of(file, own)), end="", markup=False, soft_wrap=True)
