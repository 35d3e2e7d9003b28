"""A handoff on its way from a prefill replica to the one that goes on from it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.cloudpickle as pickle

from serve_app.cluster.transports import ReplyTransport
from serve_app.config.files import parse_args
from serve_app.deployments.engine_host import EngineHost
from serve_app.deployments.pools import PrefillServer
from serve_app.deployments.prefill_pool import PrefillPool, PrefillReply, bytes_for_handoffs
from serve_app.deployments.runtime import ReplicaRuntime
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.tracing import Carried
from speculative.request import Request, SamplingParams
from tests.support.fake_backend import FakeBackend, FakeConfig
from tests.support.referees import Method, RefereeHandle

REQUEST = Request("cmpl-1-0", (5, 6, 7), SamplingParams(max_tokens=8, ignore_eos=True))


@pytest.fixture
def host(referee: RefereeHandle) -> EngineHost:
    return EngineHost(ReplicaRuntime(parse_args({"model": {"source": "fake"}}), "decode"), "decode", _backend())


def _backend() -> FakeBackend:
    return FakeBackend(FakeConfig())


def pool_of(host: EngineHost, change: Callable[[Any], Any] = lambda reply: reply) -> PrefillPool:
    """Asks the host's own engine over a wire that may change its reply."""
    server = object.__new__(PrefillServer)
    server.host, server._transport = host, ReplyTransport()

    async def prefill(request: Request, first_token: bool, reported: Carried) -> Any:
        return change(pickle.loads(pickle.dumps(await server.prefill(request, first_token, reported))))

    handle: Any = SimpleNamespace(prefill=Method(prefill), options=lambda **_: handle)
    return PrefillPool(handle, host)


@pytest.mark.parametrize("first_token", [True, False])
async def test_what_a_prefill_replica_computed_arrives_as_it_was(host: EngineHost, first_token: bool) -> None:
    computed = await _backend().prefill(REQUEST, first_token=first_token)
    arrived = await pool_of(host).prefill(REQUEST, first_token)
    assert (arrived.deltas, arrived.replica) == (computed.deltas, "decode-1")
    assert computed.handoff is not None and arrived.handoff is not None
    assert arrived.handoff.tobytes() == computed.handoff.tobytes()


async def test_a_request_that_ends_with_its_prefill_brings_no_handoff(host: EngineHost) -> None:
    short = Request("cmpl-1-0", (5, 6, 7), SamplingParams(max_tokens=1, ignore_eos=True))
    arrived = await pool_of(host).prefill(short, True)
    assert arrived.handoff is None and arrived.deltas[-1].finish_reason is not None


async def test_the_prompt_is_computed_here_where_prefill_replicas_are_of_another_version(host: EngineHost) -> None:
    def as_before(reply: PrefillReply) -> tuple[Any, ...]:
        return reply.deltas, reply.payload, reply.replica, reply.spent_s

    pool = pool_of(host, as_before)
    with pytest.raises(ConnectionError, match="another version answered with a tuple"):
        await pool.prefill(REQUEST, True)
    alone = [delta async for delta in PooledTokenSource(_backend(), host.runtime.metrics).stream([REQUEST])]
    source = PooledTokenSource(_backend(), host.runtime.metrics, pool.prefill)
    streamed = [delta async for delta in source.stream([REQUEST])]
    assert [delta.token_ids for delta in streamed] == [delta.token_ids for delta in alone]


@pytest.mark.parametrize(
    ("pools", "transport", "num_nodes", "share"),
    [
        ({}, "plasma", 3, 0.7),
        ({"decode": {"replicas": 2}}, "plasma", 3, 0.35),  # each handoff lies at the one prefill replica, too
        ({"prefill": {"replicas": 3}, "decode": {"replicas": 2}}, "inline", 5, 0.7),
        ({"decode": {"autoscaling": {"max_replicas": 7}}}, "plasma", 8, 0.1),
        ({}, "nixl", 3, None),
    ],
)
def test_the_handoffs_of_all_replicas_fit_into_the_object_stores(
    host: EngineHost,
    monkeypatch: pytest.MonkeyPatch,
    pools: dict[str, Any],
    transport: str,
    num_nodes: int,
    share: float | None,
) -> None:
    config = parse_args({"model": {"source": "fake"}, "pools": pools, "handoff": {"transport": transport}})
    ours = ray.get_runtime_context().get_node_id()
    nodes = [{"Alive": True, "NodeID": f"n{index}", "Resources": {}} for index in range(num_nodes - 1)]
    gone = {"Alive": False, "NodeID": "gone", "Resources": {"object_store_memory": 5e9}}
    here = {"Alive": True, "NodeID": ours, "Resources": {"object_store_memory": 1e9}}
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, gone, here])
    assert bytes_for_handoffs(config) == (None if share is None else pytest.approx(share * 1e9, abs=1))
