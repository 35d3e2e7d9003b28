"""Start the application on Ray, and stop it: what `serve`, `demo` and the tests share."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray import serve

from serve_app.app import build_app
from serve_app.config import AppConfig, ServeFile
from speculative.errors import ConfigError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunningApp:
    """Where a running application is reached."""

    base_url: str
    model_name: str


@contextmanager
def running_app(
    file: ServeFile, progress: Progress, *, address: str | None = None, alone: bool = False
) -> Iterator[RunningApp]:
    """Run the application of a checked file until the block ends.

    Args:
        file: what to run.
        progress: is told what is going on.
        address: of a Ray cluster to run on; None is that of RAY_ADDRESS, which a job of a cluster finds set, and
            without one starts a cluster on this machine and stops it afterwards.
        alone: refuse a cluster on which Serve runs already, instead of joining it.

    Raises:
        ConfigError: a replica could not start (the message is its own), or Serve runs already.
    """
    config = file.application.effective_args
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # progress tells it in fewer words
    address = address or os.environ.get("RAY_ADDRESS")
    _connect(config, progress, address)
    joined = bool(serve.status().proxies)
    try:
        if joined and alone:
            raise ConfigError("Ray Serve runs on this cluster already; give the URL of what it serves (--url) instead.")
        yield _deploy(file, config, progress)
    finally:
        progress("stopping")
        if address is not None and not joined:
            serve.shutdown()  # the cluster is left as it was found
        elif not (joined and alone):
            serve.delete(file.application.name)
        ray.shutdown()  # ends the cluster too, where it was started here


def _connect(config: AppConfig, progress: Progress, address: str | None) -> None:
    if address is not None:
        progress(f"connecting to Ray at {address}")
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        return
    cores = os.cpu_count() or 1
    needed = sum(config.pool(name).most_replicas * config.pool(name).num_cpus for name in config.pool_names)
    needed += config.router.replicas * config.router.num_cpus if config.router is not None else 0
    if needed > cores:
        progress(f"warning: the pools ask for {needed:g} CPUs, here are {cores}; they will slow each other down")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: behind whatever else the machine does
    progress(f"starting Ray on this machine with {max(cores, needed):g} CPUs")
    ray.init(num_cpus=max(cores, int(-(-needed // 1))), log_to_driver=False, logging_level="ERROR")


def _deploy(file: ServeFile, config: AppConfig, progress: Progress) -> RunningApp:
    http, application = file.http_options, file.application
    progress(f"starting Serve on http://{http.host}:{http.port}")
    serve.start(proxy_location=file.proxy_location, http_options={"host": http.host, "port": http.port})
    pools = " and ".join(f"{config.pool(name).most_replicas} {name}" for name in config.pool_names)
    progress(f"loading {config.model.source} ({pools})")
    app = build_app(config.model_dump(exclude_unset=True))
    try:
        serve.run(app, name=application.name, route_prefix=application.route_prefix)
    except RuntimeError as error:
        raise ConfigError(f"The application did not start: {_reason(application.name) or error}") from error
    prefix = application.route_prefix.rstrip("/")
    return RunningApp(f"http://{http.host}:{http.port}{prefix}", config.model.served_name)


def _reason(name: str) -> str:
    """Why Serve says that an application is not running: the last line of each unhealthy deployment's message."""
    application = serve.status().applications.get(name)
    deployments = application.deployments.values() if application is not None else ()
    lines = (status.message.strip().splitlines() for status in deployments if status.message)
    return "; ".join(found[-1] for found in lines if found)
