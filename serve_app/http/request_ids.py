"""The id of every request, its line in the log, and the count of its response."""

import logging
import re
import time
import uuid
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.telemetry.metrics import Metrics
from serve_app.telemetry.tracing import Tracing, failed

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
COMPUTING = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"}
_WORTH_A_LINE = ("/v1/", "/inference/", "/admin/")  # what is polled is not
_COUNTED = ("/v1/", "/inference/")
LONGEST_PATH = 200  # characters that are logged


@dataclass(slots=True)
class RequestIds:
    """Gives every request an id (its own `x-request-id` where that is a proper one) and a line in the log; and a span
    to each that computes something.

    An id that is made here is reported in the response. One that came with the request is not: Ray Serve's proxy, which
    names requests that have no id, adds the id to the response itself, and it would stand there twice.
    """

    app: ASGIApp
    tracing: Tracing  # goes on with the client's trace
    metrics: Metrics | None = None  # responses by status code; None = not counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, method = request_id_of(scope), scope["method"]
        path = path_of(scope)
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                if request_id != _sent_id(scope):
                    MutableHeaders(scope=message)["x-request-id"] = request_id
                status = message["status"]
            await send(message)

        about = {"http.request.method": method, "url.path": path, "truespec.request_id": request_id}
        traced = method == "POST" and path in COMPUTING
        with self.tracing.request(f"{method} {path}", request_id, scope["headers"], about, traced=traced) as span:
            try:
                await self.app(scope, receive, send_with_id)
            finally:
                shown, duration_s = path[:LONGEST_PATH], time.monotonic() - began
                fields = {"method": method, "path": shown, "status": status, "duration_s": duration_s}
                level = logging.INFO if path.startswith(_WORTH_A_LINE) else logging.DEBUG
                logger.log(level, "%s %s %d", method, shown, status, extra={"fields": fields})
                span.set_attribute("http.response.status_code", status)
                if self.metrics is not None and status and path.startswith(_COUNTED):
                    self.metrics.count("truespec_http_responses_total", code=str(status))
                if status >= 500:
                    failed(span, f"status {status}")


def path_of(scope: Scope) -> str:
    """The path of a request within the app."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def request_id_of(scope: Scope) -> str:
    """The request's id; made once, and kept in the scope."""
    if "truespec.request_id" not in scope:
        sent = _sent_id(scope)
        scope["truespec.request_id"] = sent if _REQUEST_ID.fullmatch(sent) else f"req-{uuid.uuid4().hex}"
    return str(scope["truespec.request_id"])


def _sent_id(scope: Scope) -> str:
    """Return what the request itself gives as its id; "" = nothing."""
    return next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
