"""The tap where the application meets the socket: what is checked is what came in and went out."""

from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.request_ids import COMPUTING, path_of
from serve_app.referee.records.replay_selection import Checks
from serve_app.referee.records.tapped_reply import TappedBytes, TappedReply

_IN_SCOPE = "truespec.tapped_reply"


@dataclass(slots=True)
class Tap:
    """Passes everything on, and keeps the bytes of requests that compute something and of their replies (ASGI). It is
    the outermost layer: nothing changes a reply behind it.
    """

    app: ASGIApp  # all other layers
    checks: Checks  # what whole exchanges go to
    held: TappedBytes = field(default_factory=TappedBytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http" or scope["method"] != "POST" or (path := path_of(scope)) not in COMPUTING:
            await self.app(scope, receive, send)
            return
        reply = scope[_IN_SCOPE] = TappedReply(path, self.checks, self.held)

        async def receive_tapped() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                reply.take_request(message.get("body", b""))
            return message

        async def send_tapped(message: Message) -> None:
            await send(message)  # first: what cannot be sent was not served, and is not judged
            if message["type"] == "http.response.start":
                reply.begin_reply(message["status"], message.get("headers", ()))
            elif message["type"] == "http.response.body":
                reply.take_reply(message.get("body", b""), last=not message.get("more_body", False))

        try:
            await self.app(scope, receive_tapped, send_tapped)
        finally:
            reply.close()


def tapped_reply(scope: Scope) -> TappedReply | None:
    """The tap's part of a request; None = there is no tap."""
    found: TappedReply | None = scope.get(_IN_SCOPE)
    return found
