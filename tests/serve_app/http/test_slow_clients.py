"""Connections whose headers never come are ended; those that are in time, or wait for their answer, are not."""

import asyncio
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from uvicorn.config import HTTP_PROTOCOLS

from deploy.run import cluster
from serve_app.config.app_config import AppConfig
from serve_app.http import slow_clients
from serve_app.http.slow_clients import PROXY_CALLBACK, PatientProtocol, bound_headers

HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n"


@pytest.fixture
def port(serve_http: Callable[[FastAPI], int], monkeypatch: pytest.MonkeyPatch) -> int:
    """A server as Ray Serve's proxy makes it, after it has called back; answers take longer than headers may."""
    app = FastAPI()

    @app.get("/", response_class=PlainTextResponse)
    async def late() -> str:
        await asyncio.sleep(0.6)
        return "ok"

    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])  # put back afterwards
    monkeypatch.setattr(PatientProtocol, "header_timeout_s", 0.3)
    assert bound_headers() == []
    return serve_http(app)


def read(client: socket.socket, until: bytes = b"") -> bytes:
    """What comes up to `until`, or to the end of the connection."""
    reported = b""
    while not (until and reported.endswith(until)) and (part := client.recv(4096)):
        reported += part
    return reported


@pytest.mark.parametrize("sent", [b"", b"G", HEAD], ids=["nothing", "a byte", "half of the headers"])
def test_a_client_that_does_not_finish_its_headers_is_let_go(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(sent)
        assert read(client) == b"", "the connection ends, without an answer"


def test_who_waits_for_an_answer_is_not_and_a_second_request_has_its_own_time(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        for _ in range(2):
            client.sendall(HEAD + b"\r\n")
            assert read(client, b"ok").startswith(b"HTTP/1.1 200")
        client.sendall(HEAD)
        assert read(client) == b""


def test_a_cluster_of_ours_is_started_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def start(*_: object) -> str:
        started.append(dict(os.environ))
        raise InterruptedError

    for name in PROXY_CALLBACK:
        monkeypatch.delenv(name, raising=False)
    sound = SimpleNamespace(require_servable=lambda: None, hints=())
    for name, stand_in in (("_start_ray", start), ("check_machine", lambda *_, **__: sound), ("_prepare_kernels", id)):
        monkeypatch.setattr(cluster, name, stand_in)
    config = AppConfig.model_validate({"model": {"source": "fake"}})
    file = SimpleNamespace(application=SimpleNamespace(effective_args=config), proxy_location="Disabled")
    with pytest.raises(InterruptedError), cluster.running_app(file, lambda _: None):  # type: ignore[arg-type]
        pass
    (environment,) = started
    (path,) = (environment[name] for name in PROXY_CALLBACK)
    assert path == f"{slow_clients.__name__}.{bound_headers.__name__}"
    for name in PROXY_CALLBACK:
        monkeypatch.delenv(name)
