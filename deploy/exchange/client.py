"""Clients of servers with OpenAI's API: every result, also a refusal, a timeout or a broken connection, is a value."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from serve_app.referee.wire.exchange import CHAT, COMPLETIONS
from serve_app.referee.wire.reply import EventReader, Json, Reply, Unreadable
from speculative.errors import TruespecError

_OK = 200
_LONGEST_ERROR = 300  # characters kept of a failed reply
_IDLE_S = 3.0  # of a connection that stays open; servers close theirs after 5 s
_CROSSED_WITHIN_S = 2.0  # until a request is known to have met a closed connection; what breaks later was under way


class ServiceError(TruespecError):
    """The service answered with an error, or not at all."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request and its result."""

    path: str
    body: Json
    status: int | None  # of HTTP; None = no reply
    reply: Reply  # empty if it was refused
    error: str  # in words; empty = none
    seconds: float = 0.0  # until its end
    first_s: float = 0.0  # seconds until the first token of a stream; 0 if none came
    last_s: float = 0.0  # seconds until the last one
    content: bytes = b""  # the body of the reply as it came
    headers: Mapping[str, str] = field(default_factory=dict)  # of a reply that was not streamed

    @property
    def ok(self) -> bool:
        """Return whether it was answered."""
        return self.status == _OK and not self.error

    @property
    def refused(self) -> bool:
        """Return whether the server rejected the request (4xx)."""
        return self.status is not None and 400 <= self.status < 500

    def reported(self) -> str:
        """The result in a few words."""
        if self.ok:
            return "an answer"
        return f"{'no reply' if self.status is None else f'HTTP {self.status}'}: {self.error}"


class _Receiving:
    """One request, and its reply as it comes; `on_event` gets what each event of a stream says."""

    def __init__(self, path: str, body: Json, on_event: Callable[[Reply], None] = lambda _: None) -> None:
        self.path, self.body = path, body
        self._on_event = on_event
        self._events = EventReader()
        self._parts: list[Json] = []  # of the reply, which is put together once, at its end
        self._began = time.perf_counter()
        self._first_s = self._last_s = 0.0
        self._content = bytearray()
        self._headers: Mapping[str, str] = {}

    def push(self, data: bytes) -> None:
        """Read on in the stream. Raises Unreadable: it is none of completions."""
        self._content += data
        for event in self._events.push(data):
            said = self._read(event)
            self._parts.append(event)
            if any(one.text or one.token_ids for one in said.choices.values()):
                self._last_s = time.perf_counter() - self._began
                self._first_s = self._first_s or self._last_s
            self._on_event(said)

    def ended(self, status: int) -> Attempt:
        """The stream came to its end."""
        return self._attempt(status, "")

    def answered(self, response: httpx.Response, content: bytes) -> Attempt:
        """The whole reply, or what stands in its place."""
        self._content += content
        status, self._headers = response.status_code, response.headers
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            return self._attempt(status, f"not JSON: {_shortened(content)}")
        if not isinstance(found, dict):
            return self._attempt(status, f"not a JSON object: {_shortened(content)}")
        if status != _OK or "error" in found:
            return self._attempt(status, _message(found.get("error", found)))
        self._parts.append(found)
        return self._attempt(status, "")

    def failed(self, status: int | None, error: Exception) -> Attempt:
        """There is no reply, or it broke off."""
        return self._attempt(status, str(error) or type(error).__name__)

    def _attempt(self, status: int | None, error: str) -> Attempt:
        times = time.perf_counter() - self._began, self._first_s, self._last_s
        try:
            reply = self._read(*self._parts)
        except Unreadable as unreadable:
            reply, error = self._read(), error or str(unreadable)
        error = error or ("" if reply.error is None else _message(reply.error))
        return Attempt(self.path, self.body, status, reply, error, *times, bytes(self._content), self._headers)

    def _read(self, *parts: Json) -> Reply:
        reply = Reply(is_chat=self.path == CHAT)
        reply.add(*parts)
        return reply


class Client:
    """A client that waits for each reply; may be used from several threads.

    Its connections stay open, and a server may close an idle one just as a request sets out on it. As other clients do,
    it sends that request once more, on a new connection. Whatever breaks on a new connection is the server's failure.

    Args:
        url: of the server, with or without /v1.
        api_key: sent as a bearer token if given.
        timeout_s: for a whole reply.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        options = _options(url, api_key, timeout_s)
        self.url: str = options["base_url"]
        self._http = httpx.Client(**options, limits=_limits(keepalive_expiry=_IDLE_S))
        self._fresh = httpx.Client(**options, limits=_limits(max_keepalive_connections=0))
        self.num_requests = 0
        self.last_failed: Json = {}  # the body of the latest request without a proper reply

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._fresh.close()

    def get(self, path: str) -> str | None:
        """The text at a path; None if the request fails."""
        try:
            return self.fetch(path)
        except ServiceError:
            return None

    def fetch(self, path: str) -> str:
        """The text at a path. Raises ServiceError: the request fails; the message says how."""
        try:
            with closing(self._send("GET", path)) as response:
                response.read()
        except httpx.HTTPError as error:
            raise ServiceError(f"{self.url}{path}: {error}") from error
        if response.status_code != _OK:
            raise ServiceError(f"{self.url}{path}: HTTP {response.status_code}")
        return response.text

    def models(self) -> dict[str, Json]:
        """The models that the server lists, by their names. Raises ServiceError: it lists none."""
        try:
            cards = {str(card["id"]): card for card in json.loads(self.fetch("/v1/models"))["data"]}
        except (ValueError, KeyError, TypeError):
            cards = {}
        if not cards:
            raise ServiceError(f"{self.url}/v1/models lists no model")
        return cards

    def post(self, body: Json, path: str = COMPLETIONS, on_event: Callable[[Reply], None] = lambda _: None) -> Attempt:
        """Send a request and read its reply to the end: a stream if the body says so, of which `on_event` gets what
        each event says."""
        self.num_requests += 1
        receiving, status = _Receiving(path, body, on_event), None
        try:
            with closing(self._send("POST", path, body)) as response:
                status = response.status_code
                if status != _OK or not body.get("stream"):
                    return receiving.answered(response, response.read())
                for data in response.iter_bytes():
                    receiving.push(data)
                receiving.push(b"\n")
        except (httpx.HTTPError, Unreadable) as error:
            self.last_failed = body
            return receiving.failed(status, error)
        return receiving.ended(status)

    def post_all(self, bodies: Sequence[Json], at_once: int) -> list[Attempt]:
        """Send requests, `at_once` at a time; returns the results in the order of the bodies."""
        if not bodies:
            return []
        with ThreadPoolExecutor(max_workers=at_once) as threads:
            return list(threads.map(self.post, bodies))

    def stream(
        self, body: Json, path: str = COMPLETIONS, on_event: Callable[[Reply], None] = lambda _: None
    ) -> Attempt:
        """Send a request for a stream."""
        return self.post(body | {"stream": True}, path, on_event)

    def alive(self) -> bool:
        """Return whether the server still answers at all."""
        return any(self.get(path) is not None for path in ("/health", "/healthz", "/v1/models"))

    def _send(self, method: str, path: str, body: Json | None = None) -> httpx.Response:
        """The reply, of which the body is still to come."""
        steps: list[str] = []
        began = time.perf_counter()
        extensions = {"trace": lambda step, _: steps.append(step)}
        try:
            request = self._http.build_request(method, path, json=body, extensions=extensions)
            return self._http.send(request, stream=True)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
            reused = not any("connect_" in step for step in steps)
            # It ended before the head of a reply, not within a malformed one.
            is_closed = not isinstance(error, httpx.RemoteProtocolError) or "disconnected without" in str(error)
            if not (reused and is_closed and time.perf_counter() - began < _CROSSED_WITHIN_S):
                raise
        return self._fresh.send(self._fresh.build_request(method, path, json=body), stream=True)


def check_serving(url: str, api_key: str | None) -> None:
    """Make sure that a server lists its models, before anything slow begins. Raises ServiceError: it does not."""
    with Client(url, api_key) as server:
        server.models()


class AsyncClient:
    """The same for many requests at once in one thread. Each has a connection of its own, so whatever breaks is the
    server's failure."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        limits = _limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(**_options(url, api_key, timeout_s), limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, body: Json, path: str = COMPLETIONS) -> Attempt:
        """Send a request and read its reply to the end; a stream if the body says so."""
        receiving, status = _Receiving(path, body), None
        try:
            async with self._http.stream("POST", path, json=body) as response:
                status = response.status_code
                if status != _OK or not body.get("stream"):
                    return receiving.answered(response, await response.aread())
                async for data in response.aiter_bytes():
                    receiving.push(data)
                receiving.push(b"\n")
        except (httpx.HTTPError, Unreadable) as error:
            return receiving.failed(status, error)
        return receiving.ended(status)


def _options(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    return {
        "base_url": url.rstrip("/").removesuffix("/v1"),
        "timeout": timeout_s,
        "headers": {} if api_key is None else {"authorization": f"Bearer {api_key}"},
    }


def _limits(**idle: Any) -> httpx.Limits:
    return httpx.Limits(max_connections=None, **idle)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:_LONGEST_ERROR]


def _shortened(content: bytes) -> str:
    return content.decode(errors="replace")[:_LONGEST_ERROR]
