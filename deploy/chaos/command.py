"""The commands `truespec chaos` and `truespec load`, on a running application."""

from collections.abc import Callable
from dataclasses import dataclass

from deploy.chaos.load import LoadFigures, run_load, saturation_per_s
from deploy.chaos.nodes import LocalCluster
from deploy.chaos.replicas import Killer, memory_bytes
from deploy.chaos.run import ChaosFigures, Strikes, run_chaos
from deploy.chaos.streams import plan
from deploy.exchange.client import ServiceError
from serve_app.config.serve_file import Application
from speculative.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The requests that are sent, and for how long."""

    seconds: float  # of each stretch
    calibrate_s: float
    max_tokens: int
    seed: int


def sizes_to_kill(application: Application) -> dict[str, int]:
    """Replicas of each deployment that may lose one.

    Raises:
        ConfigError: there is none, or no router that would keep the streams.
    """
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


def load(application: Application, base_url: str, options: LoadOptions, progress: Progress) -> list[LoadFigures]:
    """Find the rate that the service can do, and load it with that and with twice that.

    Raises:
        ServiceError: it does nothing at all.
    """
    args = application.effective_args
    pool = args.pool(args.decoding_pool)
    bodies = plan(args.model.served_name, 256, options.seed, options.max_tokens)
    clients = int(args.limits.max_load * args.engine.max_num_seqs * pool.most_replicas)
    progress(f"measuring what {clients} clients get that never pause")
    rate = saturation_per_s(base_url, bodies, clients, options.calibrate_s)
    if rate == 0:
        raise ServiceError(f"{base_url}: no request was completed within {options.calibrate_s:g} s; give it longer.")
    stretches = []
    for factor in (1, 2):
        progress(f"{factor * rate:.2f} requests/s for {options.seconds:g} s")
        found = run_load(
            base_url, bodies, factor * rate, options.seconds, lambda: memory_bytes(application.name), options.seed
        )
        progress(f"  answers {found.statuses}, whole p95 {found.whole_p95_s:g} s")
        stretches.append(found)
    return stretches
