"""`truespec config`: check, complete and document configurations."""

from contextlib import nullcontext
from pathlib import Path

import click

from deploy.cli.application import ApplicationCommand, ServeTarget, application_options
from deploy.cli.console import MainGroup, err, out, say
from serve_app.config.serve_file import ServeFile
from speculative.weight_formats import FORMATS, is_rounded


@click.group(cls=MainGroup)
def config() -> None:
    """Check settings, or write all of them."""


@config.command("check", cls=ApplicationCommand)
@application_options
@click.option("--file-only", is_flag=True, help="Check only the file, not whether this machine can serve it.")
@click.option("--address", help="Check whether this Ray cluster can serve it (auto, or host:port), not this machine.")
@click.option(
    "--as-values",
    is_flag=True,
    envvar="TRUESPEC_CHECK_AS_VALUES",
    help="With --file-only: name settings as the chart's values.",
)
def config_check(asked: ServeTarget, checked: ServeFile, file_only: bool, address: str | None, as_values: bool) -> None:
    """Check settings, and whether this machine can serve them.

    Each fault is reported with its field and the fix. The check covers files, models and drafters, optional packages,
    GPUs, CPUs and memory. Nothing is fetched.
    """
    if file_only and address is not None:
        raise click.UsageError("--file-only checks no cluster; give it or --address.")
    if as_values and not (isinstance(asked.target, Path) and file_only):
        raise click.UsageError("--as-values reads the file that the chart makes; give it with --file-only.")
    if file_only:
        named = "The configuration that the chart makes of its values" if as_values else asked.named
        say(f"{named}: fine")
        return
    say(f"checking {asked.named}", err)  # what is imported now takes seconds
    from deploy.run.cluster import connected
    from deploy.run.machine import Machine
    from deploy.run.preflight import check_cluster, check_machine

    config = checked.application.effective_args
    with nullcontext() if address is None else connected(address):
        found = check_machine(config, Machine.here()) if address is None else check_cluster(config)
    for hint in found.hints:
        say(f"hint: {hint}")
    for name in sorted(filter(is_rounded, found.formats)):
        say(f"weights: {name}, {FORMATS[name].meaning}")
    found.require_servable(asked.named)
    place = "This machine can serve it." if address is None else "The cluster has what it asks for."
    say(f"{asked.named}: fine. {place}")


@config.command("show", cls=ApplicationCommand)
@application_options
def config_show(asked: ServeTarget, checked: ServeFile) -> None:
    """Print all settings, as a file that can be served.

    FILE may be the name of one that comes with truespec: demo, monolith, resilient, vllm, own; or a recipe for a large
    model: recipes/llama-3.3-70b, recipes/qwen3-32b, recipes/gpt-oss-120b, recipes/deepseek-v3.
    """
    from deploy.run.written_out import effective_config

    out.print(effective_config(checked), end="", markup=False, soft_wrap=True)


@config.command("values", cls=ApplicationCommand)
@application_options
def config_values(asked: ServeTarget, checked: ServeFile) -> None:
    """Print settings as values of the Helm chart.

    The chart then serves the same: helm install -f -. Images, memory, volumes and secrets are not included; set them in
    a values file.
    """
    from deploy.run.written_out import chart_values

    out.print(chart_values(checked), end="", markup=False, soft_wrap=True)
