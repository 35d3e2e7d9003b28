"""The pools as Ray Serve deployments: thin classes that put an engine, a front end and metrics together.

DecodeServer is the HTTP ingress and the orchestrator: it asks a prefill replica for the handoff, goes on from it, and
streams. MonolithServer is the same without a prefill pool. PrefillServer computes prompts, and replays finished
requests for the referee. RefereeServer is one actor: it checks logprobs and keeps the sums of the whole app for
`/metrics`.
"""

import asyncio
import importlib.metadata
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.backends.base import Backend, Handoff, ModelInfo, Prefilled
from serve_app.backends.torch_backend import TorchBackend
from serve_app.config import AppConfig, PoolName
from serve_app.frontend import FrontEnd, Limits
from serve_app.ingress import build_ingress
from serve_app.metrics import BufferSink, MetricBatch, Metrics, PrometheusSink, RaySink
from serve_app.observed_source import ObservedSource, SourceLimits
from serve_app.referee import Referee, ReplayJob, chosen
from serve_app.scoring import ScoreLimits, Scorer
from serve_app.token_source import PooledTokenSource
from serve_app.tokenizer import Tokenizer
from speculative.errors import EngineFault, TruespecError
from speculative.request import Request

_logger = logging.getLogger("truespec.serve")

REFEREE = "RefereeServer"
_REPORT_EVERY_S = 1.0


class EngineReplica:
    """What every replica with an engine has: a backend, and metrics that reach Ray's agent and the referee."""

    def __init__(self, config: AppConfig, pool: PoolName) -> None:
        self._config = config
        context = serve.get_replica_context()
        self._app_name = context.app_name
        self._buffer = BufferSink(context.replica_tag)
        self.metrics = Metrics([RaySink(), self._buffer], model_name=config.model.served_name, pool=pool)
        self.backend: Backend = TorchBackend(config.model.source, config.model.served_name, config.engine_config(pool))
        self._tasks: set[asyncio.Task[None]] = set()
        self._referee: DeploymentHandle[Any] | None = None

    async def start(self) -> ModelInfo:
        """Load the engine, and report to the referee from then on."""
        info = await self.backend.start()
        self.metrics.gauge(
            "truespec_build_info", 1, version=importlib.metadata.version("truespec"), fingerprint=info.fingerprint
        )
        self.spawn(self._report_forever())
        return info

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
        """Send what was counted since the last time."""
        self.metrics.record_steps(self.backend.take_stats(), self.backend.usage())
        batch = self._buffer.drain()
        try:
            await self.referee().report.remote(batch)
        except (RayError, RayServeException) as error:
            self._buffer.put_back(batch)
            _logger.debug("metrics not delivered, they go with the next batch: %s", error)

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            try:
                await self.report()
            except Exception:  # whatever it was, the next report may get through
                _logger.warning("metrics could not be reported", exc_info=True)

    async def replay(self, token_ids: Sequence[int], first: int) -> list[float]:
        """Teacher-forced raw logprobs of token_ids[first:], for the referee."""
        return await self.backend.replay(token_ids, first)

    async def check_health(self) -> None:
        """Called by Serve; a replica that raises is replaced."""
        self.backend.check_health()


class HttpReplica(EngineReplica):
    """A replica that answers HTTP: the front end over its local engine, and perhaps a prefill pool."""

    def __init__(self, config: AppConfig, pool: PoolName, prefill: "DeploymentHandle[Any] | None") -> None:
        super().__init__(config, pool)
        self._prefill = prefill
        self._front_end: FrontEnd | None = None
        self._scorer: Scorer | None = None

    async def start(self) -> ModelInfo:
        """Load the engine and build the front end over it."""
        info = await super().start()
        limits = self._config.limits
        source = ObservedSource(
            PooledTokenSource(self.backend, self.metrics, self._ask_prefill if self._prefill else None),
            self.metrics,
            choose=lambda request_id: chosen(request_id, self._config.replay.share),
            submit=self._submit,
            limits=SourceLimits(limits.max_ongoing_requests, limits.request_timeout_s),
        )
        tokenizer = Tokenizer.from_folder(info.folder)
        self._front_end = FrontEnd(
            source,
            tokenizer,
            info,
            Limits(max_body_bytes=limits.max_body_bytes, max_choices=limits.max_choices),
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
        return build_ingress(self._front_end, scorer=self._scorer, metrics=self.exposition, health=self.check_health)

    async def exposition(self) -> tuple[bytes, str]:
        """The whole app's metrics, this replica's newest counts included."""
        await self.report()
        return await self.referee().exposition.remote()  # type: ignore[no-any-return]

    def _submit(self, job: ReplayJob) -> None:
        self.spawn(self._submit_soon(job))

    async def _submit_soon(self, job: ReplayJob) -> None:
        try:
            await self.referee().submit.remote(job)
        except (RayError, RayServeException) as error:
            self.metrics.count("truespec_replays_total", result="failed")
            _logger.warning("%s could not be submitted for replay: %s", job.request_id, error)

    async def _ask_prefill(self, request: Request, first_token: bool) -> Prefilled:
        assert self._prefill is not None
        try:
            deltas, handoff = await self._prefill.prefill.remote(request, first_token)
        except BackPressureError as error:
            raise ConnectionError(f"the prefill pool is full: {error}") from error
        except RayTaskError as error:
            raise _own_error(error) from error
        except (RayActorError, RayError, RayServeException) as error:
            raise ConnectionError(f"no prefill replica answered: {error}") from error
        return Prefilled(deltas, handoff)


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

    async def prefill(self, request: Request, first_token: bool) -> tuple[tuple[Any, ...], Handoff | None]:
        """Deltas so far and the handoff: a return value, so that the caller owns it and it outlives this replica."""
        prefilled = await self.backend.prefill(request, first_token=first_token)
        return prefilled.deltas, prefilled.handoff


class RefereeServer:
    """One actor for the whole app: it has finished requests replayed, and keeps everybody's counts."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        pool = config.pool_names[0]
        replayer = "PrefillServer" if pool == "prefill" else "MonolithServer"

        handles: list[DeploymentHandle[Any]] = []  # one, made when first needed: by then the replayer is there

        async def replay(token_ids: Sequence[int], first: int) -> list[float]:
            if not handles:
                handles.append(serve.get_deployment_handle(replayer, context.app_name))
            return await handles[0].replay.remote(token_ids, first)  # type: ignore[no-any-return]

        self._sums = PrometheusSink(source=context.replica_tag)
        metrics = Metrics([RaySink(), self._sums], model_name=config.model.served_name, pool=pool)
        self._referee = Referee(replay, metrics, config.replay.max_queue)
        self._work = asyncio.get_running_loop().create_task(self._referee.run())

    async def submit(self, job: ReplayJob) -> None:
        """Queue a finished request for replay."""
        self._referee.submit(job)

    async def report(self, batch: MetricBatch) -> None:
        """Take in what a replica counted."""
        self._sums.apply(batch)

    async def exposition(self) -> tuple[bytes, str]:
        """The app's metrics in Prometheus' text format, and the content type."""
        return self._sums.exposition()

    async def check_health(self) -> None:
        """Called by Serve; a referee whose work has ended is replaced."""
        if self._work.done():
            raise EngineFault("The referee's work has ended.")


def _own_error(error: RayTaskError) -> Exception:
    """What a replica raised: our own exceptions as they are, anything else as a prefill that did not happen."""
    cause = error.cause
    return cause if isinstance(cause, TruespecError) else ConnectionError(f"a prefill replica failed: {cause}")
