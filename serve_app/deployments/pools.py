"""The pools as Ray Serve deployments: thin classes that put an engine, a front end and metrics together.

DecodeServer is the HTTP ingress and the orchestrator: it asks a prefill replica for the handoff, goes on from it, and
streams. MonolithServer is the same without a prefill pool. Where streams are to outlive the replica that decodes them,
StreamRouter answers HTTP and DecodeWorker takes the place of either. PrefillServer computes prompts, and replays
finished requests for the referee. The Controller is one actor: it checks what was served, keeps the verdicts, and the
sums of the whole app for `/metrics`.
"""

import logging
import time
from collections.abc import Collection
from typing import Any

from ray import serve
from ray.actor import ActorHandle
from ray.serve.handle import DeploymentHandle

from serve_app.backends.base import ModelInfo, Replayed, ServedWeights
from serve_app.cluster.transports import make_transport
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.deployments.engine_host import EngineHost, make_backend
from serve_app.deployments.http_front import HttpFront
from serve_app.deployments.prefill_pool import PrefillReply, token_source
from serve_app.deployments.runtime import ReplicaRuntime
from serve_app.referee.records.records import Record
from serve_app.streams import spans
from serve_app.telemetry.tracing import Carried, adopt
from speculative.request import Request

_logger = logging.getLogger("truespec.serve")


class EngineServer:
    """A deployment with an engine: Serve's hooks and the controller's calls, passed on to its host."""

    host: EngineHost
    make_backend = staticmethod(make_backend)

    async def replay(self, request: Request, reported: Carried, avoid: Collection[str] = ()) -> Replayed:
        """Compute a teacher-forced request, for the referee; `avoid` is for the router that chose this replica."""
        del avoid
        return await self.host.replay(request, reported)

    async def independent_referee(self) -> tuple[ActorHandle, ServedWeights]:
        """Return where the controller has answers replayed by other code than this replica's, and with which
        weights."""
        return self.host.independent_referee()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: this replica's load."""
        return self.host.load()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve: what its routers choose by."""
        return self.host.routing_stats()

    async def check_health(self) -> None:
        """Called by Serve; a replica that raises is replaced."""
        self.host.check_health()


class HttpServer(EngineServer):
    """A deployment whose engine decodes, and which answers HTTP itself."""

    front: HttpFront

    async def start(self, config: AppConfig, pool: PoolName, prefill: "DeploymentHandle[Any] | None" = None) -> None:
        """Load the engine and build the front end over it."""
        runtime = ReplicaRuntime(config, pool)
        self.host = EngineHost(runtime, pool, self.make_backend(config, pool), self._weights_switched)
        self.front = HttpFront(runtime, self.host.reporter, self._remember)
        info = await self.host.start(lambda host: token_source(host, prefill))
        self.front.open(self.host.source, self.host.records, info)

    def _weights_switched(self, info: ModelInfo) -> None:
        self.front.weights_switched(info)

    def _remember(self, record: Record) -> None:
        self.host.remember(record.request, record.began_at, record.prefilled_by, len(record.token_ids))

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve once the constructor has finished."""
        return self.front.asgi_app(self.check_health)


@serve.ingress()
class DecodeServer(HttpServer):
    """HTTP, orchestration and decoding; prompts are computed by the prefill pool."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, prefill: "DeploymentHandle[Any]", controller: object
    ) -> None:
        del controller  # bound so that it belongs to the app; found by name, as by its own replicas
        await self.start(config, "decode", prefill)


@serve.ingress()
class MonolithServer(HttpServer):
    """HTTP, prefill and decoding in one replica."""

    async def __init__(self, config: AppConfig, controller: object) -> None:  # type: ignore[misc]
        del controller
        await self.start(config, "monolith")


class PrefillServer(EngineServer):
    """Computes prompts and hands them off; replays finished requests when asked."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        self.host = EngineHost(ReplicaRuntime(config, "prefill"), "prefill", self.make_backend(config, "prefill"))
        self._transport = make_transport(config.payload_transport)
        await self.host.start(token_source)

    async def prefill(self, request: Request, first_token: bool, reported: Carried) -> PrefillReply:
        """Compute a prompt, and pack its handoff."""
        began = time.monotonic()
        adopt(reported)
        _logger.debug("computing the prompt of %s, %d tokens", request.request_id, len(request.prompt_token_ids))
        host = self.host
        with host.backlog.holding(len(request.prompt_token_ids)):
            prefilled = await spans.prefill(host.runtime.tracing, host.backend, request, first_token=first_token)
        payload = None
        if prefilled.handoff is not None:
            with host.timed_handoff("pack"):
                payload = await self._transport.pack(prefilled.handoff)
        return PrefillReply(prefilled.deltas, payload, host.runtime.name, time.monotonic() - began)
