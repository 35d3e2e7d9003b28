"""The pools as Ray Serve deployments: thin classes that put an engine, a front end and metrics together.

DecodeServer is the HTTP ingress and the orchestrator: it asks a prefill replica for the handoff, goes on from it, and
streams. MonolithServer is the same without a prefill pool. PrefillServer computes prompts, and replays finished
requests for the referee. RefereeServer is one actor: it checks what was served, keeps the verdicts, and the sums of the
whole app for `/metrics`.
"""

import asyncio
import dataclasses
import importlib.metadata
import logging
import time
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.access import TokenAccess
from serve_app.admin import Admin, SpeculationOrder, Statuses
from serve_app.backends.base import Backend, Handoff, ModelInfo, Prefilled, Replayed
from serve_app.backends.torch_backend import TorchBackend
from serve_app.breaker import Breaker, BreakerSettings, Mode
from serve_app.canary import Canary, CanarySettings
from serve_app.checks import Checks
from serve_app.config import AppConfig, PoolName
from serve_app.dumps import DumpFolder
from serve_app.errors import UnknownReplica
from serve_app.frontend import FrontEnd, Limits
from serve_app.guard import Guard
from serve_app.ingress import build_ingress
from serve_app.metrics import BufferSink, Metrics, PrometheusSink, RaySink
from serve_app.observed_source import ObservedSource, SourceLimits
from serve_app.page.feed import StatusFeed
from serve_app.page.routes import add_page
from serve_app.page.status import StatusBook
from serve_app.referee import Referee, RefereeSettings, chosen
from serve_app.replays import Record, Records, ReplayJob
from serve_app.reports import Finished, Orders, Report
from serve_app.scoring import ScoreLimits, Scorer
from serve_app.token_source import PooledTokenSource
from serve_app.tokenizer import Tokenizer
from serve_app.verdicts import Checked
from serve_app.watch import Rounding
from speculative.errors import EngineFault, TruespecError
from speculative.request import Request

_logger = logging.getLogger("truespec.serve")

REFEREE = "RefereeServer"
_REPORT_EVERY_S = 1.0
_CANARY_DRAFTS = 32  # draft tokens without which a canary has shown nothing
_MOST_UNTOLD = 10_000  # finished requests that are kept while the referee does not answer


class EngineReplica:
    """What every replica with an engine has: a backend, a guard over it, and metrics that reach Ray's agent and the
    referee."""

    def __init__(self, config: AppConfig, pool: PoolName) -> None:
        self._config = config
        self._pool: PoolName = pool
        context = serve.get_replica_context()
        self._app_name = context.app_name
        self.name = context.replica_tag
        self._buffer = BufferSink(self.name)
        self.metrics = Metrics([RaySink(), self._buffer], model_name=config.model.served_name, pool=pool)
        self.backend = self.make_backend()
        self._tasks: set[asyncio.Task[None]] = set()
        self._referee: DeploymentHandle[Any] | None = None
        self._guard: Guard | None = None
        self._finished: deque[Finished] = deque(maxlen=_MOST_UNTOLD)

    def make_backend(self) -> Backend:
        """The engine of this replica, not yet loaded."""
        config = self._config
        return TorchBackend(config.model.source, config.model.served_name, config.engine_config(self._pool))

    async def start(self) -> ModelInfo:
        """Load the engine, and report to the referee from then on."""
        info = await self.backend.start()
        self._build = {
            "version": importlib.metadata.version("truespec"),
            "fingerprint": info.fingerprint,
            "drafter": self._config.drafter.kind,
        }
        self.records = Records(self.name, info.max_model_len)
        self.source = self.make_source()
        self.canary = self._make_canary()
        self._guard = self._make_guard()
        self.spawn(self._report_forever())
        return info

    def make_source(self) -> PooledTokenSource:
        """Where this replica's tokens come from."""
        return PooledTokenSource(self.backend, self.metrics)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the requests; it is kept from being collected until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def referee(self) -> DeploymentHandle[Any]:
        """The app's one referee. The handle is kept: each has a router of its own."""
        if self._referee is None:
            self._referee = serve.get_deployment_handle(REFEREE, self._app_name)
        return self._referee

    async def report(self) -> None:
        """Send what was counted since the last time, and do what the referee's answer asks for."""
        guard = self._started_guard()
        stats = self.backend.take_stats()
        self.metrics.record_steps(stats, self.backend.usage())
        self.metrics.gauge("truespec_build_info", 1, **self._build)  # Ray's agent forgets what is not set anew
        guard.inspect(stats)
        guard.act()
        batch, trips, finished = self._buffer.drain(), guard.take_trips(), tuple(self._finished)
        self._finished.clear()
        try:
            report = Report(guard.status, batch, finished, trips, self.backend.self_checks())
            orders: Orders = await self.referee().report.remote(report)
        except (RayError, RayServeException) as error:
            self._buffer.put_back(batch)
            guard.put_back(trips)
            self._finished.extendleft(reversed(finished))
            _logger.debug("nothing was reported, it goes with the next report: %s", error)
            return
        guard.obey(orders)
        guard.act()

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            try:
                await self.report()
            except Exception:  # whatever it was, the next report may get through
                _logger.warning("nothing could be reported", exc_info=True)

    async def replay(self, request: Request) -> Replayed:
        """Compute a teacher-forced request, for the referee."""
        return dataclasses.replace(await self.backend.replay(request), replica=self.name)

    async def check(self, job: ReplayJob) -> Checked:
        """Have the referee check a request, and wait for what comes of it."""
        try:
            return await self.referee().check.remote(job)  # type: ignore[no-any-return]
        except (RayError, RayServeException) as error:
            raise ConnectionError(f"the referee did not answer: {error}") from error

    async def check_health(self) -> None:
        """Called by Serve; a replica that raises is replaced."""
        self.backend.check_health()
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


class HttpReplica(EngineReplica):
    """A replica that answers HTTP: the front end over its local engine, and perhaps a prefill pool."""

    def __init__(self, config: AppConfig, pool: PoolName, prefill: "DeploymentHandle[Any] | None") -> None:
        super().__init__(config, pool)
        self._prefill = prefill
        self._front_end: FrontEnd | None = None
        self._scorer: Scorer | None = None
        self._admin = self._make_admin()

    def make_source(self) -> PooledTokenSource:
        """Where this replica's tokens come from."""
        ask = self._ask_prefill if self._prefill else None
        return PooledTokenSource(self.backend, self.metrics, ask, self.records.handed_off)

    async def start(self) -> ModelInfo:
        """Load the engine and build the front end over it."""
        info = await super().start()
        limits, replay = self._config.limits, self._config.replay
        comparable = self._config.engine.logprobs_mode == "raw_logprobs"
        self._checks = Checks(
            lambda request_id: chosen(request_id, replay.share), self._submit, self.check, replay.verify_timeout_s
        )
        source = ObservedSource(
            self.source,
            self.metrics,
            self.records,
            choose=self._checks.chooses,
            ended=self._ended,
            limits=SourceLimits(limits.max_ongoing_requests, limits.request_timeout_s),
        )
        tokenizer = Tokenizer.from_folder(info.folder)
        self._front_end = FrontEnd(
            source,
            tokenizer,
            info,
            Limits(max_body_bytes=limits.max_body_bytes, max_choices=limits.max_choices),
            checks=self._checks if comparable else None,
        )
        self._scorer = Scorer(
            source,
            tokenizer,
            info,
            logprobs_mode=self._config.engine.logprobs_mode,
            limits=ScoreLimits(
                max_concurrent=min(self._config.engine.max_num_seqs, limits.max_ongoing_requests),
                timeout_s=limits.request_timeout_s,
            ),
        )
        return info

    def asgi_app(self) -> Any:
        """The HTTP application of this replica."""
        if self._front_end is None:
            raise EngineFault("The replica is not started.")
        app = build_ingress(
            self._front_end,
            scorer=self._scorer,
            metrics=self.exposition,
            health=self.check_health,
            verdicts=self.verdict,
            admin=self._admin,
        )
        add_page(app, StatusFeed(self.status))
        return app

    async def status(self) -> dict[str, Any]:
        """What the status page shows of the whole app."""
        return await self.referee().status.remote()  # type: ignore[no-any-return]

    async def exposition(self) -> tuple[bytes, str]:
        """The whole app's metrics, this replica's newest counts included."""
        await self.report()
        return await self.referee().exposition.remote()  # type: ignore[no-any-return]

    async def verdict(self, reply_id: str) -> dict[str, Any] | None:
        """What is known of a reply, this replica's newest ones included."""
        await self.report()
        return await self.referee().verdict.remote(reply_id)  # type: ignore[no-any-return]

    def _make_admin(self) -> Admin | None:
        path = self._config.admin.token_file
        if path is None:
            return None

        async def statuses() -> Statuses:
            return await self.referee().statuses.remote()  # type: ignore[no-any-return]

        async def order(wanted: SpeculationOrder) -> Statuses:
            told: Statuses | None = await self.referee().order.remote(Mode(wanted.mode), wanted.replica)
            if told is None:
                raise UnknownReplica(f"There is no replica {wanted.replica!r}; GET /admin/speculation lists them.")
            return told

        return Admin(TokenAccess.from_file(Path(path)), statuses, order)

    def _ended(self, record: Record, job: ReplayJob | None) -> None:
        self.canary.remember(record.request)
        self._finished.append(Finished(record.request.request_id, record.began_at, time.time()))
        if job is not None:
            self._checks.ended(job)

    def _submit(self, job: ReplayJob) -> None:
        self.spawn(self._submit_soon(job))

    async def _submit_soon(self, job: ReplayJob) -> None:
        try:
            await self.referee().submit.remote(job)
        except (RayError, RayServeException) as error:
            self.metrics.count("truespec_replays_total", result="failed")
            _logger.warning("%s could not be submitted for replay: %s", job.request.request_id, error)

    async def _ask_prefill(self, request: Request, first_token: bool) -> Prefilled:
        assert self._prefill is not None
        try:
            deltas, handoff, replica = await self._prefill.prefill.remote(request, first_token)
        except BackPressureError as error:
            raise ConnectionError(f"the prefill pool is full: {error}") from error
        except RayTaskError as error:
            raise _own_error(error) from error
        except (RayActorError, RayError, RayServeException) as error:
            raise ConnectionError(f"no prefill replica answered: {error}") from error
        return Prefilled(deltas, handoff, replica)


@serve.ingress()
class DecodeServer(HttpReplica):
    """HTTP, orchestration and decoding; prompts are computed by the prefill pool."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, prefill: "DeploymentHandle[Any]", referee: object
    ) -> None:
        del referee  # bound so that it belongs to the app; found by name, as the referee's own replicas are
        super().__init__(config, "decode", prefill)
        await self.start()

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the constructor has finished."""
        return self.asgi_app()


@serve.ingress()
class MonolithServer(HttpReplica):
    """HTTP, prefill and decoding in one replica."""

    async def __init__(self, config: AppConfig, referee: object) -> None:  # type: ignore[misc]
        del referee
        super().__init__(config, "monolith", None)
        await self.start()

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the constructor has finished."""
        return self.asgi_app()


class PrefillServer(EngineReplica):
    """Computes prompts and hands them off; replays finished requests when asked."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        super().__init__(config, "prefill")
        await self.start()

    async def prefill(self, request: Request, first_token: bool) -> tuple[tuple[Any, ...], Handoff | None, str]:
        """Deltas so far, the handoff and this replica's name: a return value, so that the caller owns it and it
        outlives this replica."""
        prefilled = await self.backend.prefill(request, first_token=first_token)
        return prefilled.deltas, prefilled.handoff, self.name


class RefereeServer:
    """One actor for the whole app: it has finished requests replayed, keeps the verdicts, and everybody's counts."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        pool = config.pool_names[0]
        replayer = "PrefillServer" if pool == "prefill" else "MonolithServer"

        handles: list[DeploymentHandle[Any]] = []  # one, made when first needed: by then the replayer is there

        async def replay(request: Request) -> Replayed:
            if not handles:
                handles.append(serve.get_deployment_handle(replayer, context.app_name))
            return await handles[0].replay.remote(request)  # type: ignore[no-any-return]

        self._sums = PrometheusSink(source=context.replica_tag)
        metrics = Metrics([RaySink(), self._sums], model_name=config.model.served_name, pool=pool)
        self._referee = Referee(replay, metrics, _referee_settings(config), _dump_folder(config))
        self._status = StatusBook(_about(config), time.time)
        self._work = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._referee.run())
            tasks.create_task(self._note_forever())

    async def _note_forever(self) -> None:
        while True:
            self._status.note(self._sums.samples())
            await asyncio.sleep(_REPORT_EVERY_S)

    async def submit(self, job: ReplayJob) -> None:
        """Queue a finished request for replay."""
        self._referee.submit(job)

    async def check(self, job: ReplayJob) -> Checked:
        """Have a finished request replayed, and wait for it."""
        return await self._referee.check(job)

    async def report(self, report: Report) -> Orders:
        """Take in what a replica counted and did, and tell it what was found out about it."""
        self._sums.apply(report.batch)
        return self._referee.hear(report)

    async def verdict(self, reply_id: str) -> dict[str, Any] | None:
        """What is known of a reply."""
        return self._referee.verdict(reply_id)

    async def statuses(self) -> Statuses:
        """Where every replica stands."""
        return self._referee.statuses()

    async def order(self, mode: Mode, replica: str | None) -> Statuses | None:
        """Pass on what an operator wants; None where there is no such replica."""
        return self._referee.order(mode, replica)

    async def status(self) -> dict[str, Any]:
        """What the status page shows."""
        return self._status.render(self._sums.samples(), self._referee.overview())

    async def exposition(self) -> tuple[bytes, str]:
        """The app's metrics in Prometheus' text format, and the content type."""
        return self._sums.exposition()

    async def check_health(self) -> None:
        """Called by Serve; a referee whose work has ended is replaced."""
        if self._work.done():
            raise EngineFault("The referee's work has ended.")


def _referee_settings(config: AppConfig) -> RefereeSettings:
    replay, drafter = config.replay, config.drafter
    return RefereeSettings(
        max_queue=replay.max_queue,
        max_running=replay.max_running,
        max_tme=replay.max_tme,
        rounding=Rounding(replay.law_tolerance, replay.edge_of(config.engine.dtype)),
        num_draft_tokens=0 if drafter.kind == "none" else drafter.num_draft_tokens,
        keep_verdicts=replay.keep_verdicts,
    )


def _about(config: AppConfig) -> dict[str, Any]:
    return {
        "model": config.model.served_name,
        "topology": config.topology,
        "drafter": config.drafter.kind,
        "replay_share": config.replay.share,
        "max_tme": config.replay.max_tme,
        "verifies": config.engine.logprobs_mode == "raw_logprobs",
    }


def _dump_folder(config: AppConfig) -> DumpFolder:
    dumps = config.dumps
    folder = None if dumps.folder is None else Path(dumps.folder)
    return DumpFolder(folder, dumps.max_files, dumps.max_mib * 2**20)


def _own_error(error: RayTaskError) -> Exception:
    """What a replica raised: our own exceptions as they are, anything else as a prefill that did not happen."""
    cause = error.cause
    return cause if isinstance(cause, TruespecError) else ConnectionError(f"a prefill replica failed: {cause}")
