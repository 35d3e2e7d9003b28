"""Clients that leave, stall or send rubbish, at every phase of a request over a real engine: nothing is left held."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from serve_app.backends.base import Prefilled
from serve_app.backends.torch_backend import TorchBackend
from serve_app.http import body
from serve_app.http.access.access import Access
from serve_app.http.access.request_gate import Gate
from serve_app.http.event_stream import EventStream, Pace
from serve_app.http.routes import build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.streams.observed import SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.request import Request
from tests.support.engines import settings
from tests.support.fake_operator import FakeKeys
from tests.support.front_ends import observed
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow

KEY = "key"  # which may have two requests under way: one that is not given back shows
LONG = 700  # tokens of a prompt that takes a hundred steps


class Replica:
    """A replica as it is deployed, without Ray around it; its engines take one sequence at a time, in small steps."""

    def __init__(self, folder: Path, *, disaggregated: bool) -> None:
        config = settings(max_num_seqs=1, max_batched_tokens=8, kv_cache_tokens=4096, prefix_caching=False)
        self.backends = [TorchBackend(str(folder), "tiny", config) for _ in range(1 + disaggregated)]
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _serve(self) -> None:
        for backend in self.backends:
            info = await backend.start()
        metrics = Metrics(BufferSink("r1"), model_name="tiny", pool="decode")

        async def ask(request: Request, first_token: bool) -> Prefilled:
            return await self.backends[1].prefill(request, first_token=first_token)

        pooled = PooledTokenSource(self.backends[0], metrics, ask if len(self.backends) > 1 else None)
        self.source = observed(pooled, metrics, SourceLimits(8, timeout_s=300))
        tokenizer = Tokenizer.from_folder(info.folder)
        self.gate = Gate(Access(FakeKeys(max_concurrent=2).find), in_flight=self.source.in_flight)
        app = build_ingress(FrontEnd(self.source, tokenizer, info), gate=self.gate)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=2))
        self._ready.set()
        await self._server.serve(sockets=[listener])
        for backend in self.backends:
            await backend.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)

    @property
    def num_running(self) -> int:
        return sum(backend.usage().num_running for backend in self.backends)

    @property
    def num_waiting(self) -> int:
        return sum(backend.usage().num_waiting for backend in self.backends)

    def held(self) -> dict[str, int]:
        """Whatever a request that is gone must not hold."""
        usages = [backend.usage() for backend in self.backends]
        holds = {
            "sequences": sum(usage.num_running + usage.num_waiting + usage.num_held for usage in usages),
            "blocks": sum(usage.num_blocks - usage.num_free_blocks for usage in usages),
            "streams": sum(len(backend._streams) for backend in self.backends),
            "watched": len(self.source._watched),
            "backlog": self.source._backlog.num_tokens(),
            "places": self.gate.running.total(),
            "in flight": len(self.source.in_flight._stages),
        }
        return {what: count for what, count in holds.items() if count}

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def post(self, path: str = "/v1/completions", **body: Any) -> "Raw":
        """Send a whole request and read nothing yet."""
        return Raw(self.connect(), path, json.dumps({"model": "tiny", "ignore_eos": True, **body}).encode())

    def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", json={"model": "tiny", **body}, headers=headers)


class Raw:
    """A client that does as it likes."""

    def __init__(self, connection: socket.socket, path: str, body: bytes, *, length: int | None = None) -> None:
        self.connection = connection
        size = len(body) if length is None else length
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {KEY}\r\ncontent-length: {size}\r\n\r\n"
        connection.sendall(head.encode() + body)

    def read_until(self, text: bytes) -> bytes:
        seen = b""
        while text not in seen:
            more = self.connection.recv(65536)
            assert more, f"it ended without {text!r}: {seen[-500:]!r}"
            seen += more
        return seen

    def leave(self) -> None:
        self.connection.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("leaks"), vocab_size=512, tokenizer=True, max_position_embeddings=2048
    )


@pytest.fixture(scope="module", params=[False, True], ids=["monolith", "disaggregated"])
def module_replica(folder: Path, request: pytest.FixtureRequest) -> Iterator[Replica]:
    replica = Replica(folder, disaggregated=request.param)
    yield replica
    replica.stop()


@pytest.fixture
def replica(module_replica: Replica) -> Iterator[Replica]:
    yield module_replica
    try:
        wait_for(lambda: not module_replica.held(), "everything is let go of")
    except AssertionError:
        pytest.fail(f"still held: {module_replica.held()}")
    assert module_replica.ask(prompt="hello", max_tokens=3).status_code == 200, "it goes on serving"


STREAM = {"stream": True, "max_tokens": 2000, "prompt": [5, 6, 7], "speculate": False}  # thousands of steps


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_the_queue(replica: Replica, stream: bool) -> None:
    running = replica.post(**STREAM)
    running.read_until(b"data: ")
    waiting = replica.post(prompt=[5] * 40, max_tokens=900, stream=stream)
    if len(replica.backends) == 1:
        wait_for(lambda: replica.num_waiting == 1, "it waits for its turn")
    else:  # its prompt is computed elsewhere meanwhile, and waits for the one place to decode in
        wait_for(lambda: replica.backends[0].usage().num_waiting == 1, "it waits for its turn to decode")
    third = replica.post(**STREAM)
    third.read_until(b"rate_limit_exceeded")  # both of the key's places are taken
    third.leave()
    waiting.leave()
    wait_for(lambda: replica.num_waiting == 0, "it left the queue")
    assert replica.num_running == 1, "who runs is not disturbed"
    running.leave()


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_the_prompt_is_computed(replica: Replica, stream: bool) -> None:
    client = replica.post(prompt=[5] * LONG, max_tokens=900, stream=stream)
    wait_for(lambda: replica.num_running == 1, "its prompt is begun")
    client.leave()


def test_leaving_while_it_is_decoded(replica: Replica) -> None:
    whole = replica.post(prompt=[5, 6, 7], max_tokens=1900)
    wait_for(lambda: replica.backends[0].usage().num_running == 1, "it decodes")
    whole.leave()
    wait_for(lambda: replica.num_running == 0, "it was let go of")
    for num_events in (1, 5):
        client = replica.post(**STREAM)
        for _ in range(num_events):
            client.read_until(b"data: ")
        client.leave()
        wait_for(lambda: replica.num_running == 0, "it was let go of")


def test_leaving_at_the_end_of_the_stream(replica: Replica) -> None:
    for last in (b'"finish_reason":"length"', b"data: [DONE]"):
        client = replica.post(prompt=[5, 6, 7], max_tokens=5, stream=True)
        client.read_until(last)
        client.leave()


def test_leaving_some_of_many_choices_and_prompts(replica: Replica) -> None:
    client = replica.post(prompt=[[5, 6], [7, 8]], n=3, stream=True, max_tokens=300)
    client.read_until(b"data: ")
    client.leave()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["body", "header"])
def test_running_out_of_time_frees_what_was_held(replica: Replica, stream: bool, where: str) -> None:
    running = replica.post(**STREAM)
    running.read_until(b"data: ")
    headers = {"authorization": f"Bearer {KEY}"} | ({"x-request-timeout": "0.2"} if where == "header" else {})
    body = {"model": "tiny", "prompt": [5] * 30, "max_tokens": 900, "ignore_eos": True, "stream": stream}
    response = httpx.post(
        f"http://127.0.0.1:{replica.port}/v1/completions",
        json=body | ({"timeout": 0.2} if where == "body" else {"timeout": 50}),
        headers=headers,
    )
    reported = response.text if response.status_code != 504 else response.json()["error"]["message"]
    assert "0.2 s" in reported
    assert response.status_code == 504 or "error" in reported, "before its first token a status, later an event"
    running.leave()


@pytest.mark.parametrize("header", ["0", "-1", "x", "1e9", "inf", "nan", "1_0", "0.0000000001", "٣"])
def test_a_header_that_is_no_time_is_refused(replica: Replica, header: str) -> None:
    headers = {"authorization": f"Bearer {KEY}".encode(), "x-request-timeout": header.encode()}
    url = f"http://127.0.0.1:{replica.port}/v1/completions"
    refused = httpx.post(url, json={"model": "tiny", "prompt": "x"}, headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-request-timeout"


# ---- rubbish


def test_clients_that_do_not_speak_http(replica: Replica) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {KEY}\r\n".encode()
    for raw in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/9.9\r\n\r\n",
        head + b"content-length: -1\r\n\r\n",
        head + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        head + b"transfer-encoding: chunked\r\n\r\nZZ\r\nhello\r\n",
        head + b"content-length: 100\r\n\r\n{",
        head,
    ):
        with closing(replica.connect()) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(10)
            while connection.recv(65536):
                pass


# ---- slow clients


def test_a_body_that_never_comes_is_not_waited_for(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_BODY_TIMEOUT_S", 0.2)
    client = Raw(replica.connect(), "/v1/completions", b'{"model": ', length=1000)
    reported = client.read_until(b"}}")
    assert b" 408 " in reported and b"body_timeout" in reported
    client.leave()


def test_a_body_that_comes_in_drops_is_served(replica: Replica) -> None:
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()
    client = Raw(replica.connect(), "/v1/completions", b"", length=len(body))
    for byte in body:
        client.connection.sendall(bytes([byte]))
    assert b" 200 " in client.read_until(b'"usage"')
    client.leave()


@pytest.mark.parametrize("interval_s", [0.0, 0.001])
async def test_a_client_that_takes_nothing_is_let_go(interval_s: float) -> None:
    """It has not left, it only does not read: its send buffer is full for ever."""
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: {}\n\n"
                await asyncio.sleep(0)
        finally:
            closed.append("events")

    sent = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) == 4:
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    source = events()
    stream = EventStream(
        await anext(source), source, lambda: closed.append("lease"), patience_s=0.05, pace=Pace(interval_s)
    )
    async with asyncio.timeout(10):
        await stream({"type": "http", "path": "/"}, receive, send)
    assert sent == ["http.response.start"] + ["http.response.body"] * 3
    assert closed == ["events", "lease"]
