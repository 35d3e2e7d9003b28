"""The controller and its clients: what is asked on one side is done on the other, or refused."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray.cloudpickle as pickle
import torch
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException

from deploy import rl
from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import CONFIGURED, WeightsRef, WeightsStatus
from serve_app.config.files import parse_args
from serve_app.deployments import controller as module
from serve_app.deployments import controller_client
from serve_app.deployments.controller import Controller
from serve_app.deployments.controller_client import ANSWERED, ControllerClient, RemoteTransfers
from serve_app.errors import UpdateRefused
from serve_app.guard.breaker import BreakerState, Mode
from serve_app.guard.heartbeat import ReplicaStatus, Report
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.telemetry.tracing import Tracing, request_id
from tests.support.referees import Method, recorded


class Handle:
    """A handle as Ray has it: what is asked and answered is pickled, and an error comes as a RayTaskError of its kind.
    Each call is a task of its own."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.call = Method(self._call)

    async def _call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        try:
            answer = await asyncio.create_task(self._controller.call(*args, **kwargs))
        except Exception as error:
            raise RayTaskError("call", "its traceback", error).as_instanceof_cause() from None
        return pickle.loads(pickle.dumps(answer))


@pytest.fixture
async def controller(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Controller]:
    async def no_pools(*_: object) -> None:
        """In the place of Ray Serve's own states."""

    monkeypatch.setattr(module.serve, "get_replica_context", lambda: SimpleNamespace(app_name="a", replica_tag="c"))
    monkeypatch.setattr(module, "observe", lambda *_: Tracing())
    monkeypatch.setattr(module, "watch_pools", no_pools)
    monkeypatch.setattr(module.ray, "put", bytes)
    monkeypatch.setattr("serve_app.cluster.weight_coordinator._FIRST_REPORTS_S", 0.0)
    made = object.__new__(Controller)
    await made.__init__(parse_args({"model": {"source": "fake"}, "responses": {"max_mib": 1}}))  # type: ignore[misc]
    yield made
    made._work.cancel()
    await asyncio.gather(made._work, return_exceptions=True)


@pytest.fixture
def client(controller: Controller) -> ControllerClient:
    handle: Any = Handle(controller)
    return ControllerClient(lambda: handle)


def report(replica: str = "r1", **changes: Any) -> Report:
    metrics = Metrics(buffer := BufferSink(replica), model_name="fake", pool="decode")
    metrics.count("truespec_requests_total", 7, outcome="stop")
    status = ReplicaStatus(replica, "decode", BreakerState.CLOSED, Mode.AUTO, 0.0, "")
    return Report(status, buffer.drain(), **changes)


async def test_a_report_reaches_every_book_and_is_answered(client: ControllerClient) -> None:
    orders = await client.report(report(weights=WeightsStatus(CONFIGURED, "f")))
    assert orders.weights == await client.wanted_weights()
    assert [one["replica"] for one in await client.statuses()] == ["r1"]
    assert [one["replica"] for one in await client.weights.statuses()] == ["r1"]
    await client.count(report("router").batch)
    assert (await client.status())["requests"] == {"stop": 14}
    assert b"truespec_requests_total" in (await client.exposition())[0]
    assert (await client.status_history())["started_at"] == (await client.status())["started_at"]


async def test_what_is_replayed_is_replayed_for_the_request_that_asked(
    client: ControllerClient, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's replays and log lines are those of the client's request."""
    asked: list[tuple[str, str]] = []

    def enqueue(_: object, __: object, answer: Answer) -> asyncio.Future[Checked]:
        asked.append((answer.request.request_id, request_id()))
        settled: asyncio.Future[Checked] = asyncio.get_running_loop().create_future()
        settled.set_result(Checked())
        return settled

    monkeypatch.setattr(ReplayChecker, "_enqueue", enqueue)
    with Tracing().request("POST", "req-7", [], {}):
        await client.submit(recorded("cmpl-1-0"))
        checked = await client.check(recorded("cmpl-2-0"))
    assert asked == [("cmpl-1-0", "req-7"), ("cmpl-2-0", "req-7")]
    assert checked.verdict is Verdict.UNVERIFIED
    assert await client.verdict("cmpl-9") is None


async def test_an_update_is_refused_with_the_coordinators_own_error(client: ControllerClient) -> None:
    with pytest.raises(UpdateRefused, match="is already served") as refused:
        await client.weights.update(WeightsRef(0, "default", "/m"), PauseMode.ABORT, 1.0)
    assert type(refused.value) is UpdateRefused, "not Ray's, whose message is a traceback"
    await client.weights.stage(WeightsRef(0, "default", "/m"))
    with pytest.raises(UpdateRefused, match="is already served"):
        await client.weights.finish("")
    assert not (await client.weights.pause(PauseMode.KEEP, 0.0)).complete, "no replica has reported"


async def test_a_trainers_shards_become_an_update(client: ControllerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, there = asyncio.get_running_loop(), client.connect()
    waited_for = Method(lambda *args, **kwargs: asyncio.run_coroutine_threadsafe(there._call(*args, **kwargs), loop))
    monkeypatch.setattr(rl, "controller_handle", lambda app_name: SimpleNamespace(call=waited_for))
    asked: Any = {"weight_version": "v1", "app_name": "a", "timeout_s": 0.0}
    with pytest.raises(UpdateRefused, match="did not load them within 0 s"):
        await asyncio.to_thread(rl.push_weights, [("w", torch.zeros(4))], **asked)
    number = await RemoteTransfers.begin.send(there)
    with pytest.raises(UpdateRefused):
        await RemoteTransfers.put.send(there, number + 1, 0, b"shard", "its digest", drafter=False)


async def test_responses_are_kept_for_their_owner(client: ControllerClient) -> None:
    kept = client.responses
    assert await kept.put("resp_1", "key", b"{}")
    assert await kept.get("resp_1", "key") == b"{}" and await kept.get("resp_1", "other") is None
    assert await kept.delete("resp_1", "key") and not await kept.delete("resp_1", "key")


async def test_a_controller_that_does_not_answer_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*args: Any) -> bool:
        await asyncio.sleep(60)
        return True

    async def fail(*args: Any) -> bool:
        raise RayServeException("the controller is gone")

    monkeypatch.setattr(controller_client, "_KEEP_PATIENCE_S", 0.01)
    for put in (hang, fail):
        silent: Any = SimpleNamespace(call=Method(put))
        assert await ControllerClient(lambda handle=silent: handle).responses.put("resp_1", "key", b"{}") is False


@pytest.mark.parametrize(
    "name", ["ReplicaRegistry.on_heartbeat", "StatusBook.__init__", "Controller._run", "report", ""]
)
async def test_what_no_client_offers_is_refused(controller: Controller, name: str) -> None:
    with pytest.raises(LookupError, match="has no call"):
        await controller.call(name, controller_client.carried(), None)


async def test_every_call_belongs_to_a_part_of_the_controller(controller: Controller) -> None:
    for name, method in ANSWERED.items():
        part, _, attribute = name.partition(".")
        assert getattr(type(controller._parts[part]), attribute) is method, name
