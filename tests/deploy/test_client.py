"""The clients of servers, and what the demo makes of a chat."""

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deploy.exchange import client as client_module
from deploy.exchange.client import AsyncClient, Client, ServiceError
from deploy.run.demo import Service
from serve_app.referee.wire.exchange import CHAT
from tests.support.fake_http import QuietHandler, serving

EVENTS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"content": "Paris,"}}]},
    {"choices": [{"index": 0, "delta": {"content": " of course."}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
]


class Handler(QuietHandler):
    """Answers as the question demands: with a stream, with one that breaks off, or with a refusal."""

    def do_GET(self) -> None:
        self.say(404, b"")

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.sent())
        question = body["messages"][0]["content"]
        events = [*EVENTS[:2], {"error": {"message": "the engine is gone"}}] if question == "break" else EVENTS
        if question == "refuse":
            self.say(429, json.dumps({"error": {"message": "too many"}}).encode())
        elif question == "garble":
            self.say(200, b"data: <html>\n\n")
        else:
            self.say(200, b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Handler) as served:
        yield served


def test_a_chat_is_shown_as_it_comes_and_what_a_service_refuses_is_reported(url: str) -> None:
    service, shown = Service(url, "m"), list[str]()
    with service.client:
        answer = service.chat("capital?", on_text=shown.append, max_tokens=4)
        for question, reported in (("break", "the engine is gone"), ("refuse", "HTTP 429: too many")):
            with pytest.raises(ServiceError, match=f"{CHAT}: .*{reported}"):
                service.chat(question)
        with pytest.raises(ServiceError, match="/metrics: HTTP 404"):
            service.metrics()
    assert shown == ["Paris,", " of course."]
    assert (answer.text, answer.num_tokens) == ("Paris, of course.", 4)
    assert answer.first_token_s > 0 and answer.decode_s >= 0


@pytest.mark.parametrize("question", ["capital?", "break", "refuse", "garble"])
def test_both_clients_read_alike(url: str, question: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": question}], "stream": True}

    async def ask() -> tuple[Any, ...]:
        async with AsyncClient(f"{url}/v1/") as client:
            found = await client.ask(body, CHAT)
            return found.status, found.error, found.reply

    with Client(url) as client:
        found = client.stream(body, CHAT)
    assert (found.status, found.error, found.reply) == asyncio.run(ask())
    assert found.ok == (question == "capital?") and found.refused == (question == "refuse")
    assert found.reply.first.text == {"capital?": "Paris, of course.", "break": "Paris,"}.get(question, "")


def test_nobody_there_is_a_value() -> None:
    with Client("http://127.0.0.1:9") as client:
        found = client.post({"prompt": "a"})
        assert found.status is None and found.reported().startswith("no reply: ") and not client.alive()
        assert client.last_failed == {"prompt": "a"}
        assert client.get("/metrics") is None
        with pytest.raises(ServiceError, match=r"9/metrics: .*refused"):
            client.fetch("/metrics")


# -- connections that break ------------------------------------------------------------------------------------------

BODY = {"prompt": "a"}
WAYS: dict[str, Callable[[Client], bool]] = {
    "post": lambda client: client.post(BODY).ok,
    "stream": lambda client: client.stream(BODY).ok,
    "fetch": lambda client: client.get("/metrics") is not None,
}


def ended(handler: QuietHandler) -> None:
    handler.close_connection = True


def reset(handler: QuietHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(handler.connection.detach())
    handler.close_connection = True


def garbled(handler: QuietHandler) -> None:
    handler.wfile.write(b"what?\r\n\r\n")
    handler.close_connection = True


class Breaking:
    """A server that breaks connections with `way`: each after so many replies, or all after so many in total."""

    def __init__(self, way: Callable[[QuietHandler], None], each: int = 100, total: int = 100) -> None:
        self.way, self.each, self.total = way, each, total
        self.url = ""
        self.num_connections = self.num_requests = 0

    @contextmanager
    def running(self) -> Iterator["Breaking"]:
        breaking = self

        class Handler(QuietHandler):
            def setup(self) -> None:
                super().setup()
                breaking.num_connections += 1
                self.num_requests = 0

            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.sent()))

            def _answer(self, body: dict[str, Any]) -> None:
                breaking.num_requests += 1
                self.num_requests += 1
                if self.num_requests > breaking.each or breaking.num_requests > breaking.total:
                    return breaking.way(self)
                reply = b'{"choices": [{"index": 0, "text": "b", "finish_reason": "stop"}]}'
                reply = b"data: %s\n\n" % reply if body.get("stream") else reply
                self.say(200, reply)

        with serving(Handler) as self.url:
            yield self


@pytest.mark.parametrize("way", [ended, reset])
@pytest.mark.parametrize("ask", WAYS)
def test_a_request_that_meets_a_closed_connection_is_sent_once_more(
    ask: str, way: Callable[[QuietHandler], None]
) -> None:
    with Breaking(way, each=1).running() as server, Client(server.url) as client:
        assert [WAYS[ask](client) for _ in range(3)] == [True] * 3
    assert (server.num_connections, server.num_requests) == (3, 4)
    with Breaking(way, total=0).running() as server, Client(server.url) as client:
        assert not WAYS[ask](client), "on a new connection, it is a failure"
    assert server.num_requests == 1


@pytest.mark.parametrize(
    ("way", "num_requests", "late"),
    [(reset, 3, False), (garbled, 2, False), (reset, 2, True)],
    ids=["the server dies", "a reply is garbled", "the connection is lost with its request"],
)
def test_what_no_second_try_mends_is_a_failure(
    way: Callable[[QuietHandler], None], num_requests: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setattr(client_module, "_CROSSED_WITHIN_S", 0.0)
    with Breaking(way, total=1).running() as server, Client(server.url) as client:
        assert client.post(BODY).ok
        assert client.post(BODY).reported().startswith("no reply: ")
    assert server.num_requests == num_requests


@pytest.mark.parametrize("way", [ended, reset])
def test_requests_in_one_thread_have_a_connection_each(way: Callable[[QuietHandler], None]) -> None:
    async def ask() -> list[bool]:
        async with AsyncClient(server.url) as client:
            return [(await client.ask(BODY)).ok for _ in range(3)]

    with Breaking(way, each=1, total=2).running() as server:
        assert asyncio.run(ask()) == [True, True, False]
    assert server.num_connections == server.num_requests == 3
