"""A reverse proxy that passes everything on as it came, and lets a referee see a share of the exchanges."""

import asyncio
import contextlib
import logging
import random
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from deploy.exchange.asking import ReadRequest, instrumented, keys_of, read_request
from deploy.watch.plain_replies import PlainEvents, plain_reply
from deploy.watch.sender import Sender
from serve_app.errors import ErrorReply
from serve_app.referee.wire.exchange import WATCHED_PATHS, Exchange
from serve_app.referee.wire.vendors import FALLBACK, dialect_of, vendor_of

_LOG = logging.getLogger(__name__)
_MIB = 2**20
_LONGEST_HEADER, _MOST_HEADERS = 256 * 1024, 1000
_IDLE_S = 3.0  # of a connection to the server; servers close theirs after 5 s, and a request must not meet that
_CONNECT_WITHIN_S = 10.0
_BACKLOG = 4096
_MOST_FORMS = 1024
_OF_A_CONNECTION = frozenset((
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
))  # fmt: skip
_EXPECT = frozenset({"expect", "host"})  # 100-continue was answered here; the server's own name goes out as Host
_EVENTS = "text/event-stream"
_FAILED = 500
_REFUSALS = (400, 413, 422, _FAILED, 501)
_FAILURES = 3  # in a row; a server may fail for other reasons than what was asked of it
_NOT_YET = (408, 425, 429, 502, 503, 504)  # as llama.cpp answers while it loads its model
_LOOK_EVERY_S, _LOOK_WITHIN_S = 5.0, 2.0
_LOOK_FOR_REFEREE_S = 0.3
_OF_A_COMPLETION = b'"choices"'
_ADDED = ("Content-Type", "Date", "Server")
_NOT_OURS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # aiohttp adds them where a client sends none
_WHOLE = 256 * 1024  # bytes of a request's body that is sent in one go
Body = bytes | aiohttp.StreamReader
# Ways in which the other side is lost.
_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError, OSError)

HEALTH = "/.truespec/health"
"""The proxy's own: that it runs, whatever becomes of the server behind it."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """The settings of a proxy."""

    upstream: str  # the server's URL
    host: str = "127.0.0.1"  # address to listen on
    port: int = 0  # to listen on; 0 takes a free one
    share: float = 1.0  # of requests that are watched, 0 to 1
    as_sent: float = 0.25  # share of these to which nothing is added: a server cannot tell them from others
    dialect: str = "auto"  # "auto" or one of `VENDORS`
    referee: str | None = None  # its URL; None = exchanges are only counted
    max_queued: int = 1000  # most exchanges that wait for the referee
    max_queued_bytes: int = 64 * _MIB  # most bytes of these
    max_exchange_bytes: int = 16 * _MIB  # larger requests and replies are not captured
    replica_header: str | None = None  # the header of a reply that names the replica


@dataclass(slots=True)
class _Form:
    """The knowledge about requests of one form."""

    level: int = 0  # which of the extras the server takes
    failures: int = 0  # of the server, one after the other, when it was asked for them


class Proxy:
    """Answers requests by those of a server."""

    def __init__(
        self, options: ProxyOptions, session: aiohttp.ClientSession, fresh: aiohttp.ClientSession, sender: Sender
    ) -> None:
        self._options = options
        self._base = options.upstream.rstrip("/").removesuffix("/v1")
        self._session = session
        self._fresh = fresh  # with a connection of its own for each request
        self._sender = sender
        self._dialect = None if options.dialect == "auto" else options.dialect
        self._looked_at: dict[bool, float] = {}  # with a key, without
        self._forms: dict[str, _Form] = {}
        self._draw = random.Random().random

    @property
    def counts(self) -> Counter[str]:
        """Return what was counted since the start, by result."""
        return self._sender.totals

    async def find_dialect(self, authorization: str | None = None) -> None:
        """Ask the server for its models, whose owner says what it is; one that is not ready is asked again later."""
        self._looked_at[authorization is not None] = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=_LOOK_WITHIN_S)
        headers = {"Accept-Encoding": "identity"}
        if authorization is not None:
            headers["Authorization"] = authorization
        try:
            async with self._session.get(URL(f"{self._base}/v1/models"), headers=headers, timeout=timeout) as reply:
                if reply.status in _NOT_YET or (reply.status in (401, 403) and authorization is None):
                    return  # the next watched request may bring a key
                models = await reply.json(content_type=None)
                owner = str(models["data"][0]["owned_by"])
        except (ValueError, LookupError, TypeError):
            owner = ""
        except _LOST:
            return
        found = dialect_of(owner)
        self._dialect = found or FALLBACK
        known = "" if found else ", since its /v1/models names no owner that is known"
        _LOG.info("The server at %s is asked in the dialect %s%s.", self._base, self._dialect, known)

    async def finds(self, url: str) -> bool:
        """Return whether something answers there."""
        with contextlib.suppress(*_LOST):
            async with self._fresh.get(url, timeout=aiohttp.ClientTimeout(total=_LOOK_WITHIN_S)):
                return True
        return False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        if "websocket" in request.headers.get("Upgrade", "").lower():  # others are offers, which a server may ignore
            return _error(501, "The proxy passes HTTP only, no WebSocket; connect to the server itself.", "upgrade")
        path = request.raw_path.partition("?")[0]
        if path == HEALTH:
            return web.Response(text="ok\n")
        watched_path = request.method == "POST" and path in WATCHED_PATHS
        if watched_path and self._draw() < self._options.share:
            if "Content-Encoding" in request.headers:
                self._sender.count("unreadable")
            elif (request.content_length or 0) > self._options.max_exchange_bytes:
                self._sender.count("too_large")
            else:
                return await self._watched(request, path)
        if watched_path:
            self._sender.count("passed")
        return await self._passed(request, _passed_on(request.raw_headers, without=_EXPECT), await _body(request))

    # Requests that pass

    async def _passed(
        self,
        request: web.Request,
        headers: CIMultiDict[str],
        body: Body | None,
        seen: Callable[[bytes], None] = lambda _: None,
    ) -> web.StreamResponse:
        """Pass a request on, and its reply back. seen: gets the pieces of the reply."""
        try:
            reply = await self._send(request, headers, body)
        except _LOST as error:
            return self._unreachable(error)
        try:
            response, lost = await _passed_back(request, reply, seen)
            if lost == "broken_off":
                self._sender.count(lost)
            return response
        finally:
            reply.close() if not reply.content.is_eof() else reply.release()

    async def _send(self, request: web.Request, headers: CIMultiDict[str], body: Body | None) -> aiohttp.ClientResponse:
        target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        url = URL(self._base + target, encoded=True)
        if isinstance(body, aiohttp.StreamReader):  # cannot be sent again
            return await _ask(self._fresh, request.method, url, headers, body)
        reused: list[bool] = []
        try:
            return await _ask(self._session, request.method, url, headers, body, reused)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if not reused:
                raise
        # The server had closed the connection, which the request crossed on its way.
        return await _ask(self._fresh, request.method, url, headers, body)

    def _unreachable(self, error: BaseException) -> web.Response:
        _LOG.warning("The server at %s gave no answer (%s).", self._base, type(error).__name__)
        self._sender.count("unreachable")
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        message = f"The server at {self._base} gave no answer: {reason}. Start it, or give the proxy its right URL."
        return _error(502, message, "server_unreachable")

    # Requests that are watched

    async def _watched(self, request: web.Request, path: str) -> web.StreamResponse:
        body = await request.content.read()
        headers = _with_length(_passed_on(request.raw_headers, without=_EXPECT), len(body))
        asked = read_request(path, body)
        key = request.headers.get("Authorization")
        looked_at = self._looked_at.get(key is not None, -_LOOK_EVERY_S)
        if asked is not None and self._dialect is None and time.monotonic() - looked_at >= _LOOK_EVERY_S:
            await self.find_dialect(key)
        if asked is None or self._dialect is None:
            self._sender.count("unwatchable")
            return await self._passed(request, headers, body)
        form = self._form(asked.form)
        headers.popall("Accept-Encoding", None)
        levels = vendor_of(self._dialect).extras(path, asked.streamed)
        as_sent = self._draw() < self._options.as_sent
        changed, added = instrumented(asked, {} if as_sent else levels[form.level])
        began_at = time.time()
        try:
            reply = await self._send(request, _with_length(headers, len(changed)), changed)
        except _LOST as error:
            return self._unreachable(error)
        try:
            if changed is not body and (reply.status in _REFUSALS or "Content-Encoding" in reply.headers):
                reply.close()
                return await self._refused(request, headers, body, form, failed=reply.status == _FAILED)
            most = self._options.max_exchange_bytes
            watch = _Watch(asked, path, added, keys_of(added), form, began_at, headers, most)
            return await self._watched_back(request, reply, watch)
        except asyncio.CancelledError:
            self._sender.count("left")
            raise
        finally:
            reply.close() if not reply.content.is_eof() else reply.release()

    def _form(self, name: str) -> _Form:
        if name not in self._forms and len(self._forms) >= _MOST_FORMS:
            del self._forms[next(iter(self._forms))]
        return self._forms.setdefault(name, _Form())

    async def _refused(
        self, request: web.Request, headers: CIMultiDict[str], body: bytes, form: _Form, *, failed: bool = False
    ) -> web.StreamResponse:
        """Send the client's own request after the server refused what was added. failed: it may have been chance."""
        self._sender.count("refused")
        form.failures += 1
        before, completes = form.level, []

        def seen(chunk: bytes) -> None:
            completes.append(_OF_A_COMPLETION in chunk)

        response = await self._passed(request, headers, body, seen)
        is_answer = response.status == 200 and any(completes)
        if is_answer and form.level == before and (form.failures >= _FAILURES or not failed):
            form.level += 1
            form.failures = 0
            _LOG.warning("The server refuses what is added to some requests; it is asked for less from now on.")
        return response

    async def _watched_back(
        self, request: web.Request, reply: aiohttp.ClientResponse, watch: "_Watch"
    ) -> web.StreamResponse:
        headers, is_ok = _passed_on(reply.raw_headers), reply.status == 200
        if reply.content_type == _EVENTS or not watch.keys or not is_ok:
            events = PlainEvents(watch.keys) if watch.keys and is_ok else None
            response, lost = await _passed_back(request, reply, watch.keep, events)
            if lost:
                self._sender.count(lost)
                return response
        else:
            try:
                watch.keep(data := await reply.read())
            except _LOST as error:
                return self._unreachable(error)
            if _OF_A_COMPLETION not in data:  # some servers refuse with a 200
                return await self._refused(request, watch.headers, watch.asked.body, watch.form)
            plain = plain_reply(data, watch.keys)
            response = _Relayed(reply, _with_length(headers, len(plain)))
            await response.prepare(request)
            await response.write(plain)
        if not is_ok:
            self._sender.count("not_ok")
            return response
        if watch.added:
            watch.form.failures = 0
        if watch.kept is None:
            self._sender.count("too_large")
            return response
        name = self._options.replica_header
        exchange = Exchange(
            path=watch.path,
            request=watch.asked.body,
            reply=bytes(watch.kept),
            streamed=reply.content_type == _EVENTS,
            began_at=watch.began_at,
            ended_at=time.time(),
            replica="" if name is None else reply.headers.get(name, ""),
            dialect=self._dialect or "",
            added=watch.added,
        )
        self._sender.offer(exchange)
        return response


@dataclass(slots=True)
class _Watch:
    """A request that is watched."""

    asked: ReadRequest
    path: str
    added: tuple[str, ...]  # fields of the request that are not the client's
    keys: frozenset[str]  # of the reply, which these bring
    form: _Form
    began_at: float
    headers: CIMultiDict[str]  # of the request
    most: int  # bytes that are kept of the reply
    kept: bytearray | None = field(default_factory=bytearray)  # of the reply; None = it is too large

    def keep(self, chunk: bytes) -> None:
        """Keep a piece of the reply."""
        if self.kept is not None:
            self.kept += chunk
            if len(self.kept) > self.most:
                self.kept = None


async def _body(request: web.Request) -> Body | None:
    """A small body at once, which can be sent again if it has to be; others as they come."""
    if not request.body_exists:
        return None
    if 0 < (request.content_length or 0) <= _WHOLE:
        return await request.content.read()
    return request.content


async def _reused(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceConnectionReuseconnParams
) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.append(True)


async def _ask(
    session: aiohttp.ClientSession,
    method: str,
    url: URL,
    headers: CIMultiDict[str],
    body: Body | None,
    reused: list[bool] | None = None,
) -> aiohttp.ClientResponse:
    """Send a request. reused: gets an entry if an open connection was taken."""
    return await session.request(
        method,
        url,
        headers=headers,
        data=body,
        allow_redirects=False,
        skip_auto_headers=_NOT_OURS,
        trace_request_ctx=reused,
    )


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    watch = aiohttp.TraceConfig()
    watch.on_connection_reuseconn.append(_reused)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_WITHIN_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=_LONGEST_HEADER,
        max_field_size=_LONGEST_HEADER,
        max_headers=_MOST_HEADERS,
        trace_configs=[watch],
    )


def _error(status: int, message: str, code: str) -> web.Response:
    """In OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return web.json_response(ErrorReply(status, kind, code, message).body(), status=status)


class _Relayed(web.StreamResponse):
    """The head of a server's reply."""

    def __init__(self, reply: aiohttp.ClientResponse, headers: CIMultiDict[str]) -> None:
        super().__init__(status=reply.status, reason=reply.reason, headers=headers)
        self.not_sent = [name for name in _ADDED if name not in headers]
        """Headers that aiohttp adds, and the server did not send."""


async def _passed_back(
    request: web.Request,
    reply: aiohttp.ClientResponse,
    seen: Callable[[bytes], None],
    events: PlainEvents | None = None,
) -> tuple[web.StreamResponse, str]:
    """Pass a reply back, in pieces as they come.

    Args:
        request: of the client.
        reply: to pass back.
        seen: gets the pieces.
        events: takes out what the client did not ask for.

    Returns:
        What went back, and what kept the rest from it, by the name of a result; "" = nothing.
    """
    response = _Relayed(reply, _passed_on(reply.raw_headers))
    await response.prepare(request)
    try:
        async for chunk in reply.content.iter_any():
            seen(chunk)
            if data := chunk if events is None else events.push(chunk):
                await response.write(data)
        if events is not None and (data := events.last()):
            await response.write(data)
    except aiohttp.ClientConnectionResetError:  # the client has left
        return response, "left"
    except _LOST:
        if request.transport is not None:
            request.transport.close()  # so that the client sees that the reply is not whole
        return response, "broken_off"
    return response, ""


async def _as_the_server_sent(request: web.Request, response: web.StreamResponse) -> None:
    if isinstance(response, _Relayed):
        for name in response.not_sent:
            response.headers.popall(name, None)


@contextlib.asynccontextmanager
async def running_proxy(options: ProxyOptions) -> AsyncIterator[tuple[str, Proxy]]:
    """A proxy that runs until the block ends; gives its URL."""
    sender = Sender(options.referee, options.max_queued, options.max_queued_bytes)
    async with (
        _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)) as session,
        _session(aiohttp.TCPConnector(limit=0, force_close=True)) as fresh,
        sender.running(),
    ):
        proxy = Proxy(options, session, fresh, sender)
        if options.dialect == "auto":
            await proxy.find_dialect()
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
        app = web.Application(client_max_size=0)  # 0 = unlimited
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        app.on_response_prepare.append(_as_the_server_sent)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=_without_contents(),
            max_line_size=_LONGEST_HEADER,
            max_field_size=_LONGEST_HEADER,
            max_headers=_MOST_HEADERS,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, listening, backlog=_BACKLOG).start()
            host, port = listening.getsockname()[:2]
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}", proxy
        finally:
            await runner.cleanup()


def _without_contents() -> logging.Logger:
    """Return what aiohttp logs of connections, without the bytes of malformed requests: they may hold keys or
    prompts."""
    logger = logging.getLogger("truespec.watch.http")

    def strip(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info = None
            record.msg, record.args = "A malformed request was refused (%s).", (type(error).__name__,)
        return True

    logger.filters = [strip]
    return logger


async def run_proxy(options: ProxyOptions, say: Callable[[str], None], ended: Callable[[], bool]) -> bool:
    """Run a proxy until it is cancelled, with as many connections as the system allows.

    Args:
        options: its settings.
        say: gets what a user is to know of the start.
        ended: returns whether the referee has ended, and need not be waited for.

    Returns:
        False where the referee ended before it was ready.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with running_proxy(options) as (url, proxy):
        share = f"{100 * options.share:.3g} %"
        say(f"Requests to {url} pass on to {options.upstream} from now on; {share} of them are watched.")
        if not await proxy.finds(options.upstream):
            say(f"The server at {options.upstream} does not answer yet; until it does, requests get a 502.")
        say(f"Waiting for the referee at {options.referee}, which loads its model first.")
        while not await proxy.finds(f"{options.referee}/health"):
            if ended():
                return False
            await asyncio.sleep(_LOOK_FOR_REFEREE_S)
        say(f"Ready: give clients {url}; verdicts and findings are at {options.referee}")
        await asyncio.Event().wait()
    return True


def _passed_on(raw: Sequence[tuple[bytes, bytes]], *, without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Headers for the other side, in their order, without those of a single connection. without: more of these."""
    headers = [
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")) for name, value in raw
    ]
    gone = _OF_A_CONNECTION | without
    for name, value in headers:
        if name.lower() == "connection":
            gone |= {one.strip().lower() for one in value.split(",")}
    return CIMultiDict([(name, value) for name, value in headers if name.lower() not in gone])


def _with_length(headers: CIMultiDict[str], length: int) -> CIMultiDict[str]:
    """The same with another Content-Length, in its place, if there is one."""
    return CIMultiDict(
        [(name, str(length) if name.lower() == "content-length" else value) for name, value in headers.items()]
    )
