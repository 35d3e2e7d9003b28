"""The HTTP routes: bodies in, JSON and server-sent events out, errors in OpenAI's form."""

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app import access
from serve_app.admin import Admin, SpeculationOrder
from serve_app.errors import BodyTooLarge, ErrorReply, UnknownVerdict, UnsupportedParameter, reply_for, route_error
from serve_app.frontend import FrontEnd
from serve_app.protocol import UNSUPPORTED_ENDPOINTS, ChatCompletionRequest, CompletionRequest, parse
from serve_app.scoring import Scorer, ScoreRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

MetricsPage = Callable[[], Awaitable[tuple[bytes, str]]]
"""Gives the metrics page and its content type."""

HealthCheck = Callable[[], Awaitable[None]]
"""Raises when the server cannot serve."""

VerdictPage = Callable[[str], Awaitable[dict[str, Any] | None]]
"""What is known of a reply, by its id; None where nothing is."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_LONGEST_ORDER = 4096  # bytes
_CLIENT_CLOSED = 499  # nginx's number; nobody reads it, but access logs do


def build_ingress(
    front_end: FrontEnd,
    *,
    scorer: Scorer | None = None,
    metrics: MetricsPage | None = None,
    health: HealthCheck | None = None,
    verdicts: VerdictPage | None = None,
    admin: Admin | None = None,
) -> FastAPI:
    """The app that serves one front end over HTTP, and the routes of what else is there."""
    app = FastAPI(title="truespec", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(RequestIds)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_generation(app, front_end)
    if scorer is not None:
        _add_scoring(app, front_end, scorer)
    _add_operations(app, metrics, health)
    if verdicts is not None:
        _add_verdicts(app, verdicts)
    if admin is not None:
        _add_admin(app, admin)

    @app.api_route("/v1/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    async def elsewhere(request: Request, path: str) -> Response:
        return _unserved(request, path)

    return app


def _add_generation(app: FastAPI, front_end: FrontEnd) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse(front_end.models())

    @app.get("/v1/models/{name:path}")
    async def show_model(request: Request, name: str) -> Response:
        return await _guarded(request, _show(front_end, name))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _guarded(request, _generate(front_end, request, CompletionRequest))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _guarded(request, _generate(front_end, request, ChatCompletionRequest))


def _add_scoring(app: FastAPI, front_end: FrontEnd, scorer: Scorer) -> None:
    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        return await _guarded(request, _score(front_end, scorer, request))


def _add_verdicts(app: FastAPI, verdicts: VerdictPage) -> None:
    @app.get("/v1/verdicts/{reply_id}")
    async def show_verdict(request: Request, reply_id: str) -> Response:
        return await _guarded(request, _verdict(verdicts, reply_id))


def _add_admin(app: FastAPI, admin: Admin) -> None:
    @app.get("/admin/speculation")
    async def show_speculation(request: Request) -> Response:
        return await _guarded(request, _speculation(admin, request, None))

    @app.post("/admin/speculation")
    async def set_speculation(request: Request) -> Response:
        return await _guarded(request, _speculation(admin, request, SpeculationOrder))


def _add_operations(app: FastAPI, metrics: MetricsPage | None, health: HealthCheck | None) -> None:
    @app.get("/healthz")
    async def healthz() -> Response:
        try:
            if health is not None:
                await health()
        except Exception as error:
            logger.error("The health check failed: %r", error)
            return JSONResponse({"status": "unhealthy"}, 503)
        return JSONResponse({"status": "ok"})

    if metrics is not None:

        @app.get("/metrics")
        async def show_metrics() -> Response:
            page, content_type = await metrics()
            return Response(page, headers={"content-type": content_type})


class EventStream(Response):
    """A stream of server-sent events that ends at once when the client leaves.

    Starlette's own streaming response notices a client's leaving only at the next event, and leaves the generator to
    the garbage collector; here the generator is cancelled and closed, so that the engine frees what the request held.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events (ASGI)."""
        try:
            await _unless_disconnected(receive, self._send_all(send))
        except (_Disconnected, OSError):  # OSError: the server noticed while sending
            logger.info("%s: the client left", scope.get("path"))
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestIds:
    """Gives every response an `x-request-id`: the client's own where it sent a proper one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class _Disconnected(Exception):
    """The client went away; there is nobody to answer."""


async def _generate(
    front_end: FrontEnd, request: Request, kind: type[CompletionRequest] | type[ChatCompletionRequest]
) -> Response:
    body = await _read_body(request, front_end.limits.max_body_bytes)
    job = await front_end.prepare(parse(body, kind))
    logger.debug("%s is %s", _request_id(request.scope), job.head.reply_id)
    if not job.stream:
        return JSONResponse(await _unless_disconnected(request.receive, front_end.collect(job)))
    events = front_end.events(job)
    try:
        first = await _unless_disconnected(request.receive, _first(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


async def _score(front_end: FrontEnd, scorer: Scorer, request: Request) -> Response:
    wire = parse(await _read_body(request, front_end.limits.max_body_bytes), ScoreRequest)
    front_end.model(wire.model)
    return JSONResponse(await _unless_disconnected(request.receive, scorer.score(wire)))


async def _verdict(verdicts: VerdictPage, reply_id: str) -> Response:
    known = await verdicts(reply_id)
    if known is None:
        raise UnknownVerdict(
            f"Nothing is known of '{reply_id[:100]}': it is no reply of this service, still under way, or long ago."
        )
    return JSONResponse(known)


async def _speculation(admin: Admin, request: Request, order: type[SpeculationOrder] | None) -> Response:
    admin.access.require(access.Scope.ADMIN, request.headers.get("authorization"))
    if order is None:
        return JSONResponse({"replicas": await admin.statuses()})
    body = await _read_body(request, _LONGEST_ORDER)
    return JSONResponse({"replicas": await admin.order(parse(body, order))})


async def _first(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


async def _show(front_end: FrontEnd, name: str) -> Response:
    return JSONResponse(front_end.model(name))


async def _guarded(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Answer, or say in OpenAI's form what went wrong."""
    try:
        return await answer
    except _Disconnected:
        return Response(status_code=_CLIENT_CLOSED)
    except Exception as error:
        reply = reply_for(error)
        if reply.status >= 500:
            request_id = _request_id(request.scope)
            logger.error("%s %s failed: %r", request.url.path, request_id, error, exc_info=error)
        return _error_response(reply)


async def _read_body(request: Request, most: int) -> bytes:
    """The body, read no further than the limit."""
    too_large = BodyTooLarge("", f"The body is longer than {most} bytes. Shorten the prompt or send fewer at once.")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        body += message.get("body", b"")
        if len(body) > most:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but stop it when the client leaves. The body must have been read.

    Raises:
        _Disconnected: the client left; the work was cancelled and has ended.
    """
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise _Disconnected
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(scope: Scope) -> str:
    """The request's id; made once, and kept in the scope."""
    if "truespec.request_id" not in scope:
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        scope["truespec.request_id"] = sent if _REQUEST_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"
    return str(scope["truespec.request_id"])


def _unserved(request: Request, path: str) -> Response:
    """A path under /v1 that is not served: say what is, where a client may have meant something."""
    first = path.partition("/")[0]
    if first in UNSUPPORTED_ENDPOINTS:
        return _error_response(reply_for(UnsupportedParameter("", f"/v1/{path}: {UNSUPPORTED_ENDPOINTS[first]}")))
    allowed = {"models": "GET", "completions": "POST", "chat/completions": "POST", "score": "POST"}.get(path)
    if allowed not in (None, request.method):
        response = _error_response(route_error(405, f"{request.method} is not served here; use {allowed} /v1/{path}."))
        response.headers["allow"] = allowed
        return response
    return _error_response(route_error(404, f"There is no {request.method} /v1/{path[:200]} here."))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "There is no such path here", 405: "This path is not served with this method"}.get(status, "Refused")
    response = _error_response(route_error(status, f"{what}: {request.method} {request.url.path[:200]}."))
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


def _error_response(reply: ErrorReply) -> Response:
    return JSONResponse(reply.body(), reply.status, headers=dict(reply.headers))
