"""`truespec config`: check, complete and document configurations."""

from pathlib import Path

import click

from deploy.cli.console import Failure, a_config, a_file, out, say
from deploy.options import check_writable
from serve_app.config.files import load_config


@click.group()
def config() -> None:
    """Check configurations and document their settings."""


@config.command("check")
@click.argument("file", type=a_config)
@click.option("--file-only", is_flag=True, help="Check only the file, not whether this machine can serve it.")
@click.option("--address", help="Check whether this Ray cluster can serve it (auto, or host:port), not this machine.")
def config_check(file: Path, file_only: bool, address: str | None) -> None:
    """Check a configuration, and whether this machine can serve it; each fault is reported with its field and the fix.

    The check covers files, models and drafters, optional packages, GPUs, CPUs and memory. Nothing is fetched.
    """
    if file_only and address is not None:
        raise click.UsageError("--file-only checks no cluster; give it or --address.")
    checked = load_config(file)
    if file_only:
        say(f"{file}: fine")
        return
    from deploy.cluster import connected
    from deploy.machine import Machine
    from deploy.preflight import faults_here, faults_on_cluster, remarks_here, require_servable

    config = checked.application.effective_args
    if address is None:
        require_servable(faults_here(config, Machine.here()), file)
        for remark in remarks_here(config):
            say(remark)
        say(f"{file}: fine, and this machine can serve it")
        return
    with connected(address):
        require_servable(faults_on_cluster(config), file)
    say(f"{file}: fine, and the cluster has what it asks for")


@config.command("show")
@click.argument("file", type=a_config)
def config_show(file: Path) -> None:
    """Print a configuration with every default filled in, as a configuration that can be served.

    FILE may be the name of one that comes with truespec: demo, monolith, resilient, vllm; or a recipe for a large
    model: recipes/llama-3.3-70b, recipes/qwen3-32b, recipes/gpt-oss-120b, recipes/deepseek-v3.
    """
    from deploy.reference import effective_config

    out.print(effective_config(load_config(file)), end="", markup=False, soft_wrap=True)


@config.command("values")
@click.argument("file", type=a_config)
def config_values(file: Path) -> None:
    """Print a configuration as values of the Helm chart, which then serves the same: helm install -f -.

    Images, memory, volumes and secrets are the chart's own and not in it.
    """
    from deploy.reference import chart_values

    out.print(chart_values(load_config(file)), end="", markup=False, soft_wrap=True)


@config.command("reference")
@click.option("--out", "page", type=a_file, help="Write the reference to this file instead of printing it.")
@click.option("--check", is_flag=True, help="With --out: write nothing, and fail if the file is out of date.")
def config_reference(page: Path | None, check: bool) -> None:
    """Print the reference of all settings as Markdown (docs/configuration.md)."""
    from deploy.reference import configuration_reference

    text = configuration_reference()
    if page is None:
        out.print(text, end="", markup=False, soft_wrap=True)
    elif check:
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            raise Failure(f"{page} is out of date; run `truespec config reference --out {page}`.")
    else:
        check_writable(page, "--out")
        page.write_text(text, encoding="utf-8")
