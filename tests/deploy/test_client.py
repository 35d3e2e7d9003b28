"""The clients of servers, and what the demo makes of a chat."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.exchange.client import AsyncClient, Client, ServiceError
from deploy.exchange.exchanges import CHAT
from deploy.run.demo import Service
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
        self._say(404, b"")

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = body["messages"][0]["content"]
        events = [*EVENTS[:2], {"error": {"message": "the engine is gone"}}] if question == "break" else EVENTS
        if question == "refuse":
            self._say(429, json.dumps({"error": {"message": "too many"}}).encode())
        elif question == "garble":
            self._say(200, b"data: <html>\n\n")
        else:
            self._say(200, b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events))

    def _say(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Handler) as served:
        yield served


def test_a_chat_is_shown_as_it_comes(url: str) -> None:
    service, shown = Service(url, "m"), list[str]()
    with service.client:
        answer = service.chat("capital?", on_text=shown.append, max_tokens=4)
    assert shown == ["Paris,", " of course."]
    assert (answer.text, answer.num_tokens) == ("Paris, of course.", 4)
    assert answer.first_token_s > 0 and answer.decode_s >= 0


@pytest.mark.parametrize(("question", "reported"), [("break", "the engine is gone"), ("refuse", "HTTP 429: too many")])
def test_what_a_service_refuses_is_reported(url: str, question: str, reported: str) -> None:
    service = Service(url, "m")
    with service.client:
        with pytest.raises(ServiceError, match=f"{CHAT}: .*{reported}"):
            service.chat(question)
        with pytest.raises(ServiceError, match="/metrics: HTTP 404"):
            service.metrics()


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
