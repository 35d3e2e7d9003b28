"""`python -m tools.chaos`: replicas, nodes and processes killed under load."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from deploy.cli.console import Failure, MainCommand, a_config, a_file, concurrency_option, out, progress_printer
from deploy.cli.serving import at_port, served
from deploy.options import FiniteRange, check_writable, write_json
from deploy.run.machine import Machine
from deploy.run.preflight import check_machine
from serve_app.config.files import load_config
from serve_app.config.serve_file import Application, ServeFile
from speculative.errors import ConfigError
from tools.chaos.deaths import KINDS, kill_each
from tools.chaos.nodes import LocalCluster, local_cluster, one_node_a_replica
from tools.chaos.page import write_chaos, write_deaths
from tools.chaos.replicas import Killer
from tools.chaos.run import Strikes, run_chaos
from tools.chaos.streams import plan
from tools.provenance import command_line

_DEPLOYMENTS = {"prefill": "PrefillServer", "decode": "DecodeServer", "monolith": "MonolithServer"}


@click.command(cls=MainCommand)
@click.option(
    "--config", "file", type=a_config, default="resilient", show_default=True, help="Serve this configuration."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Listen on this port.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=4),
    default=96,
    show_default=True,
    help="Let an answer have up to this many tokens.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of requests and times.")
@click.option("--json", "json_file", type=a_file, help="Write the figures to this file.")
@click.option("--page", type=a_file, help="Put the figures into this page.")
@click.option("--requests", type=click.IntRange(min=1), default=200, show_default=True, help="Send this many requests.")
@concurrency_option
@click.option(
    "--kill-every",
    "kill_every_s",
    type=FiniteRange(min=0.1),
    default=3.0,
    show_default=True,
    help="Kill a replica about once in this many seconds.",
)
@click.option(
    "--kill-nodes",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Give each replica a node of its own on this machine, and kill this many whole nodes.",
)
@click.option(
    "--minutes", type=FiniteRange(min=0), default=12.0, show_default=True, help="Stop killing after this many minutes."
)
@click.option(
    "--kill-each",
    is_flag=True,
    help="Instead, kill one process of each kind (replicas, proxies, controllers, a raylet, the head), with Serve's "
    "proxy, with HAProxy, and with HAProxy and a router; report what clients saw, what was counted, and the alerts.",
)
@click.option("--only", multiple=True, type=click.Choice(KINDS), help="With --kill-each, kill these processes only.")
def main(file: Path, port: int, json_file: Path | None, page: Path | None, *, kill_each: bool, **options: Any) -> None:
    """Kill replicas, or whole nodes, on this machine while clients stream; check that nothing is lost, repeated,
    changed or leaked."""
    check_writable(json_file, "--json")
    check_writable(page, "--page")
    checked = at_port(load_config(file), port)
    report = progress_printer()
    sizes = sizes_to_kill(checked.application)  # what is wrong with them is reported before anything starts
    if kill_each:
        _kill_each(checked, json_file, page, options)
        return
    seed, kill_nodes = options["seed"], options["kill_nodes"]
    with (
        _on_nodes(checked, report) if kill_nodes else nullcontext((checked, None)) as (placed, cluster),
        served(placed, None if cluster is None else cluster.address, report) as service,
    ):
        replace_node_of = None if cluster is None else cluster.replace_node_of
        killer = Killer(placed.application.name, sizes, seed, kill_nodes, replace_node_of)
        bodies = plan(service.model_name, options["requests"], seed, options["max_tokens"])
        strikes = Strikes(options["kill_every_s"], 60 * options["minutes"])
        figures = run_chaos(service.base_url, killer, bodies, options["concurrency"], strikes, report)
    write_json(json_file, figures.as_dict())
    if page is not None:
        write_chaos(page, figures, command_line(), service.model_name)
    out.print_json(data=figures.as_dict())
    if not figures.sound:
        raise Failure("Something was lost, repeated, changed or leaked; the figures say what.")


def sizes_to_kill(application: Application) -> dict[str, int]:
    """Replicas of each deployment that may lose one. Raises ConfigError: there is none, or no router that would keep
    the streams."""
    args = application.effective_args
    if args.router is None:
        raise ConfigError("recovery.resume is false: streams would end with their replica; set it to true.")
    sizes = {_DEPLOYMENTS[name]: args.pool(name).replicas for name in args.pool_names if args.pool(name).replicas > 1}
    if not sizes:
        raise ConfigError("pools: every pool has one replica, and the last one is never killed; set replicas to 2.")
    return sizes


def _kill_each(file: ServeFile, json_file: Path | None, page: Path | None, options: Mapping[str, Any]) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if given and option.name in ("requests", "kill_every_s", "kill_nodes", "minutes", "seed"):
            raise click.UsageError(f"{option.opts[0]} says when replicas are killed; --kill-each kills each once.")
    only = options["only"]
    deaths = kill_each(file, options["concurrency"], options["max_tokens"], progress_printer(), only or KINDS)
    figures = {"deaths": [one.as_dict() for one in deaths]}
    write_json(json_file, figures)
    if page is not None:
        write_deaths(page, deaths, command_line(), ", ".join([file.application.args.model.served_name, *only]))
    out.print_json(data=figures)
    if uncounted := [f"{one.process} ({one.route})" for one in deaths if one.uncounted]:
        raise Failure(f"Requests were lost that no metric has: {', '.join(uncounted)}; the figures say how many.")


@contextmanager
def _on_nodes(file: ServeFile, report: Callable[[str], None]) -> Iterator[tuple[ServeFile, LocalCluster]]:
    """The configuration as it is to be served, and the cluster for it."""
    check_machine(file.application.effective_args, Machine.here()).require_servable()
    placed, head, shapes = one_node_a_replica(file)
    report(f"starting Ray's head and {len(shapes)} nodes on this machine")
    with local_cluster(head, shapes) as cluster:
        yield placed, cluster


if __name__ == "__main__":
    main()
