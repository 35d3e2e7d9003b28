"""Our application on Ray Serve, asked over HTTP, or through the proxy of `truespec watch`."""

import asyncio
import contextlib
import multiprocessing
import os
import socket
import sys
import time
from typing import Any

import torch

from deploy.run.cluster import running_app
from deploy.run.processes import process_tree
from deploy.watch.proxy import ProxyOptions, running_proxy
from serve_app.config.base import POOLS_OF_TOPOLOGY
from serve_app.config.serve_file import ServeFile
from serve_app.versions import version_of
from tools.bench.workers.channel import BatchOfPrompts, serve
from tools.bench.workers.http_load import ServerLoad

_HOST = "127.0.0.1"
_PROXY_STARTS_WITHIN_S = 60.0


class ServedApplication:
    """A Ray cluster of its own, with the application on it, until this process ends."""

    max_streams: int | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        pools = POOLS_OF_TOPOLOGY[settings["topology"]]
        on_gpu = settings["engine"]["device"] != "cpu" and torch.cuda.is_available()
        pool = {"num_cpus": float(settings["threads"]), "num_gpus": 1 / len(pools) if on_gpu else 0}
        args = {
            "model": {"source": settings["model"], "name": "bench"},
            "engine": settings["engine"],
            "drafter": settings["drafter"],
            "topology": settings["topology"],
            "pools": dict.fromkeys(pools, pool),
            "handoff": {"transport": settings["transport"]},
            "replay": {"sample_rate": 0.0},
        }
        file = ServeFile.model_validate(
            {"http_options": {"host": _HOST, "port": settings["port"]}, "applications": [{"args": args}]}
        )
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(running_app(file, _report))
        port = _watched(settings["port"]) if settings["watched"] else settings["port"]
        self._server = ServerLoad(_HOST, port, "bench")
        self.versions = {name: version_of(name) for name in ("truespec", "ray", "torch")}

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """All prompts as streams."""
        return self._server.run(ask)

    def processes(self) -> list[int]:
        """This one and all it started: Ray, the proxy, the replicas."""
        return process_tree(os.getpid())


def _watched(server: int) -> int:
    """Start a proxy that watches every request, in a process that ends with this one, and return its port."""
    with socket.create_server((_HOST, 0)) as free:
        port: int = free.getsockname()[1]
    multiprocessing.get_context("spawn").Process(target=_serve_proxy, args=(server, port), daemon=True).start()
    deadline = time.monotonic() + _PROXY_STARTS_WITHIN_S
    while True:
        try:
            socket.create_connection((_HOST, port), 1).close()
            return port
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _serve_proxy(server: int, port: int) -> None:
    async def serve_forever() -> None:
        async with running_proxy(ProxyOptions(f"http://{_HOST}:{server}", port=port)):
            await asyncio.Event().wait()

    asyncio.run(serve_forever())


def _report(message: str) -> None:
    sys.stderr.write(f"{message}\n")


if __name__ == "__main__":
    serve(ServedApplication)
