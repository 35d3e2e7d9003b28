"""What every replica does besides computing: it reports, is watched, and stops in an orderly way."""

import asyncio
import contextlib
import dataclasses
import gc
import importlib.metadata
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from contextvars import Context
from typing import Any, Literal

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.backends.base import Backend, ModelInfo, Replayed
from serve_app.backends.torch_backend import TorchBackend
from serve_app.backends.traced import TracedBackend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.integrity.breaker import Breaker, BreakerSettings, Mode
from serve_app.integrity.breaker_control import Guard
from serve_app.integrity.canary import Canary, CanarySettings
from serve_app.integrity.heartbeat import Finished, Orders, Report
from serve_app.integrity.replays import Records, ReplayJob
from serve_app.integrity.verdicts import Checked
from serve_app.routing.autoscaling import Backlog
from serve_app.routing.replica_router import MOST_REPORTED, reported_blocks
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.logs import configure as configure_logs
from serve_app.telemetry.metrics import BufferSink, Metrics, RaySink
from serve_app.telemetry.tracing import Carried, Tracing, adopt, carried
from serve_app.transport.selection import make_transport
from serve_app.weights.desired_state import DesiredState
from serve_app.weights.transfer import fetched
from serve_app.weights.updater import WeightsKeeper
from speculative.errors import EngineFault, TruespecError
from speculative.request import Request

_logger = logging.getLogger("truespec.serve")
CONTROLLER = "Controller"
REPORT_EVERY_S = 1.0
_HURRIED_REPORT_S = 0.1  # while weights are on their way
_JOIN_TIMEOUT_S = 60.0
_FIRST_REPORT_S = 5.0
_CANARY_DRAFTS = 32  # draft tokens without which a canary has shown nothing
SIGNS_OF_LIFE = 4  # in the time after which a decode replica counts as lost
_MOST_UNREPORTED = 10_000  # finished requests that are kept while the referee does not answer


class Replica:
    """What every replica but the referee has: a name, metrics that reach Ray's agent and the referee, and work that
    goes on beside the requests."""

    def __init__(self, config: AppConfig, pool: PoolName | Literal["router"]) -> None:
        self._config = config
        context = serve.get_replica_context()
        self._app_name = context.app_name
        self.name = context.replica_tag
        self.tracing = observe(config, pool, self.name)
        self._buffer = BufferSink(self.name)
        self.metrics = Metrics([RaySink(), self._buffer], model_name=config.model.served_name, pool=pool)
        self.report_every_s = REPORT_EVERY_S
        self._tasks: set[asyncio.Task[None]] = set()
        self._referee: DeploymentHandle[Any] | None = None
        self._reporting = asyncio.Lock()
        self._next_report: asyncio.Task[None] | None = None  # has not begun

    def spawn(self, work: Coroutine[Any, Any, None], context: Context | None = None) -> asyncio.Task[None]:
        """Run something beside the requests; it is kept from being collected until it ends."""
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def referee(self) -> DeploymentHandle[Any]:
        """The app's one referee. The handle is kept: each has a router of its own."""
        if self._referee is None:
            handle: DeploymentHandle[Any] = serve.get_deployment_handle(CONTROLLER, self._app_name)
            self._referee = handle.options(_by_reference=True)  # weights come as references to objects
        return self._referee

    async def report(self) -> None:
        """Have what was counted until now sent, whatever becomes of the caller."""
        if self._next_report is None:
            # A context of its own: Serve cancels whatever a request has called when its client leaves.
            self._next_report = self.spawn(self._report_in_turn(), Context())
        await asyncio.shield(self._next_report)

    async def _report_in_turn(self) -> None:
        async with self._reporting:
            self._next_report = None  # what is counted from now on is for another one
            await self.send_report()

    async def send_report(self) -> None:
        """Send what was counted since the last time."""
        batch = self._buffer.drain()
        try:
            await self.referee().count.remote(batch)
        except (RayError, RayServeException) as error:
            self._buffer.put_back(batch)
            _logger.debug("nothing was reported, it goes with the next report: %s", error)

    async def report_forever(self) -> None:
        """Report about once a second."""
        while True:
            await asyncio.sleep(self.report_every_s)
            try:
                await self.report()
            except Exception:  # whatever it was, the next report may get through
                _logger.warning("nothing could be reported", exc_info=True)

    async def check(self, job: ReplayJob) -> Checked:
        """Have the referee check a request, and wait for what comes of it."""
        try:
            return await self.referee().check.remote(job, carried())  # type: ignore[no-any-return]
        except (RayError, RayServeException) as error:
            raise ConnectionError(f"the referee did not answer: {error}") from error

    async def check_health(self) -> None:
        """Called by Serve; a replica that raises is replaced."""


class EngineReplica(Replica):
    """A replica with an engine: a backend, a guard over it, and the records of what it serves."""

    def __init__(self, config: AppConfig, pool: PoolName) -> None:
        super().__init__(config, pool)
        self._pool: PoolName = pool
        backend = self.make_backend()
        self.backend: Backend = TracedBackend(backend, self.tracing) if self.tracing.enabled else backend
        self._guard: Guard | None = None
        self.keeper: WeightsKeeper | None = None
        self.backlog = Backlog()
        self.transport = make_transport(config.parcels)
        self._finished: deque[Finished] = deque(maxlen=_MOST_UNREPORTED)

    def make_backend(self) -> Backend:
        """The engine of this replica, not yet loaded."""
        config, pool = self._config, self._pool
        source, name = config.model.source, config.model.served_name
        if config.engine.kind == "torch":
            return TorchBackend(source, name, config.engine_config(pool))
        replays = pool != "decode" and config.vllm.replays == "torch"
        replayer = TorchBackend(source, name, config.replay_config(pool)) if replays else None
        return VllmBackend(source, name, config.vllm_settings(pool), replayer)

    async def start(self) -> ModelInfo:
        """Load the engine, and report to the referee from then on."""
        info = await self.backend.start()
        self._build = {
            "version": importlib.metadata.version("truespec"),
            "fingerprint": info.fingerprint,
            "drafter": self._config.drafter.kind,
        }
        self._computing = info.computing
        if info.computing.kernels_off:
            _logger.warning("%s computes without its kernels, which is slow: %s", self.name, info.computing.kernels_off)
        info = await self.join(info)
        self.records = Records(self.name, info.max_model_len)
        self.source = self.make_source()
        self.canary = self._make_canary()
        self._guard = self._make_guard()
        with contextlib.suppress(Exception):  # the next report may get through
            async with asyncio.timeout(_FIRST_REPORT_S):  # what is wrong from the start is known when the service is
                await self.report()
        self.spawn(self.report_forever())
        gc.collect()
        gc.freeze()  # a collection that walked all that was loaded would halt every stream for half a second
        return info

    def make_source(self) -> PooledTokenSource:
        """Where this replica's tokens come from."""
        return PooledTokenSource(self.backend, self.metrics)

    async def send_report(self) -> None:
        """Send what was counted since the last time, and do what the referee's answer asks for."""
        guard = self._started_guard()
        stats = self.backend.take_stats()
        self.metrics.record_steps(stats, self.backend.usage())
        self.backlog.observe(stats.num_prompt_tokens + stats.prefix_cache_hits, stats.draft_s + stats.verify_s)
        self.metrics.gauge("truespec_build_info", 1, **self._build)  # Ray's agent forgets what is not set again
        computing = self._computing
        if computing.kernels:
            self.metrics.gauge("truespec_kernels_active", not computing.kernels_off, kernels=computing.kernels)
        guard.inspect(stats)
        guard.act()
        batch, trips, finished = self._buffer.drain(), guard.take_trips(), tuple(self._finished)
        self._finished.clear()
        try:
            checks, keeper = self.backend.self_checks(), self.keeper
            weights = keeper.status if keeper else None
            report = Report(guard.status, batch, finished, trips, checks, weights, computing)
            orders: Orders = await self.referee().report.remote(report)
        except (RayError, RayServeException) as error:
            self._buffer.put_back(batch)
            guard.put_back(trips)
            self._finished.extendleft(reversed(finished))
            _logger.debug("nothing was reported, it goes with the next report: %s", error)
            return
        guard.obey(orders)
        guard.act()
        if self.keeper is not None and orders.weights is not None:
            self.keeper.obey(orders.weights)
            self.report_every_s = _HURRIED_REPORT_S if self.keeper.behind else REPORT_EVERY_S

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: this replica's load, by the names of `AutoscalingSection.targets`."""
        usage = self.backend.usage()
        return {
            "backlog_s": self.backlog.seconds,
            "kv_usage": usage.kv_usage,
            "running_share": (usage.num_running + usage.num_waiting) / self._config.engine.max_num_seqs,
        }

    @contextlib.contextmanager
    def _timed_handoff(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.metrics.count("truespec_handoff_seconds_total", time.monotonic() - began, phase=phase)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve: what the routers of `serve_app.routing.replica_router` choose by."""
        load = await self.record_autoscaling_stats()
        blocks = reported_blocks(self.backend.cached_blocks(MOST_REPORTED))
        return load | {"blocks": blocks, "backlog_tokens": self.backlog.num_tokens}

    async def join(self, info: ModelInfo) -> ModelInfo:
        """Come to the weights that the service has by now, before any request comes; what is served then."""

        async def pull(content: Any) -> Any:
            return await content

        keeper = WeightsKeeper(
            self.backend, info, lambda ref: fetched(ref, info, pull), self.weights_switched, self.metrics
        )
        try:
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                wanted: DesiredState = await self.referee().wanted_weights.remote()
        except (RayError, RayServeException, TimeoutError) as error:
            _logger.warning("the referee did not say which weights to serve; they come with a report: %s", error)
        else:
            keeper.obey(dataclasses.replace(wanted, load=None))
            await keeper.wait_converged()
            keeper.check_health()
        self.keeper = keeper
        return keeper.info

    def weights_switched(self, info: ModelInfo) -> None:
        """Other weights are served from now on."""
        self._buffer.forget_gauge("truespec_build_info")  # of the old fingerprint
        self._build["fingerprint"] = info.fingerprint

    async def replay(self, request: Request, reported: Carried) -> Replayed:
        """Compute a teacher-forced request, for the referee."""
        adopt(reported)
        return dataclasses.replace(await self.backend.replay(request), replica=self.name)

    async def check_health(self) -> None:
        """Called by Serve; a replica that raises is replaced."""
        self.backend.check_health()
        if self.keeper is not None:
            self.keeper.check_health()
        if self._guard is not None:
            self._guard.check_health()

    def _started_guard(self) -> Guard:
        if self._guard is None:
            raise EngineFault("The replica is not started.")
        return self._guard

    def _make_canary(self) -> Canary:
        comparable = self._config.engine.logprobs_mode == "raw_logprobs"
        drafts = self._pool != "prefill" and self._config.drafter.kind != "none"
        settings = CanarySettings(self._config.breaker.canary_requests, min_drafted=_CANARY_DRAFTS if drafts else 0)
        return Canary(self.source, self.records, self.check if comparable else None, settings)

    def _make_guard(self) -> Guard:
        breaker = self._config.breaker
        settings = BreakerSettings(breaker.cooldown_s, breaker.window_s, breaker.suspect_s)
        return Guard(
            (self.name, self._pool),
            self.backend,
            Breaker(settings, time.time, Mode(breaker.mode)),
            self.metrics,
            self.canary.try_out,
        )


def observe(config: AppConfig, role: str, replica: str) -> Tracing:
    """Set up the log lines of this replica's process; what makes its spans."""
    settings = config.observability
    configure_logs(settings.log_format, settings.log_level, replica)
    if settings.traces_endpoint is None:
        return Tracing()
    resource = {
        "service.name": "truespec",
        "service.version": importlib.metadata.version("truespec"),
        "service.instance.id": replica,
        "truespec.role": role,
        "truespec.model": config.model.served_name,
    }
    return Tracing.to_collector(settings.traces_endpoint, settings.traces_share, resource)


def own_error(error: RayTaskError, otherwise: type[Exception] = ConnectionError) -> Exception:
    """What a replica raised: our own exceptions as they are, anything else as work that did not happen."""
    cause = error.cause
    return cause if isinstance(cause, TruespecError) else otherwise(f"a replica failed: {cause}")
