"""The runtime of every deployment but the controller: a name, logs, traces, metrics, and reports to the controller."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context
from functools import cache
from typing import Any, Literal, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.serve.exceptions import RayServeException

from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.deployments.controller_client import ControllerClient, controller_handle
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Checked
from serve_app.telemetry.logs import configure as configure_logs
from serve_app.telemetry.logs import passing_on
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.telemetry.tracing import Carried, Tracing, adopt, carried
from serve_app.versions import version_of
from speculative.errors import ConfigError

_logger = logging.getLogger("truespec.serve")
REPORT_EVERY_S = 1.0
_STARTS = "truespec/starts/"

T = TypeVar("T")


class ReplicaRuntime:
    """A replica's name, its metrics for the controller, and work that goes on beside requests."""

    def __init__(self, config: AppConfig, role: PoolName | Literal["router"]) -> None:
        self.config = config
        context = serve.get_replica_context()
        self.app_name = context.app_name
        self.name = context.replica_tag
        self.started_at = time.time()
        self.tracing = observe(config, role, self.name)
        self.buffer = BufferSink(self.name)
        self.metrics = Metrics(self.buffer, model_name=config.model.served_name, pool=role)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.controller = ControllerClient(cache(lambda: controller_handle(self.app_name)))  # once it is needed

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something beside the requests; it is kept from being collected until it ends.

        It has a context of its own: Serve cancels whatever a request has called when its client leaves, without an
        error, even if the request is over.
        """
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def check(self, answer: Answer) -> asyncio.Task[Checked]:
        """Have an answer replayed, whether anybody waits for the result or not.

        The task raises ConnectionError where the controller did not answer.
        """
        return self.spawn(self._check(answer, carried()))

    async def _check(self, answer: Answer, client: Carried) -> Checked:
        adopt(client)
        try:
            return await self.controller.check(answer)
        except (RayError, RayServeException) as error:
            raise ConnectionError(f"the controller did not answer: {error}") from error


class Reporter:
    """Sends a replica's reports, one at a time: about once a second, and when someone needs the newest counts.

    Args:
        runtime: of the replica.
        send: sends what was counted since the last time; None = the counts alone.
    """

    def __init__(self, runtime: ReplicaRuntime, send: Callable[[], Awaitable[None]] | None = None) -> None:
        self.every_s = REPORT_EVERY_S
        self._runtime = runtime
        self._send = send or self._send_counts
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None  # has not begun

    async def report(self) -> None:
        """Have what was counted until now sent, whatever becomes of the caller."""
        if self._next is None:
            self._next = self._runtime.spawn(self._report_in_turn())
        await asyncio.shield(self._next)

    async def report_forever(self) -> None:
        """Report about once a second."""
        while True:
            await asyncio.sleep(self.every_s)
            try:
                await self.report()
            except Exception:  # whatever it was, the next report may get through
                _logger.warning("the last report could not be sent", exc_info=True)

    async def _report_in_turn(self) -> None:
        async with self._one_at_a_time:
            self._next = None  # what is counted from now on is for another one
            await self._send()

    async def _send_counts(self) -> None:
        batch = self._runtime.buffer.drain()
        try:
            await self._runtime.controller.count(batch)
        except (RayError, RayServeException) as error:
            self._runtime.buffer.put_back(batch)
            _logger.debug("the report failed; its contents go with the next one: %s", error)


def observe(config: AppConfig, role: str, replica: str) -> Tracing:
    """Set up the log lines of this replica's process; what makes its spans."""
    settings = config.observability
    configure_logs(settings.log_format, settings.log_level, replica)
    if settings.traces_endpoint is None:
        return Tracing()
    resource = {
        "service.name": "truespec",
        "service.version": version_of("truespec"),
        "service.instance.id": replica,
        "truespec.role": role,
        "truespec.model": config.model.served_name,
    }
    return Tracing.to_collector(settings.traces_endpoint, settings.traces_share, resource)


@contextlib.contextmanager
def keeping_start(app_name: str, replica: str) -> Iterator[None]:
    """Keep in Ray the last line of an engine about its start, while that lasts, for `kept_starts`; where Ray does
    not take it, the start goes on."""
    key = f"{_STARTS}{app_name}/{replica}"

    def keep(line: str) -> None:
        with contextlib.suppress(Exception):
            _internal_kv_put(key, line)

    try:
        with passing_on(logging.getLogger("truespec.start"), keep):
            yield
    finally:
        with contextlib.suppress(Exception):
            _internal_kv_del(key)


def kept_starts(app_name: str) -> dict[str, str]:
    """Return the last line of each engine of an application that starts now, by replica."""
    place = f"{_STARTS}{app_name}/"
    found = {key.decode(): _internal_kv_get(key) for key in _internal_kv_list(place)}
    return {key.removeprefix(place): line.decode() for key, line in found.items() if line is not None}


@contextlib.contextmanager
def naming_node() -> Iterator[None]:
    """Have what this node lacks reported with the node's name: its host, and its id in `ray list nodes`. Raises
    ConfigError: as it was raised, with the node."""
    try:
        yield
    except ConfigError as error:
        node = f"{socket.gethostname()}, {ray.get_runtime_context().get_node_id()}"
        raise ConfigError(f"{error} (On node {node}.)") from error
