"""Ray's own `ray.serve.llm` over vLLM, asked over HTTP. Runs under the interpreter of vLLM's environment."""

import importlib.metadata
import os
import time
from typing import Any

import ray
from ray import serve as ray_serve
from ray.serve.llm import LLMConfig, build_openai_app

from deploy.run.processes import process_tree
from tools.bench.workers.channel import BatchOfPrompts, serve
from tools.bench.workers.http_load import ServerLoad

_HOST = "127.0.0.1"
_START_S = 600.0
_ROUTERS = 8  # CPUs that Ray counts for whatever stands before the engine; it pins nothing to them


class RayLlm:
    """A Ray cluster of its own, with the application on it, until this process ends."""

    max_streams: int | None = None

    def __init__(self, settings: dict[str, Any]) -> None:
        ray.init(num_cpus=settings["threads"] + _ROUTERS, log_to_driver=True)
        config = LLMConfig(
            model_loading_config={"model_id": "bench", "model_source": settings["model"]},
            engine_kwargs=settings["engine_kwargs"],
            deployment_config={"num_replicas": 1, "max_ongoing_requests": 256},
            placement_group_config={"bundles": [{"CPU": settings["threads"]}]},
            log_engine_metrics=False,
            runtime_env={"env_vars": settings["environment"]},
        )
        ray_serve.start(http_options={"host": _HOST, "port": settings["port"]})
        ray_serve.run(build_openai_app({"llm_configs": [config]}), name="bench")
        self._server = ServerLoad(_HOST, settings["port"], "bench")
        self._wait()
        self.versions = {name: importlib.metadata.version(name) for name in ("ray", "torch")}

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """All prompts as streams."""
        return self._server.run(ask)

    def processes(self) -> list[int]:
        """This one and all it started: Ray, the proxy, the router, vLLM."""
        return process_tree(os.getpid())

    def _wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.run(BatchOfPrompts([[1, 2, 3]], 2, 0.0, 0))
                return
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(2.0)


if __name__ == "__main__":
    serve(RayLlm)
