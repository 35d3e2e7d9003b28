"""HEAD where GET is served."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class _Answered(Exception):
    """The response has begun, which is all that HEAD asks for."""


class HeadRequests:
    """Answers HEAD as GET, without the body; what would stream is closed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({"type": "http.response.body", "body": b""})
            raise _Answered

        try:
            await self._app({**scope, "method": "GET"}, receive, send_head)
        except _Answered:
            return
