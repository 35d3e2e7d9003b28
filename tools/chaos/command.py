"""The run of `python -m tools.chaos` against a running application."""

from collections.abc import Callable
from dataclasses import dataclass

from serve_app.config.serve_file import Application
from speculative.errors import ConfigError
from tools.chaos.nodes import LocalCluster
from tools.chaos.replicas import Killer
from tools.chaos.run import ChaosFigures, Strikes, run_chaos
from tools.chaos.streams import plan

Progress = Callable[[str], None]

_DEPLOYMENTS = {"prefill": "PrefillServer", "decode": "DecodeServer", "monolith": "MonolithServer"}


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The requests that are sent, and how the fire is laid."""

    requests: int
    concurrency: int
    max_tokens: int
    kill_every_s: float
    kill_nodes: int
    minutes: float  # no replica is killed after so long
    seed: int


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


def chaos(
    application: Application, base_url: str, options: ChaosOptions, progress: Progress, cluster: LocalCluster | None
) -> ChaosFigures:
    """Run it against the application, which runs on this machine; `cluster` has the nodes that may be killed."""
    replace_node_of = None if cluster is None else cluster.replace_node_of
    killer = Killer(application.name, sizes_to_kill(application), options.seed, options.kill_nodes, replace_node_of)
    model = application.args.model.served_name
    bodies = plan(model, options.requests, options.seed, options.max_tokens)
    strikes = Strikes(options.kill_every_s, 60 * options.minutes)
    return run_chaos(base_url, killer, bodies, options.concurrency, strikes, progress)
