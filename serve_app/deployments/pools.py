"""The pools as Ray Serve deployments: thin classes that put an engine, a front end and metrics together.

DecodeServer is the HTTP ingress and the orchestrator: it asks a prefill replica for the handoff, goes on from it, and
streams. MonolithServer is the same without a prefill pool. Where streams are to outlive the replica that decodes them,
StreamRouter answers HTTP and DecodeWorker takes the place of either. PrefillServer computes prompts, and replays
finished requests for the referee. The Controller is one actor: it checks what was served, keeps the verdicts, and the
sums of the whole app for `/metrics`.
"""

import asyncio
import logging
import time
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.backends.base import ModelInfo, Prefilled
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.deployments.http_front import HttpFront
from serve_app.deployments.replica import EngineReplica, own_error
from serve_app.integrity.heartbeat import Finished
from serve_app.integrity.replays import Record, ReplayJob
from serve_app.streams.pooled import PooledTokenSource, PoolFull, PrefillPatience
from serve_app.streams.resuming import own_name
from serve_app.telemetry.tracing import Carried, adopt, carried
from serve_app.transport.base import TransferPayload
from speculative.request import Request

_logger = logging.getLogger("truespec.serve")


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
            raise own_error(error) from error
        except (RayActorError, RayError, RayServeException) as error:
            raise ConnectionError(f"no prefill replica answered: {error}") from error


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


class PrefillServer(EngineReplica):
    """Computes prompts and hands them off; replays finished requests when asked."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        super().__init__(config, "prefill")
        await self.start()

    async def prefill(
        self, request: Request, first_token: bool, reported: Carried
    ) -> tuple[tuple[Any, ...], TransferPayload | None, str]:
        """Deltas so far, the handoff and this replica's name: a return value, so that the caller owns it and it
        outlives this replica."""
        adopt(reported)
        _logger.debug("computing the prompt of %s, %d tokens", request.request_id, len(request.prompt_token_ids))
        with self.backlog.holding(len(request.prompt_token_ids)):
            prefilled = await self.backend.prefill(request, first_token=first_token)
        if prefilled.handoff is None:
            return prefilled.deltas, None, self.name
        with self._timed_handoff("pack"):
            return prefilled.deltas, self.transport.pack(prefilled.handoff), self.name
