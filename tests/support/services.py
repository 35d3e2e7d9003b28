"""Services of a tiny model on Ray, for every test that serves for real: fixtures, and what asks and watches them."""

import concurrent.futures
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from ray import serve

from serve_app.app import build_app
from serve_app.telemetry.metric_summary import MetricSummary, summarise
from tests.support.tiny_models import write_tiny_model
from tools.chaos.sockets import free_ports

MODEL = "tiny"
LOOPING = "one two three one two three one two three one two"
TOKEN = "operator-token"
OPERATOR = {"authorization": f"Bearer {TOKEN}"}
ENGINE = {"dtype": "float32", "device": "cpu", "max_num_seqs": 16, "kv_cache_tokens": 8192, "max_batched_tokens": 128}
REPLAY = {"sample_rate": 1.0, "independent_rate": 0.0, "max_queue": 1000}  # a slow machine skips none


@dataclass(frozen=True)
class Service:
    """A running application and ways to talk to it."""

    name: str
    base_url: str

    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def openai(self) -> openai.OpenAI:
        """A new client, open until the service ends."""
        self.clients.append(openai.OpenAI(base_url=f"{self.base_url}/v1", api_key="unused", max_retries=0, timeout=300))
        return self.clients[-1]

    def http(self) -> httpx.Client:
        limits = httpx.Limits(keepalive_expiry=3.0)  # Ray closes idle ones after 5 s: no request may meet that
        return httpx.Client(base_url=self.base_url, timeout=300, limits=limits)

    def metrics_text(self) -> str:
        with self.http() as http:
            response = http.get("/metrics")
        assert response.status_code == 200, response.text
        return response.text

    def count(self, name: str, **labels: str) -> float:
        """A metric summed over its series with these labels; 0 where there is none yet."""
        return metric_total(self.metrics_text(), name, **labels)

    def gauge(self, name: str) -> float:
        """A gauge, of which there must be a sample, summed over replicas."""
        text = self.metrics_text()
        assert f"\ntruespec_{name}{{" in text, f"no sample of {name}"
        return metric_total(text, name)

    def operate(self, method: str, route: str, **body: Any) -> httpx.Response:
        """Ask as the operator whom `administered` lets in."""
        with self.http() as http:
            return http.request(method, f"/admin/{route}", json=body or None, headers=OPERATOR)

    def metrics(self) -> MetricSummary:
        return summarise(self.metrics_text())

    def completion(self, **body: Any) -> dict[str, Any]:
        with self.http() as http:
            response = http.post("/v1/completions", json={"model": MODEL, **body})
        assert response.status_code == 200, response.text
        return json.loads(response.text)

    def idle(self) -> bool:
        """Return whether no request runs or waits, and none left anything in a cache."""
        text, names = self.metrics_text(), ("requests_in_flight", "requests_running", "kv_cache_usage_ratio")
        return all(f"\ntruespec_{name}{{" in text and metric_total(text, name) == 0 for name in names)


class Load:
    """Clients that ask for completions all the time, and what they were answered.

    Args:
        service: which is asked.
        body: what is asked, by the request's number.
        clients: how many ask at once.
    """

    def __init__(self, service: Service, body: Callable[[int], dict[str, Any]], clients: int) -> None:
        self.service = service
        self.replies: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._body = body
        self._numbers = itertools.count()
        self._stopped = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._ask) for _ in range(clients)]

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let the last answers come; whatever broke a client off is raised here."""
        self._stopped.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()

    def _ask(self) -> None:
        with self.service.http() as http:
            while not self._stopped.is_set():
                reply = http.post("/v1/completions", json={"model": MODEL, **self._body(next(self._numbers))})
                if reply.status_code == 200:
                    self.replies.append(reply.json())
                else:
                    self.errors.append(reply.text)


def metric_total(text: str, name: str, **labels: str) -> float:
    """A metric summed over its series with these labels; 0 where there is none yet."""
    chosen = [f'{label}="{value}"' for label, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith(f"truespec_{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(one in line for one in chosen))


def administered(folder: Path) -> dict[str, Any]:
    """The section `admin` of a service whose operator has `TOKEN`, in a file of this folder."""
    (folder / "token").write_text(TOKEN)
    return {"token_file": str(folder / "token")}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Long enough for handoffs of several hundred tokens.
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def ray_port() -> Iterator[int]:
    (port,) = free_ports(1)
    # GPUs by name: nothing here asks for one, and so nothing may look for any.
    ray.init(num_cpus=8, num_gpus=2, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


def app_args(folder: Path, topology: str, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"source": str(folder), "name": MODEL},
        "engine": ENGINE,
        "topology": topology,
        "drafter": {"kind": "ngram", "ngram_min": 1},
        "replay": REPLAY,
        **changes,
    }


@contextlib.contextmanager
def deployed(port: int, name: str, args: dict[str, Any]) -> Iterator[Service]:
    serve.run(build_app(args), name=name, route_prefix=f"/{name}")
    try:
        service = Service(name, f"http://127.0.0.1:{port}/{name}")
        yield service
        for client in service.clients:
            client.close()
    finally:
        # The next one starts while this one's replicas end, unless their engines take most of the memory.
        serve.delete(name, _blocking=args.get("engine", {}).get("kind") == "vllm")


@pytest.fixture(scope="session")
def disaggregated(ray_port: int, tiny_folder: Path) -> Iterator[Service]:
    args = app_args(tiny_folder, "disaggregated", limits={"max_load": 4}, responses={"max_mib": 1})
    with deployed(ray_port, "disaggregated", args) as service:
        yield service


@pytest.fixture(scope="session")
def monolith(ray_port: int, tiny_folder: Path) -> Iterator[Service]:
    with deployed(ray_port, "monolith", app_args(tiny_folder, "monolith")) as service:
        yield service
