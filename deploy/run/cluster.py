"""Start the application on Ray, and stop it: what `serve`, `demo` and the tests share."""

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray import serve
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services as ray_services
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from deploy.run.machine import Machine
from deploy.run.models import model_here
from deploy.run.ports import free_port, url_of
from deploy.run.preflight import check_cluster, check_machine
from deploy.run.processes import process_tree
from serve_app.app import build
from serve_app.config.base import POOL_OF_DEPLOYMENT
from serve_app.config.serve_file import HttpOptions, ServeFile
from serve_app.deployments.runtime import kept_starts
from serve_app.http.slow_clients import PROXY_CALLBACK
from serve_app.telemetry.logs import passing_on
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError, TruespecError
from speculative.kernels.library import compiling, find_kernels

Progress = Callable[[str], None]

_LOOK_EVERY_S = 0.2
_DELETING_S = 60.0
_REACH_S = 5.0  # for a connection to a cluster; Ray itself tries for minutes
_SLOW_START = re.compile(
    r"Deployment '(\w+)' .* has (\d+) replicas that have taken more than (\d+)s to (be scheduled|initialize)"
    r"(?:.*each replica: (.*), total)?",
    re.DOTALL,
)


_FAILED_START = re.compile(
    r"[^\n]*failed to start[^\n]*?(?:Retrying(?: (\d+) more time\(s\))?\.[^\n]*)?Error:\n(.*)", re.DOTALL
)
_OUR_ERROR = re.compile(
    r".*^(?:speculative|serve_app)\.[\w.]*(?:ConfigError|OptionError|UnsupportedModel): (.*)", re.M | re.DOTALL
)
_KILLED = re.compile(r"ActorDiedError|ActorUnavailableError|Worker exit type|died unexpectedly")
_STARTS = 3  # of Ray on this machine
_NODE_S, _MOST_NODE_S = 30.0, 240.0  # for Ray's node to come up on an idle machine, and on any
_BUSY = 1.5  # processes to run for each core, from which on a start is slow
LOGS = f"{get_default_ray_temp_dir()}/session_latest/logs"


def cluster_address(address: str | None) -> str | None:
    """Address of the cluster to run on: as given, else RAY_ADDRESS; None if one is started here, which Ray calls
    "local"."""
    found = address or os.environ.get("RAY_ADDRESS")
    return None if found in ("", "local") else found


@contextmanager
def running_app(
    file: ServeFile, progress: Progress, *, address: str | None = None
) -> Iterator[tuple[str, str, Tokenizer | None]]:
    """Run the application of a checked file until the block ends; its address, and its model's name and tokenizer (None
    where that is on other machines only).

    Models that the file names by catalogue or hub are fetched first, unless it runs on a cluster.

    At the block's end running requests may finish. An exception in it, including an interrupt, ends them at once.

    Args:
        file: what to run.
        progress: called with status messages.
        address: of a Ray cluster to run on; None = RAY_ADDRESS, which is set in a cluster's jobs, and without one
            starts a cluster on this machine and stops it afterwards.

    Raises:
        ConfigError: the port is taken, the machine or the cluster cannot serve it, the cluster cannot be reached, a
            replica could not start (the message is its own), or Serve or the application runs there already.
    """
    config = file.application.effective_args
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # progress reports it more briefly
    address = cluster_address(address)
    if address is None:
        if file.proxy_location != "Disabled":
            free_port(file.http_options, file.http_options.port)
        found = check_machine(config, Machine.here(), fetch=progress)
        found.require_servable()
        for hint in found.hints:
            progress(f"hint: {hint}")
        if config.engine.kind == "torch" and config.pools_on("cpu"):
            _prepare_kernels(progress)
    with own_connection():
        if address is None:
            cores = os.cpu_count() or 1
            needed = sum(config.pool(name).most_replicas * config.pool(name).num_cpus for name in config.pool_names)
            needed += config.router.replicas * config.router.num_cpus if config.router is not None else 0
            if needed > cores:
                progress(
                    f"warning: the pools ask for {needed:g} CPUs, here are {cores}; they will slow each other down"
                )
            os.environ.update(ray_environment())
            progress(f"starting Ray on this machine with {max(cores, needed):g} CPUs{_busy()}")
            session = _start_ray(max(cores, int(-(-needed // 1))), progress)
            progress(f"its logs, and in serve/ the replicas', are in {session}/logs")
        else:
            progress(f"connecting to Ray at {address}")
            _join(address)
            found = check_cluster(config)
            for line in (*(f"warning: {fault}" for fault in found.faults), *(f"hint: {hint}" for hint in found.hints)):
                progress(line)
            with suppress(ConfigError):
                if (folder := model_here(config.model.source)) is not None:
                    found.tokenizer = Tokenizer.from_folder(folder, config.model.chat_template)
        interrupt_on_sigterm()
        with _on_serve(file, address, progress) as http:
            base_url = f"{url_of(http)}{file.application.route_prefix.rstrip('/')}"
            yield base_url, config.model.served_name, found.tokenizer


def _prepare_kernels(progress: Progress) -> None:
    """Compile the CPU kernels before replicas wait for them, unless they are kept from before."""
    compiling.setLevel(logging.INFO)
    with passing_on(compiling, progress):
        kernels = find_kernels()
    if isinstance(kernels, str):
        progress(f"warning: replicas compute without their kernels, which is slow: {kernels}")


def ray_environment() -> dict[str, str]:
    """Return what must stand in the environment of the process that starts Ray on this machine."""
    wanted = {**PROXY_CALLBACK, "RAY_worker_niceness": "0"}  # Ray's default of 15 yields to everything else here
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be connected to a Ray cluster within the block. Raises ConfigError: it cannot be reached."""
    with own_connection():
        _join(address)
        yield


@contextmanager
def own_connection() -> Iterator[None]:
    """At the block's end, leave the Ray cluster that was joined or started in it; one from before it stays."""
    connected_before = ray.is_initialized()
    try:
        yield
    finally:
        if not connected_before:
            with uninterrupted():
                ray.shutdown()  # also ends the cluster, if it was started here


def _start_ray(num_cpus: int, progress: Progress) -> str:
    """Start a cluster on this machine, in several tries: Ray gives up after a time that knows no load (ray#65983).

    Returns the folder of its session. Raises ConfigError: it does not start."""
    for left in reversed(range(_STARTS)):
        before, began = set(process_tree(os.getpid())), time.monotonic()
        try:
            with _patient_ray():
                # "local": one of our own, also where `ray start` runs another
                context = ray.init("local", num_cpus=num_cpus, log_to_driver=False, logging_level="ERROR")
            return str(context.address_info["session_dir"])
        except Exception as error:  # a plain Exception where it took too long
            ray.shutdown()
            for pid in set(process_tree(os.getpid())) - before:  # of the failed start: they would slow the next one
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            said = f"Ray did not start on this machine in {time.monotonic() - began:.0f} s{_busy()}"
            if not left or isinstance(error, OSError | ValueError):
                raise ConfigError(
                    f"{said}: {_last_line(error)} Stop other programs or look into {LOGS}, and start it again."
                ) from error
            progress(f"{said}; starting it again, {left} more time{'s' * (left > 1)} at most")
    raise AssertionError("the last try returns or raises")


@contextmanager
def _patient_ray() -> Iterator[None]:
    """Within the block, Ray waits for its node as long as this machine's load makes it, not for half a minute."""
    deadline = time.monotonic() + min(_NODE_S * max(1.0, _load()), _MOST_NODE_S)
    look = ray_services.get_node

    def wait(*where: Any) -> Any:
        while True:
            try:
                return look(*where)
            except RuntimeError:  # the node is not up yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_EVERY_S)

    ray_services.get_node = wait
    try:
        yield
    finally:
        ray_services.get_node = look


def _load() -> float:
    """Runnable processes for each core."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _busy() -> str:
    """Say that this machine is busy, where it is."""
    cores = os.cpu_count() or 1
    is_busy = _load() > _BUSY
    return f" (the machine is busy: {_load() * cores:.0f} processes for {cores} cores)" if is_busy else ""


def _join(address: str) -> None:
    if address != "auto":
        place = re.fullmatch(r"(?:ray://)?\[?([^\s/]+?)\]?:(\d{1,5})", address)
        if place is None:
            raise ConfigError(f"{address!r} is not the address of a Ray cluster; give auto, or HOST:PORT of its head.")
        try:
            socket.create_connection((place[1], int(place[2])), timeout=_REACH_S).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"The Ray cluster at {address} cannot be reached ({error}); give HOST:PORT of its head, as `ray start` "
                "printed it."
            ) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(f"The Ray cluster at {address} cannot be joined: {_last_line(error)}") from error


@contextmanager
def _on_serve(file: ServeFile, address: str | None, progress: Progress) -> Iterator[HttpOptions]:
    """Run the application on the connected cluster; yields where it is reached."""
    config, name = file.application.effective_args, file.application.name
    joined = bool(serve.status().proxies)
    if getattr(serve.status().applications.get(name), "status", None) == "DELETING":  # as one just interrupted is
        progress(f"waiting for the last {name} to end")
        _wait_until_gone(name, _DELETING_S)
    if name in serve.status().applications:
        raise ConfigError(
            f"applications[0].name: {name} runs on this cluster already; stop it, or give this one another name and "
            "another route_prefix."
        )
    try:
        http = _start_serve(file, joined=joined, progress=progress)
        pools = " and ".join(f"{config.pool(name).most_replicas} {name}" for name in config.pool_names)
        progress(f"loading {config.model.source} ({pools})")
        target = serve.RunTarget(build(config), name, file.application.route_prefix)
        try:
            serve.run_many([target], wait_for_applications_running=False)
            _wait_until_running(name, progress)
        except (RuntimeError, ValueError, RayServeException, RayError) as error:
            if isinstance(error, TruespecError):
                raise
            raise ConfigError(f"The application did not start: {_last_line(error)}") from error
        yield http
        progress("stopping; requests that run may finish")
        serve.delete(name, _blocking=False)
        _wait_until_gone(name, config.limits.request_timeout_s)
        if address is not None and not joined:
            serve.shutdown()
    except BaseException:
        progress("stopping")
        if address is not None:  # a cluster that was started here ends with all that is on it
            with uninterrupted():
                serve.delete(name, _blocking=False) if joined else serve.shutdown()
        raise


def _start_serve(file: ServeFile, *, joined: bool, progress: Progress) -> HttpOptions:
    http = file.http_options
    if not joined:
        progress(f"starting Serve on {url_of(http)}")
        try:
            serve.start(proxy_location=file.proxy_location, http_options={"host": http.host, "port": http.port})
        except (RuntimeError, TimeoutError, RayError) as error:
            raise ConfigError(f"http_options: Serve cannot listen on {url_of(http)}: {_last_line(error)}") from error
        return http
    running: HTTPOptions = _get_global_client().http_config
    if (running.host, running.port) != (http.host, http.port):
        progress(f"Serve runs there already, on port {running.port}; http_options of this file do not count")
    return HttpOptions(host=running.host or http.host, port=running.port)


def _wait_until_running(name: str, progress: Progress) -> None:
    """Wait for every replica. What Serve says of one that is slow, or does not start, is passed on once; it tries that
    one again without end where another of its pool has started."""
    reported, starts = "", dict[str, str]()
    while True:
        application = serve.status().applications[name]
        lines = [status.message.strip() for status in application.deployments.values() if status.message.strip()]
        if application.status == "RUNNING":
            return
        if permanent := next(filter(None, map(_fault_of_ours, lines)), None):  # it would be the same each time
            raise ConfigError(f"A replica cannot start: {permanent}")
        said = _brief(lines[0]) if lines else ""
        if application.status == "DEPLOY_FAILED":
            raise ConfigError(f"The application did not start: {said or application.message} The logs are in {LOGS}.")
        if said and said != reported:
            reported = said
            progress(f"waiting: {said}")
        before, starts = starts, kept_starts(name)
        for replica, line in sorted(starts.items() - before.items()):
            progress(f"{replica}: {line}")
        time.sleep(_LOOK_EVERY_S)


def _fault_of_ours(message: str) -> str | None:
    """Return what our own error in a replica's start says; None where it was another's."""
    found = _OUR_ERROR.match(message) if _FAILED_START.match(message) else None
    return found[1].strip() if found else None


def _brief(message: str) -> str:
    """Serve's message on replicas that are slow to start, which reads like a failure, in words that do not; of one that
    failed the reason without its traceback."""
    if failed := _FAILED_START.match(message):
        reason = _fault_of_ours(message) or failed[2].strip().splitlines()[-1]
        if _KILLED.search(message):
            reason = "its process was killed or crashed; where memory runs out, the system kills the largest (dmesg)"
        again = f" and is tried again, {failed[1]} more time{'s' * (failed[1] != '1')} at most" if failed[1] else ""
        return f"a replica failed to start{again}: {reason}"
    slow = _SLOW_START.match(message)
    if slow is None:
        return message
    deployment, number, seconds, stage, needed = slow.groups()
    pool = POOL_OF_DEPLOYMENT.get(deployment, deployment)
    replicas = f"{number} {pool} replica{'' if number == '1' else 's'}"
    if stage == "initialize":
        return f"{replicas} still loading after {seconds} s, as a large model or a busy machine makes it{_busy()}"
    return (
        f"{replicas} without a process after {seconds} s: the machine is busy, or no node has free what each asks for "
        f"({needed})"
    )


def _wait_until_gone(name: str, limit_s: float) -> None:
    """Wait until an application that is being deleted is gone, at most this long."""
    deadline = time.monotonic() + limit_s
    while name in serve.status().applications and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)


def interrupt_on_sigterm() -> None:
    """Treat SIGTERM as an interrupt, in place of Ray's handler, which prints a stack first."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore interrupts and SIGTERM within the block, so that a shutdown completes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():  # None = one that was not set from Python, which cannot be set again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
