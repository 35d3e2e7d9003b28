"""Our application on Ray Serve, asked over HTTP."""

import contextlib
import os
import sys
from typing import Any

from deploy.run.cluster import running_app
from deploy.run.processes import process_tree
from serve_app.config.base import POOLS_OF_TOPOLOGY
from serve_app.config.serve_file import ServeFile
from serve_app.versions import version_of
from tools.bench.workers.channel import BatchOfPrompts, serve
from tools.bench.workers.http_load import ServerLoad

_HOST = "127.0.0.1"


class ServedApplication:
    """A Ray cluster of its own, with the application on it, until this process ends."""

    max_streams: int | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        pools = POOLS_OF_TOPOLOGY[settings["topology"]]
        args = {
            "model": {"source": settings["model"], "name": "bench"},
            "engine": settings["engine"],
            "drafter": settings["drafter"],
            "topology": settings["topology"],
            "pools": {name: {"num_cpus": float(settings["threads"])} for name in pools},
            "replay": {"sample_rate": 0.0},
        }
        file = ServeFile.model_validate(
            {"http_options": {"host": _HOST, "port": settings["port"]}, "applications": [{"args": args}]}
        )
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(running_app(file, _report))
        self._server = ServerLoad(_HOST, settings["port"], "bench")
        self.versions = {name: version_of(name) for name in ("truespec", "ray", "torch")}

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """All prompts as streams."""
        return self._server.run(ask)

    def processes(self) -> list[int]:
        """This one and all it started: Ray, the proxy, the replicas."""
        return process_tree(os.getpid())


def _report(message: str) -> None:
    sys.stderr.write(f"{message}\n")


if __name__ == "__main__":
    serve(ServedApplication)
