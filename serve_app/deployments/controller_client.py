"""The controller as its callers see it.

A part of the controller (the weights' coordinator, the registry of replicas) offers a method to other processes by a
`Call` in one of the clients below, which has the method's own parameters and result. These calls are all that the
controller answers: `ANSWERED` is its table. What a part raises reaches the caller as Ray carries it, a `RayTaskError`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, overload

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serve_app.cluster.weight_coordinator import WeightCoordinator
from serve_app.cluster.weight_transfer import Transfers
from serve_app.deployments.remote_errors import answered, uncancelled
from serve_app.deployments.replica_reports import ReplicaReports
from serve_app.guard.replica_registry import ReplicaRegistry
from serve_app.http.page.status import StatusBook
from serve_app.openai.responses.kept_responses import ResponseStore
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.judge.verdicts import VerdictBook
from serve_app.telemetry.metrics import PrometheusSink
from serve_app.telemetry.tracing import carried

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_logger = logging.getLogger("truespec.serve")
CONTROLLER = "Controller"
_KEEP_PATIENCE_S = 5.0  # with the controller, while a client waits for the end of its answer

Connect = Callable[[], "DeploymentHandle[Any]"]
"""Gives the handle of the controller, always the same one: each handle has a router of its own."""


def controller_handle(app_name: str) -> "DeploymentHandle[Any]":
    """A handle of an app's one controller. Arguments go by reference: shards of weights are large, and messages by
    value end at 4 MiB."""
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(CONTROLLER, app_name)
    return handle.options(_by_reference=True)


class Pending(Protocol[R_co]):
    """A call under way: what Serve calls a DeploymentResponse, whose types Ray's package keeps to itself."""

    def __await__(self) -> Generator[Any, Any, R_co]:
        """The controller's answer."""

    def result(self, *, timeout_s: float | None = None) -> R_co:
        """The controller's answer, where no loop runs. Raises TimeoutError."""


class Call(Generic[P, R]):
    """A call that the controller answers. In a client it is a coroutine function; `send` needs a handle only.

    Args:
        method: of one of the controller's parts.
    """

    @overload
    def __init__(self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> None: ...
    @overload
    def __init__(self, method: Callable[Concatenate[Any, P], R]) -> None: ...
    def __init__(self, method: Callable[Concatenate[Any, P], Any]) -> None:
        self.method = method
        self.name = method.__qualname__  # class and method

    def send(self, controller: "DeploymentHandle[Any]", *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Begin the call. The request's id and trace context go with it."""
        pending: Pending[R] = controller.call.remote(self.name, carried(), *args, **kwargs)
        return pending

    @overload
    def __get__(self, client: None, owner: type) -> "Call[P, R]": ...
    @overload
    def __get__(self, client: "PartClient", owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, client: "PartClient | None", owner: type) -> "Call[P, R] | Callable[P, Coroutine[Any, Any, R]]":
        if client is None:
            return self

        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return await client.answer(self.send(client.connect(), *args, **kwargs))

        return call


class PartClient:
    """A class whose calls go to the controller."""

    answer = staticmethod(uncancelled)  # awaits what the controller answers

    def __init__(self, connect: Connect) -> None:
        self.connect = connect


class RemoteWeights(PartClient):
    """Changes the weights of the whole app (a `WeightsService`). Raises our own exceptions as they are."""

    answer = staticmethod(answered)
    statuses = Call(WeightCoordinator.statuses)
    update = Call(WeightCoordinator.update)
    pause = Call(WeightCoordinator.pause)
    resume = Call(WeightCoordinator.resume)
    stage = Call(WeightCoordinator.stage)
    finish = Call(WeightCoordinator.finish)
    reset_caches = Call(WeightCoordinator.reset_caches)


class RemoteTransfers(PartClient):
    """Weights that a trainer sends, shard by shard; it runs no loop, and uses `send`."""

    begin = Call(Transfers.begin)
    put = Call(Transfers.put)
    end = Call(Transfers.end)


class RemoteResponses(PartClient):
    """The responses that the controller keeps for all replicas (a `KeptResponses`)."""

    get = Call(ResponseStore.get)
    delete = Call(ResponseStore.delete)
    _put = Call(ResponseStore.put)

    async def put(self, response_id: str, owner: str, record: bytes) -> bool:
        """Keep a response; returns whether it is kept. The answer goes out in any case."""
        try:
            async with asyncio.timeout(_KEEP_PATIENCE_S):
                return await self._put(response_id, owner, record)
        except (RayError, RayServeException, TimeoutError) as error:
            _logger.warning("%s could not be kept: %r", response_id, error)
            return False


class ControllerClient(PartClient):
    """A client of the controller: replicas report to it and ask it through this."""

    report = Call(ReplicaReports.report)
    count = Call(ReplicaReports.count)
    wanted_weights = Call(ReplicaReports.wanted_weights)
    submit = Call(ReplayChecker.submit)
    check = Call(ReplayChecker.check)
    verdict = Call(VerdictBook.reply)
    verdicts_of = Call(VerdictBook.of_replica)
    statuses = Call(ReplicaRegistry.statuses)
    order = Call(ReplicaRegistry.order)
    rehearse = Call(ReplicaRegistry.rehearse)
    status = Call(ReplicaReports.status)
    status_history = Call(StatusBook.history)
    exposition = Call(PrometheusSink.exposition)

    def __init__(self, connect: Connect) -> None:
        super().__init__(connect)
        self.weights = RemoteWeights(connect)
        self.responses = RemoteResponses(connect)


ANSWERED: Final[Mapping[str, Callable[..., Any]]] = {
    call.name: call.method
    for client in (ControllerClient, RemoteWeights, RemoteTransfers, RemoteResponses)
    for call in vars(client).values()
    if isinstance(call, Call)
}
"""Every method that the controller runs when it is asked to, by its class and name."""
