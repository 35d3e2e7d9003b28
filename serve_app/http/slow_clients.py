"""Ends connections whose request never comes: Ray Serve's proxy waits for headers for ever.

The proxy's HTTP server is uvicorn, which bounds the time between two requests of a connection, and nothing before or
in one. Ray Serve calls a function of ours in the proxy's process before it starts that server (`PROXY_CALLBACK`), and
there the server is given a protocol with a deadline.
"""

import asyncio
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.auto import AutoHTTPProtocol

PROXY_CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.http.slow_clients.bound_headers"}
"""Environment variables that the process that starts Ray must have."""

HEADER_TIMEOUT_S = 30.0


class PatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of uvicorn's two, chosen when imported
    """HTTP/1.1 whose clients have so long to send the headers of a request, from the connection or its first byte."""

    header_timeout_s = HEADER_TIMEOUT_S

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A client has come (asyncio)."""
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request have come (asyncio)."""
        if not self._answering and self._deadline is None:
            self._wait()
        super().data_received(data)
        if self._answering or self.transport.get_protocol() is not self:  # the other one has the connection now
            self._wait_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended (asyncio)."""
        self._wait_no_more()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        """Return whether the headers of a request are there, and its answer is not."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self.header_timeout_s, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bound_headers() -> list[Any]:
    """Have every HTTP server that this process starts from now on use `PatientProtocol`. Called by Ray Serve's proxy,
    which wants a list of middlewares; there is none."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{PatientProtocol.__name__}"
    return []
