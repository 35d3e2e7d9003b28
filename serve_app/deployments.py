"""The pools as Ray Serve deployments: thin classes that put an engine, a front end and metrics together.

DecodeServer is the HTTP ingress and the orchestrator: it asks a prefill replica for the handoff, goes on from it, and
streams. MonolithServer is the same without a prefill pool. Where streams are to outlive the replica that decodes them,
StreamRouter answers HTTP and DecodeWorker takes the place of either. PrefillServer computes prompts, and replays
finished requests for the referee. RefereeServer is one actor: it checks what was served, keeps the verdicts, and the
sums of the whole app for `/metrics`.
"""

import asyncio
import contextlib
import dataclasses
import gc
import importlib.metadata
import logging
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import Context
from pathlib import Path
from typing import Any, Literal

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.context import _get_serve_request_context
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.access import Access, read_token
from serve_app.admin import Admin, PauseOrder, SpeculationOrder, Statuses, WeightsAdmin, WeightsOrder
from serve_app.backends.base import Backend, ModelInfo, Parsers, PauseMode, Prefilled, Replayed
from serve_app.backends.torch_backend import TorchBackend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.breaker import Breaker, BreakerSettings, Mode
from serve_app.canary import Canary, CanarySettings
from serve_app.checks import Checks
from serve_app.config import AppConfig, PoolName
from serve_app.dumps import DumpFolder
from serve_app.errors import UnknownReplica
from serve_app.frontend import FrontEnd, Limits, TokenSource
from serve_app.gate import Gate
from serve_app.guard import Guard
from serve_app.ingress import Operations, build_ingress
from serve_app.keys import KeyStore
from serve_app.logs import configure as configure_logs
from serve_app.metrics import BufferSink, MetricBatch, Metrics, PrometheusSink, RaySink
from serve_app.observed_source import ObservedSource, SourceLimits
from serve_app.page.feed import StatusFeed
from serve_app.page.routes import add_page
from serve_app.page.status import StatusBook
from serve_app.referee import Referee, RefereeSettings, chosen
from serve_app.replays import Record, Records, ReplayJob
from serve_app.reports import Finished, Orders, Report
from serve_app.resume import ReplicaLost, ResumingSource, Streamed, own_name, with_signs_of_life
from serve_app.routing import MOST_TOLD, told_blocks
from serve_app.scaling import Backlog
from serve_app.scoring import ScoreLimits, Scorer
from serve_app.token_source import PooledTokenSource, PoolFull, PrefillPatience
from serve_app.tokenizer import Tokenizer, tokenizer_files
from serve_app.traced_backend import TracedBackend
from serve_app.tracing import Carried, Tracing, adopt, carried
from serve_app.transport.base import Parcel
from serve_app.transport.choice import make_transport
from serve_app.verdicts import Checked
from serve_app.watch import Rounding
from serve_app.weights import Outcome, Transfers, Wanted, WeightsDesk, WeightsKeeper, WeightsRef, fetched
from speculative.errors import EngineFault, EngineOverloaded, TruespecError
from speculative.request import FinishReason, Request

_logger = logging.getLogger("truespec.serve")

REFEREE = "RefereeServer"
_REPORT_EVERY_S = 1.0
_HURRIED_REPORT_S = 0.1  # while weights are on their way
_JOIN_TIMEOUT_S = 60.0
_CANARY_DRAFTS = 32  # draft tokens without which a canary has shown nothing
_SIGNS_OF_LIFE = 4  # in the time after which a decode replica counts as lost
_MOST_UNTOLD = 10_000  # finished requests that are kept while the referee does not answer


class Replica:
    """What every replica but the referee has: a name, metrics that reach Ray's agent and the referee, and work that
    goes on beside the requests."""

    def __init__(self, config: AppConfig, pool: PoolName | Literal["router"]) -> None:
        self._config = config
        context = serve.get_replica_context()
        self._app_name = context.app_name
        self.name = context.replica_tag
        self.tracing = _observe(config, pool, self.name)
        self._buffer = BufferSink(self.name)
        self.metrics = Metrics([RaySink(), self._buffer], model_name=config.model.served_name, pool=pool)
        self.report_every_s = _REPORT_EVERY_S
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
            handle: DeploymentHandle[Any] = serve.get_deployment_handle(REFEREE, self._app_name)
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
        self._finished: deque[Finished] = deque(maxlen=_MOST_UNTOLD)

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
        info = await self.join(info)
        self.records = Records(self.name, info.max_model_len)
        self.source = self.make_source()
        self.canary = self._make_canary()
        self._guard = self._make_guard()
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
        self.metrics.gauge("truespec_build_info", 1, **self._build)  # Ray's agent forgets what is not set anew
        guard.inspect(stats)
        guard.act()
        batch, trips, finished = self._buffer.drain(), guard.take_trips(), tuple(self._finished)
        self._finished.clear()
        try:
            checks, keeper = self.backend.self_checks(), self.keeper
            report = Report(guard.status, batch, finished, trips, checks, keeper.status if keeper else None)
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
            self.report_every_s = _HURRIED_REPORT_S if self.keeper.behind else _REPORT_EVERY_S

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
        """Called by Serve: what the routers of `serve_app.routing` choose by."""
        load = await self.record_autoscaling_stats()
        blocks = told_blocks(self.backend.cached_blocks(MOST_TOLD))
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
                wanted: Wanted = await self.referee().wanted_weights.remote()
        except (RayError, RayServeException, TimeoutError) as error:
            _logger.warning("the referee did not say which weights to serve; they come with a report: %s", error)
        else:
            keeper.obey(dataclasses.replace(wanted, load=None))
            await keeper.settle()
            keeper.check_health()
        self.keeper = keeper
        return keeper.info

    def weights_switched(self, info: ModelInfo) -> None:
        """Other weights are served from now on."""
        self._buffer.forget_gauge("truespec_build_info")  # of the old fingerprint
        self._build["fingerprint"] = info.fingerprint

    async def replay(self, request: Request, told: Carried) -> Replayed:
        """Compute a teacher-forced request, for the referee."""
        adopt(told)
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


class DecodingReplica(EngineReplica):
    """A replica whose engine decodes, and perhaps a prefill pool that computes its prompts."""

    def __init__(self, config: AppConfig, pool: PoolName, prefill: "DeploymentHandle[Any] | None") -> None:
        super().__init__(config, pool)
        # By reference, also where Serve's handles go by value otherwise: messages by value end at 4 MiB.
        self._prefill = None if prefill is None else prefill.options(_by_reference=True)

    def make_source(self) -> PooledTokenSource:
        """Where this replica's tokens come from."""
        ask = self._ask_prefill if self._prefill else None
        recovery = self._config.recovery
        patience = PrefillPatience(recovery.prefill_timeout_s, recovery.prefill_retries)
        return PooledTokenSource(self.backend, self.metrics, ask, self.handed_off, patience)

    def handed_off(self, request_id: str, prefilled_by: str) -> None:
        """The handoff of a request was taken in."""
        self.records.handed_off(request_id, prefilled_by)

    def remember(self, request: Request, began_at: float, prefilled_by: str, *, failed: bool = False) -> None:
        """Keep what is to be known here of a request that came to its end, and began at that time (unix seconds)."""
        if not failed:  # its own parameters may be why: tried again, it would fail again
            self.canary.remember(request)
        self._finished.append(Finished(own_name(request.request_id), began_at, time.time(), prefilled_by))

    async def _ask_prefill(self, request: Request, first_token: bool) -> Prefilled:
        assert self._prefill is not None
        with self.tracing.call("prefill.call", {"truespec.choice": request.request_id}):
            deltas, parcel, replica = await self._prefill_reply(self._prefill, request, first_token)
        if parcel is None:
            return Prefilled(deltas, None, replica)
        with self._timed_handoff("unpack"):
            return Prefilled(deltas, await self.transport.unpack(parcel), replica)

    async def _prefill_reply(self, prefill: "DeploymentHandle[Any]", request: Request, first_token: bool) -> Any:
        response = prefill.prefill.remote(request, first_token, carried())
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError as error:
            raise PoolFull(f"the prefill pool is full: {error}") from error
        except RayTaskError as error:
            raise _own_error(error) from error
        except (RayActorError, RayError, RayServeException) as error:
            raise ConnectionError(f"no prefill replica answered: {error}") from error


class HttpFront(Replica):
    """A replica that answers HTTP: the front end over a source of tokens."""

    def __init__(self, config: AppConfig, *rest: Any) -> None:
        super().__init__(config, *rest)
        self._front_end: FrontEnd | None = None
        self._scorer: Scorer | None = None
        self._check_parsers()
        self._access = self._make_access()
        self._admin = self._make_admin()

    def open_front(self, tokens: TokenSource, records: Records, info: ModelInfo, *, num_engines: int = 1) -> None:
        """Build the front end over a source, which has so many engines behind it."""
        limits, replay = self._config.limits, self._config.replay
        comparable = self._config.engine.logprobs_mode == "raw_logprobs"
        self._checks = Checks(
            lambda request_id: chosen(request_id, replay.share), self._submit, self.check, replay.verify_timeout_s
        )
        slots = self._config.engine.max_num_seqs * num_engines
        most = limits.max_ongoing_requests * num_engines
        source = ObservedSource(
            tokens,
            self.metrics,
            records,
            choose=self._checks.chooses,
            ended=self.ended,
            limits=SourceLimits(
                most,
                limits.request_timeout_s,
                max_others=int(limits.max_load * slots),
                max_queued_tokens=limits.max_queued_tokens,
                max_first_token_s=limits.max_time_to_first_token_s,
            ),
        )
        tokenizer = Tokenizer.from_folder(info.folder, self._config.model.chat_template)
        self._front_end = FrontEnd(
            source,
            tokenizer,
            info,
            Limits(
                max_body_bytes=limits.max_body_bytes,
                max_choices=limits.max_choices,
                max_sequences=most,
                max_prompt_tokens=limits.max_prompt_tokens,
                resumes=None if self._config.router is None else self._config.recovery.resume,
                stream_interval_s=limits.stream_interval_s,
            ),
            checks=self._checks if comparable else None,
            parsers=self._make_parsers(info.folder),
        )
        self._scorer = Scorer(
            source,
            tokenizer,
            info,
            logprobs_mode=self._config.engine.logprobs_mode,
            limits=ScoreLimits(
                max_concurrent=min(slots, most),
                timeout_s=limits.request_timeout_s,
                max_prompt_tokens=limits.max_prompt_tokens,
            ),
        )

    def asgi_app(self) -> Any:
        """The HTTP application of this replica."""
        if self._front_end is None:
            raise EngineFault("The replica is not started.")
        app = build_ingress(
            self._front_end,
            scorer=self._scorer,
            operations=Operations(self.exposition, self.check_health),
            verdicts=self.verdict,
            admin=self._admin,
            gate=Gate(
                self._access,
                self.metrics,
                open_metrics=self._config.access.open_metrics,
                open_health=self._config.access.open_health,
            ),
            tracing=self.tracing,
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

    def _check_parsers(self) -> None:
        """Before an engine is loaded for minutes."""
        if self._config.vllm.has_parsers:
            from serve_app.backends.vllm_parts.parsers import check_names

            check_names(self._config.vllm.tool_parser, self._config.vllm.reasoning_parser)

    def _make_parsers(self, folder: str) -> Parsers | None:
        """vLLM is imported for them only where they are set: a front end needs it for nothing else."""
        vllm = self._config.vllm
        if not vllm.has_parsers:
            return None
        from serve_app.backends.vllm_parts.parsers import VllmParsers

        return VllmParsers(vllm.tool_parser, vllm.reasoning_parser, folder)

    def _make_access(self) -> Access:
        keys_file, token_file = self._config.access.keys_file, self._config.admin.token_file
        keys = None
        if keys_file is None:
            _logger.info("no access.keys_file is set: who can reach this service may use it")
        else:
            keys = KeyStore(Path(keys_file), self._count_reload)
            for result in ("ok", "failed"):
                self.metrics.count("truespec_key_file_reloads_total", 0, result=result)
            _logger.info("%s: %d keys", keys_file, len(keys))
        return Access(keys, None if token_file is None else read_token(Path(token_file)))

    def _count_reload(self, went_well: bool) -> None:
        self.metrics.count("truespec_key_file_reloads_total", result="ok" if went_well else "failed")

    def _make_admin(self) -> Admin | None:
        if not self._access.has_admin:
            return None

        async def statuses() -> Statuses:
            return await self.referee().statuses.remote()  # type: ignore[no-any-return]

        async def order(wanted: SpeculationOrder) -> Statuses:
            told: Statuses | None = await self.referee().order.remote(Mode(wanted.mode), wanted.replica)
            if told is None:
                raise UnknownReplica(f"There is no replica {wanted.replica!r}; GET /admin/speculation lists them.")
            return told

        return Admin(self._access, statuses, order, _weights_admin(self.referee))

    def ended(self, record: Record, job: ReplayJob | None) -> None:
        """A request came to its end; what is to be checked of it goes to the referee."""
        if job is not None:
            self._checks.ended(job)

    def _submit(self, job: ReplayJob) -> None:
        self.spawn(self._submit_soon(job))

    async def _submit_soon(self, job: ReplayJob) -> None:
        try:
            await self.referee().submit.remote(job, carried())
        except (RayError, RayServeException) as error:
            self.metrics.count("truespec_replays_total", result="failed")
            _logger.warning("%s could not be submitted for replay: %s", job.request.request_id, error)


class HttpReplica(HttpFront, DecodingReplica):
    """A decoding replica that answers HTTP itself."""

    async def start(self) -> ModelInfo:
        """Load the engine and build the front end over it."""
        info = await super().start()
        self.open_front(self.source, self.records, info)
        return info

    def weights_switched(self, info: ModelInfo) -> None:
        """Other weights are served from now on."""
        super().weights_switched(info)
        if self._front_end is not None:
            self._front_end.weights_switched(info)

    def ended(self, record: Record, job: ReplayJob | None) -> None:
        """A request came to its end."""
        self.remember(record.request, record.began_at, record.prefilled_by)
        super().ended(record, job)


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


class DecodeWorker(DecodingReplica):
    """Decodes for the stream router, in the place of a replica that answers HTTP itself."""

    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, pool: PoolName, prefill: "DeploymentHandle[Any] | None"
    ) -> None:
        super().__init__(config, pool, prefill)
        self._streamed: set[str] = set()  # requests of the router's, in contrast to canaries
        self._prefilled_by: dict[str, str] = {}
        self._info = await self.start()

    def weights_switched(self, info: ModelInfo) -> None:
        """Other weights are served from now on."""
        super().weights_switched(info)
        self._info = info

    def handed_off(self, request_id: str, prefilled_by: str) -> None:
        """The handoff of a request was taken in; the router is told with the next delta, of a canary the records."""
        if request_id in self._streamed:
            self._prefilled_by[request_id] = prefilled_by
        else:
            super().handed_off(request_id, prefilled_by)

    async def model(self) -> tuple[ModelInfo, dict[str, bytes]]:
        """What is served, and the files that the tokenizer is made of."""
        return self._info, await asyncio.to_thread(tokenizer_files, Path(self._info.folder))

    async def stream(
        self, requests: Sequence[Request], emitted: dict[str, tuple[int, ...]], told: Carried, avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Streamed, None]:
        """Generate for requests that share one prompt; with `emitted` (by id), go on after those tokens. What to
        `avoid` is for the router that chose this replica."""
        del avoid
        adopt(told)
        began_at = time.time()
        tokens = self.source.go_on(requests, emitted) if emitted else self.source.stream(requests)
        every_s = self._config.recovery.decode_timeout_s / _SIGNS_OF_LIFE
        failed: set[str] = set()
        prefilled: dict[str, str] = {}  # which replica had a part in it, by request
        self._streamed.update(request.request_id for request in requests)
        try:
            async with contextlib.aclosing(with_signs_of_life(tokens, every_s, self.backend.check_health)) as deltas:
                async for delta in deltas:
                    prefilled_by = None if delta is None else self._prefilled_by.pop(delta.request_id, None)
                    if delta is not None and delta.finish_reason is FinishReason.ERROR:
                        failed.add(delta.request_id)
                    if delta is not None and (maker := prefilled_by or delta.prefilled_by):
                        prefilled[delta.request_id] = maker
                    yield Streamed(delta, self.name, prefilled_by, self._info.fingerprint)
        except Exception:
            failed.update(request.request_id for request in requests)
            raise
        finally:
            for request in requests:
                self._streamed.discard(request.request_id)
                self._prefilled_by.pop(request.request_id, None)
                if request.score_from is None:
                    prefilled_by = prefilled.get(request.request_id, "")
                    self.remember(request, began_at, prefilled_by, failed=request.request_id in failed)

    async def abort(self, request_id: str) -> None:
        """End one of several choices, if it is here; the others go on."""
        await self.source.abort(request_id)


@serve.ingress()
class StreamRouter(HttpFront):
    """HTTP before replicas that may die: it knows every token it has passed on, and has another go on after them."""

    async def __init__(  # type: ignore[misc]
        self, config: AppConfig, workers: "DeploymentHandle[Any]", referee: object
    ) -> None:
        del referee
        super().__init__(config, "router")
        self._workers = workers
        info, files = await workers.model.remote()
        self._folder = tempfile.TemporaryDirectory(prefix="truespec-tokenizer-")
        for name, content in files.items():
            (Path(self._folder.name) / name).write_bytes(content)
        info = self._info = dataclasses.replace(info, folder=self._folder.name)
        records = Records(self.name, info.max_model_len)
        recovery = config.recovery
        source = ResumingSource(
            self, self.metrics, records, most_resumes=recovery.max_resumes, silence_s=recovery.decode_timeout_s
        )
        pool = config.pool(config.decoding_pool)
        self.open_front(source, records, info, num_engines=pool.most_replicas)
        self.spawn(self.report_forever())

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the constructor has finished."""
        return self.asgi_app()

    async def stream(
        self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Streamed, None]:
        """Ask one of the workers, whichever the pool's routing chooses.

        Raises:
            ReplicaLost: it died.
            EngineOverloaded: the pool takes nothing more.
        """
        session = _get_serve_request_context().session_id  # the client's `x-session-id`, "" without one
        workers = self._workers.options(stream=True, session_id=session)
        response = workers.stream.remote(requests, dict(emitted), carried(), avoid)
        try:
            async for streamed in response:
                self._learn(streamed.fingerprint)
                yield streamed
        except BackPressureError as error:
            raise EngineOverloaded("All replicas are busy; try again soon.", retry_after_s=1.0) from error
        except RayTaskError as error:
            raise _own_error(error, ReplicaLost) from error
        except (RayActorError, RayError, RayServeException) as error:
            raise ReplicaLost(f"a decode replica was lost: {error}") from error
        finally:
            response.cancel()

    def _learn(self, fingerprint: str) -> None:
        """A worker serves these weights; where they are others than before, replies say so from now on."""
        if fingerprint != self._info.fingerprint and self._front_end is not None:
            self._info = dataclasses.replace(self._info, fingerprint=fingerprint)
            self._front_end.weights_switched(self._info)

    async def abort(self, request_id: str) -> None:
        """End one of several choices, wherever it runs."""
        await self._workers.broadcast("abort", request_id).results_async(return_exceptions=True)


class PrefillServer(EngineReplica):
    """Computes prompts and hands them off; replays finished requests when asked."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        super().__init__(config, "prefill")
        await self.start()

    async def prefill(
        self, request: Request, first_token: bool, told: Carried
    ) -> tuple[tuple[Any, ...], Parcel | None, str]:
        """Deltas so far, the handoff and this replica's name: a return value, so that the caller owns it and it
        outlives this replica."""
        adopt(told)
        _logger.debug("computing the prompt of %s, %d tokens", request.request_id, len(request.prompt_token_ids))
        with self.backlog.holding(len(request.prompt_token_ids)):
            prefilled = await self.backend.prefill(request, first_token=first_token)
        if prefilled.handoff is None:
            return prefilled.deltas, None, self.name
        with self._timed_handoff("pack"):
            return prefilled.deltas, self.transport.pack(prefilled.handoff), self.name


class RefereeServer:
    """One actor for the whole app: it has finished requests replayed, keeps the verdicts, and everybody's counts."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        pool = config.pool_names[0]
        replayer = "PrefillServer" if pool == "prefill" else "MonolithServer"
        tracing = _observe(config, "referee", context.replica_tag)

        handles: list[DeploymentHandle[Any]] = []  # one, made when first needed: by then the replayer is there

        async def replay(request: Request) -> Replayed:
            if not handles:
                handles.append(serve.get_deployment_handle(replayer, context.app_name))
            with tracing.call("replay.call", {"truespec.choice": request.request_id}):
                return await handles[0].replay.remote(request, carried())  # type: ignore[no-any-return]

        self._sums = PrometheusSink(source=context.replica_tag)
        metrics = Metrics([RaySink(), self._sums], model_name=config.model.served_name, pool=pool)
        self._referee = Referee(replay, metrics, _referee_settings(config), _dump_folder(config))
        self._status = StatusBook(_about(config), time.time)
        self._desk = WeightsDesk()
        self._transfers = Transfers(ray.put)
        self._work = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._referee.run())
            tasks.create_task(self._note_forever())

    async def _note_forever(self) -> None:
        while True:
            self._status.note(self._sums.samples())
            await asyncio.sleep(_REPORT_EVERY_S)

    async def submit(self, job: ReplayJob, told: Carried) -> None:
        """Queue a finished request for replay."""
        adopt(told)
        self._referee.submit(job)

    async def check(self, job: ReplayJob, told: Carried) -> Checked:
        """Have a finished request replayed, and wait for it."""
        adopt(told)
        return await self._referee.check(job)

    async def report(self, report: Report) -> Orders:
        """Take in what a replica counted and did, and tell it what was found out about it."""
        self._sums.apply(report.batch)
        orders = self._referee.hear(report)
        if report.weights is None:
            return orders
        return dataclasses.replace(orders, weights=self._desk.hear(report.status.replica, report.weights))

    async def wanted_weights(self) -> Wanted:
        """What a replica that starts is to serve."""
        return self._desk.wanted

    async def weights(self) -> Statuses:
        """Which weights each replica serves."""
        return self._desk.statuses()

    async def update_weights(self, ref: WeightsRef, mode: PauseMode, timeout_s: float) -> Outcome:
        """Bring new weights to every replica, or to none."""
        return await self._desk.update(ref, mode=mode, timeout_s=timeout_s)

    async def begin_transfer(self) -> int:
        """Weights are to come over the wire; the number of their transfer."""
        return self._transfers.begin()

    async def put_shard(self, transfer: int, index: int, content: Any, digest: str, drafter: bool) -> None:
        """Take in a part of them."""
        self._transfers.put(transfer, index, content, digest, drafter=drafter)

    async def end_transfer(
        self, transfer: int, num_shards: tuple[int, int], version: str, mode: PauseMode, timeout_s: float
    ) -> Outcome:
        """All of them came, so many shards of the target and of the drafter: bring them to every replica."""
        ref = self._transfers.end(transfer, version, *num_shards)
        return await self._desk.update(ref, mode=mode, timeout_s=timeout_s)

    async def pause(self, mode: PauseMode, timeout_s: float) -> Outcome:
        """Have every replica begin nothing new."""
        return await self._desk.pause(mode, timeout_s)

    async def resume(self) -> Outcome:
        """Have every replica go on."""
        return await self._desk.resume()

    async def count(self, batch: MetricBatch) -> None:
        """Take in what a replica without an engine counted."""
        self._sums.apply(batch)

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


def _observe(config: AppConfig, role: str, replica: str) -> Tracing:
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


def _weights_admin(referee: Callable[[], "DeploymentHandle[Any]"]) -> WeightsAdmin:
    async def outcome(call: Any) -> Outcome:
        try:
            return await call  # type: ignore[no-any-return]
        except RayTaskError as error:
            raise _own_error(error) from error

    async def update(order: WeightsOrder) -> Outcome:
        ref = WeightsRef(0, order.weight_version, order.path, order.drafter_path)
        return await outcome(referee().update_weights.remote(ref, PauseMode(order.mode), order.timeout_s))

    async def pause(order: PauseOrder) -> Outcome:
        return await outcome(referee().pause.remote(PauseMode(order.mode), order.timeout_s))

    async def resume() -> Outcome:
        return await outcome(referee().resume.remote())

    async def statuses() -> Statuses:
        return await referee().weights.remote()  # type: ignore[no-any-return]

    return WeightsAdmin(statuses, update, pause, resume)


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


def _own_error(error: RayTaskError, otherwise: type[Exception] = ConnectionError) -> Exception:
    """What a replica raised: our own exceptions as they are, anything else as work that did not happen."""
    cause = error.cause
    return cause if isinstance(cause, TruespecError) else otherwise(f"a replica failed: {cause}")
