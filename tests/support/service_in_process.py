"""A disaggregated service in this process: its deployments, with plain calls in the place of Ray's handles."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray

from serve_app.config.files import parse_args
from serve_app.deployments import controller, engine_host, runtime
from serve_app.deployments.controller import Controller
from serve_app.deployments.pools import HttpServer, PrefillServer
from serve_app.telemetry.tracing import Tracing


class Remote:
    """A handle or an actor: each method is called here, once it is `open`."""

    def __init__(self, part: Any, is_open: asyncio.Event | None = None) -> None:
        self._part = part
        self._open = is_open

    def options(self, **_: Any) -> "Remote":
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._part, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._open is not None:
                await self._open.wait()
            answer = method(*args, **kwargs)
            return await answer if asyncio.iscoroutine(answer) else answer

        return SimpleNamespace(remote=call)


class Service:
    """A prefill and a decode replica, their controller, and a client of the decode replica's HTTP."""

    prefill: PrefillServer
    decode: HttpServer
    controller: Controller
    client: httpx.AsyncClient

    def __init__(self) -> None:
        self.controller_answers = asyncio.Event()  # its callers wait for it
        self.controller_answers.set()


@contextlib.asynccontextmanager
async def started(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Service]:
    """Serve a model folder; replicas report when somebody asks for it, and at no other time."""
    service = Service()
    config = parse_args({"model": {"source": str(folder), "name": "tiny"}, "topology": "disaggregated", **settings})
    names = iter(["referee", "prefill-1", "decode-1"])

    def replica_context() -> Any:
        return SimpleNamespace(app_name="app", replica_tag=next(names))

    def handle_of(deployment: str, app_name: str) -> Remote:
        if deployment == "PrefillServer":
            return Remote(service.prefill)
        return Remote(service.controller, service.controller_answers)

    def actor(kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda **_: Remote(kind())))

    for module in (controller, runtime):
        monkeypatch.setattr(module.serve, "get_replica_context", replica_context)
        monkeypatch.setattr(module.serve, "get_deployment_handle", handle_of)
        monkeypatch.setattr(module, "observe", lambda *_: Tracing())
        monkeypatch.setattr(module, "RaySink", lambda: SimpleNamespace(count=_no, gauge=_no, observe=_no))
    here = SimpleNamespace(get_node_id=lambda: "ab" * 28, get_accelerator_ids=lambda: {"GPU": []})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(engine_host.ray, "remote", actor)
    for module in (controller, engine_host, runtime):
        monkeypatch.setattr(module, "REPORT_EVERY_S", 3600.0)
    monkeypatch.setattr(controller, "watch_pools", lambda *_: asyncio.sleep(3600))
    monkeypatch.setattr(gc, "freeze", _no)
    service.controller = object.__new__(Controller)
    await service.controller.__init__(config)  # type: ignore[misc]
    service.prefill = object.__new__(PrefillServer)
    await service.prefill.__init__(config)  # type: ignore[misc]
    service.decode = HttpServer()
    await service.decode.start(config, "decode", Remote(service.prefill))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(service.decode.front.asgi_app(service.decode.check_health))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://decode-1", timeout=60) as service.client:
            yield service
    finally:
        hosts = (service.prefill.host, service.decode.host)
        tasks = [service.controller._work, *(task for host in hosts for task in host.runtime.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for host in hosts:
            await host.backend.stop()


def _no(*_: object) -> None:
    """In the place of what reaches further than a test may."""
