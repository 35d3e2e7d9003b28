"""The HTTP routes: bodies in, JSON and server-sent events out, errors in OpenAI's form."""

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import Outcome
from serve_app.errors import ErrorReply, UnknownVerdict, UnsupportedParameter, reply_for, route_error
from serve_app.http.access.access import Access
from serve_app.http.access.request_gate import HEALTH, Gate
from serve_app.http.admin import Admin, PauseOrder, RehearsalOrder, SpeculationOrder, WeightsOrder
from serve_app.http.body import read_order, read_wire
from serve_app.http.event_stream import EventStream, unless_disconnected
from serve_app.http.openapi import document
from serve_app.http.request_ids import LONGEST_PATH, RequestIds, request_id_of
from serve_app.http.tap import Tap, tapped_reply
from serve_app.http.vllm_routes import VllmRoutes, add_vllm_routes
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.off_loop import CALLER
from serve_app.openai.plan import Planned
from serve_app.openai.requests import UNSUPPORTED_ENDPOINTS
from serve_app.openai.responses.kept_responses import KeptResponses
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.responses.responses_adapter import ResponsesAdapter
from serve_app.openai.tokens.token_generation import GenerateRequest, prepare_generation
from serve_app.openai.wire import Wire
from serve_app.telemetry.tracing import Tracing
from serve_app.versions import version_of
from speculative.errors import InvalidRequest

logger = logging.getLogger(__name__)

_TIMEOUT_HEADER = "x-request-timeout"
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?", re.ASCII)
_CORS: dict[str, Any] = {
    "allow_methods": ["*"],
    "allow_headers": ["*"],
    "expose_headers": ["x-request-id", "retry-after", "warning"],
}
_METHODS = {"completions": "POST", "chat/completions": "POST", "responses": "POST", "models": "GET"}  # under /v1
_CLIENT_CLOSED = 499  # nginx's number; nobody reads it, but access logs do


@dataclass(frozen=True, slots=True)
class Operations:
    """Reads beside the front end; of what is None, there is no route.

    verdicts: by the id of a reply that was given; None if it is unknown.
    """

    metrics: Callable[[], Awaitable[tuple[bytes, str]]] | None = None  # gives the page and its content type
    health: Callable[[], Awaitable[None]] | None = None  # raises when the server cannot serve
    vllm: VllmRoutes | None = None  # for a trainer that knows vLLM's server
    verdicts: Callable[[str], Awaitable[dict[str, Any] | None]] | None = None
    kept: KeptResponses | None = None


def build_ingress(
    front_end: FrontEnd,
    *,
    operations: Operations = Operations(),
    admin: Admin | None = None,
    gate: Gate | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The app that serves one front end over HTTP, and the routes of what else is there.

    Every route that is added to it, here or later, lies behind the gate; without one, all but `/admin` are open.
    """
    gate = gate or Gate(Access())

    async def admit(request: Request) -> None:
        """Go by the route that was chosen, so that no spelling of a path leads around it."""
        request.state.caller = gate.admit(request.scope["route"].path, request.headers.get("authorization"))
        CALLER.set(request.state.caller.id)

    app = _TappedApp(
        title="truespec",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(admit)],
    )
    app.state.checks = front_end.checks
    app.state.pace = front_end.limits.pace
    app.router.route_class = _GuardedRoute
    app.add_middleware(RequestIds, tracing=tracing or Tracing(), metrics=gate.metrics)
    if gate.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=gate.cors_origins, **_CORS)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_generation(app, front_end, gate)
    _add_replies(app, front_end, operations, gate)
    _add_operations(app, operations)
    add_vllm_routes(app, front_end, gate, operations.vllm)
    if admin is not None:
        _add_admin(app, admin)

    @functools.cache
    def described() -> dict[str, Any]:
        served = [route for route in app.routes if isinstance(route, APIRoute)]
        routes = {(method, route.path_format) for route in served for method in route.methods or ()}
        return document(routes, version=version_of("truespec"), needs_key=not gate.is_open)

    @app.get("/openapi.json")
    async def describe() -> Response:
        return JSONResponse(described())

    @app.api_route("/v1/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def elsewhere(request: Request, path: str) -> Response:
        first = path.partition("/")[0]
        if first in UNSUPPORTED_ENDPOINTS:
            return _error_response(reply_for(UnsupportedParameter("", f"/v1/{path}: {UNSUPPORTED_ENDPOINTS[first]}")))
        allowed = _METHODS.get(path)
        if allowed in (None, request.method):
            return _error_response(route_error(404, f"There is no {request.method} /v1/{path[:200]} here."))
        response = _error_response(route_error(405, f"{request.method} is not served here; use {allowed} /v1/{path}."))
        response.headers["allow"] = allowed
        return response

    return app


class _TappedApp(FastAPI):
    """An app whose outermost layer is the tap, whatever is added to it."""

    def build_middleware_stack(self) -> ASGIApp:
        """All layers of the app (Starlette)."""
        layers = super().build_middleware_stack()
        return layers if self.state.checks is None else Tap(layers, self.state.checks)


class _GuardedRoute(APIRoute):
    """A route that says in OpenAI's form what went wrong, at the gate or behind it; where it answers GET, it answers
    HEAD, too, of whose reply the HTTP server sends no body."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        if self.methods is not None and "GET" in self.methods:
            self.methods.add("HEAD")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of this route (FastAPI)."""
        answer = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except HTTPException:
                raise
            except ClientDisconnect:
                return Response(status_code=_CLIENT_CLOSED)
            except RequestValidationError as error:  # of a parameter in the URL: we read bodies ourselves
                first = error.errors()[0]
                name = str(first["loc"][-1])
                return _error_response(reply_for(InvalidRequest(name, f"{name}: {first['msg']}.")))
            except Exception as error:
                reply = reply_for(error)
                if reply.status >= 500:
                    request_id, path = request_id_of(request.scope), request.url.path[:LONGEST_PATH]
                    logger.error("%s %s failed: %r", path, request_id, error, exc_info=error)
                return _error_response(reply)

        return guarded


def _add_generation(app: FastAPI, front_end: FrontEnd, gate: Gate) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse(front_end.models())

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        return JSONResponse(front_end.model(name))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(front_end, gate, request, CompletionRequest, front_end.prepare)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _generate(front_end, gate, request, ChatCompletionRequest, front_end.prepare)

    @app.post("/inference/v1/generate")
    async def generate_tokens(request: Request) -> Response:
        prepare = functools.partial(prepare_generation, front_end)
        return await _generate(front_end, gate, request, GenerateRequest, prepare)


def _add_replies(app: FastAPI, front_end: FrontEnd, operations: Operations, gate: Gate) -> None:
    """Add those that know replies that were given: the Responses API, and verdicts."""
    adapter = ResponsesAdapter(front_end, operations.kept)

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        prepare = functools.partial(adapter.prepare, owner=request.state.caller.id)
        return await _generate(front_end, gate, request, ResponsesRequest, prepare)

    @app.get("/v1/responses/{response_id}")
    async def show_response(request: Request, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise UnsupportedParameter("stream", "stream: a response that was kept is returned whole; leave it out.")
        return JSONResponse(await adapter.show(response_id, request.state.caller.id))

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        return JSONResponse(await adapter.delete(response_id, request.state.caller.id))

    if (verdicts := operations.verdicts) is None:
        return

    @app.get("/v1/verdicts/{reply_id}")
    async def show_verdict(reply_id: str) -> Response:
        known = await verdicts(reply_id)
        if known is None:
            raise UnknownVerdict(
                f"No verdict is known for '{reply_id[:100]}': no finished reply has this id, or it is too old."
            )
        return JSONResponse(known)


def _add_admin(app: FastAPI, admin: Admin) -> None:
    @app.get("/admin/speculation")
    async def show_speculation() -> Response:
        return JSONResponse({"replicas": await admin.statuses()})

    @app.post("/admin/speculation")
    async def set_speculation(request: Request) -> Response:
        return JSONResponse({"replicas": await admin.order(await read_order(request, SpeculationOrder))})

    if (verdicts_of := admin.verdicts_of) is not None:

        @app.get("/admin/verdicts")
        async def list_verdicts(replica: str = "", since: float = 0.0) -> Response:
            return JSONResponse({"verdicts": await verdicts_of(replica, since)})

    if (rehearse := admin.rehearse) is not None:

        @app.post("/admin/rehearsal")
        async def begin_rehearsal(request: Request) -> Response:
            return JSONResponse({"replicas": await rehearse(await read_order(request, RehearsalOrder))})

    if (weights := admin.weights) is None:
        return

    async def reported(outcome: Awaitable[Outcome]) -> Response:
        done = await outcome
        return JSONResponse({"complete": done.complete, "replicas": done.replicas})

    @app.get("/admin/weights")
    async def show_weights() -> Response:
        return JSONResponse({"replicas": await weights.statuses()})

    @app.post("/admin/weights")
    async def update_weights(request: Request) -> Response:
        order = await read_order(request, WeightsOrder)
        return await reported(weights.update(order.ref, PauseMode(order.mode), order.timeout_s))

    @app.post("/admin/pause")
    async def pause(request: Request) -> Response:
        order = await read_order(request, PauseOrder)
        return await reported(weights.pause(PauseMode(order.mode), order.timeout_s))

    @app.post("/admin/resume")
    async def resume() -> Response:
        return await reported(weights.resume())


def _add_operations(app: FastAPI, operations: Operations) -> None:
    metrics, health = operations.metrics, operations.health

    async def healthz() -> Response:
        try:
            if health is not None:
                await health()
        except Exception as error:
            logger.error("The health check failed: %r", error)
            return JSONResponse({"status": "unhealthy"}, 503)
        return JSONResponse({"status": "ok"})

    for path in HEALTH:
        app.get(path)(healthz)

    if metrics is not None:

        @app.get("/metrics")
        async def show_metrics() -> Response:
            page, content_type = await metrics()
            return Response(page, headers={"content-type": content_type})


async def _generate(
    front_end: FrontEnd, gate: Gate, request: Request, kind: type[Wire], prepare: Callable[..., Awaitable[Planned]]
) -> Response:
    with contextlib.ExitStack() as at_the_end:
        at_the_end.enter_context(gate.place(request.state.caller))
        wire = await read_wire(request, kind, front_end.limits.max_body_bytes)
        job = await prepare(wire, timeout_s=_header_timeout_s(request))
        if (tapped := tapped_reply(request.scope)) is not None:
            tapped.choose(job.head.reply_id, awaited=bool(job.asked.wire.verify))
            job = dataclasses.replace(job, tapped=tapped)
        at_the_end.enter_context(gate.in_flight.holding(one.request_id for one in job.requests))
        headers = {}
        if wire.deprecated_fields:  # RFC 9111 kept this header out, and clients still show it
            headers["warning"] = f'299 - "{", ".join(wire.deprecated_fields)} is deprecated; send structured_outputs"'
        logger.debug("%s is %s", request_id_of(request.scope), job.head.reply_id)
        if not job.asked.wire.stream:
            reply = await unless_disconnected(request.receive, front_end.collect(job))
            return JSONResponse(reply, headers=headers)
        events = front_end.events(job)
        try:
            first = await unless_disconnected(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        closed, pace = at_the_end.pop_all().close, request.app.state.pace
        stream = EventStream(first, events, closed, pace=pace, keep_alive_s=front_end.limits.keep_alive_s)
        stream.headers.update(headers)
        return stream


def _header_timeout_s(request: Request) -> float | None:
    """Return how long the sender of a request wants to wait, where a header says so. Raises InvalidRequest: the header
    names no time."""
    sent = request.headers.get(_TIMEOUT_HEADER)
    if sent is None:
        return None
    if not _SECONDS.fullmatch(sent) or float(sent) == 0:
        raise InvalidRequest(_TIMEOUT_HEADER, f"{_TIMEOUT_HEADER} must be a number of seconds above 0.")
    return float(sent)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "There is no such path here", 405: "This path is not served with this method"}.get(status, "Refused")
    response = _error_response(route_error(status, f"{what}: {request.method} {request.url.path[:200]}."))
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


def _error_response(reply: ErrorReply) -> Response:
    return JSONResponse(reply.body(), reply.status, headers=dict(reply.headers))
