"""The prefill pool, as a replica that decodes sees it."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.backends.base import Prefilled
from serve_app.cluster.transports import make_transport
from serve_app.config.app_config import AppConfig
from serve_app.deployments.engine_host import EngineHost
from serve_app.deployments.remote_errors import own_error
from serve_app.streams.pooled import HandoffRoom, PooledTokenSource, PoolFull, PrefillPatience, TookIn
from serve_app.telemetry.tracing import carried
from speculative.request import Request, TokenDelta

_STORE_SHARE = 0.7  # of the object store, for handoffs: Ray begins to spill at 0.8


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """The answer of a prefill replica: a return value, so that the caller owns it and it outlives the replica."""

    deltas: tuple[TokenDelta, ...]  # those that the prefill emitted
    payload: Any | None  # the handoff as the transport packed it; None = the request ended with its prefill
    replica: str  # that computed it
    spent_s: float  # how long it was at work on it


class PrefillPool:
    """Has prompts computed by the prefill pool, and unpacks the handoffs.

    Args:
        handle: of the pool.
        host: the engine that takes them in.
    """

    def __init__(self, handle: "DeploymentHandle[Any]", host: EngineHost) -> None:
        # By reference, also where Serve's handles go by value otherwise: messages by value end at 4 MiB.
        self._handle = handle.options(_by_reference=True)
        self._host = host
        self._transport = make_transport(host.runtime.config.payload_transport)

    async def prefill(self, request: Request, first_token: bool) -> Prefilled:
        """The prompt's first deltas, and its handoff.

        Raises:
            PoolFull: the pool takes nothing more.
            ConnectionError: no replica answered, or the one that did failed.
        """
        began = time.monotonic()
        with self._host.runtime.tracing.call("prefill.call", {"truespec.choice": request.request_id}):
            reply = await self._reply(request, first_token)
        if reply.payload is None:
            return Prefilled(reply.deltas, None, reply.replica)
        # Two durations, not two times of day: the clocks of two nodes differ.
        self._host.count_handoff("transfer", max(0.0, time.monotonic() - began - reply.spent_s))
        with self._host.timed_handoff("unpack"):
            return Prefilled(reply.deltas, await self._transport.unpack(reply.payload), reply.replica)

    async def _reply(self, request: Request, first_token: bool) -> PrefillReply:
        response = self._handle.prefill.remote(request, first_token, carried())
        try:
            reply = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError as error:
            raise PoolFull(f"the prefill pool is full: {error}") from error
        except RayTaskError as error:
            raise own_error(error) from error
        except (RayError, RayServeException) as error:
            raise ConnectionError(f"no prefill replica answered: {error}") from error
        if not isinstance(reply, PrefillReply):  # pools are replaced one after the other
            raise ConnectionError(f"a prefill replica of another version answered with a {type(reply).__name__}")
        return reply


def token_source(
    host: EngineHost, prefill: "DeploymentHandle[Any] | None" = None, took_in: TookIn | None = None
) -> PooledTokenSource:
    """Return where the tokens of an engine come from: its prompts from the prefill pool where there is one."""
    recovery = host.runtime.config.recovery
    patience = PrefillPatience(recovery.prefill_timeout_s, recovery.prefill_retries)
    runtime = host.runtime
    ask, room, took_in = None, HandoffRoom(), took_in or host.records.handed_off
    if prefill is not None:
        ask, room = PrefillPool(prefill, host).prefill, HandoffRoom(bytes_for_handoffs(runtime.config))
    return PooledTokenSource(host.backend, runtime.metrics, ask, took_in, patience, tracing=runtime.tracing, room=room)


def bytes_for_handoffs(config: AppConfig) -> int | None:
    """Return how much of Ray's object stores the handoffs to this replica may take; None where they go another way, or
    nothing is known of this node's.

    A handoff lies in the store of the node that made it and in this one's, so where fewer replicas compute prompts than
    decode, these share theirs; on a single node all share one.
    """
    if config.payload_transport == "nixl":
        return None
    nodes = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    store = sum(node["Resources"].get("object_store_memory", 0.0) for node in nodes if node["NodeID"] == here)
    makers, takers = config.pool("prefill").least_replicas, config.pool("decode").most_replicas
    share = 1 / takers if len(nodes) == 1 else min(1.0, makers / takers)
    return int(_STORE_SHARE * store * share) or None
