"""Pools on nodes of their own, as a cluster has them: handoffs from node to node, and a node that dies under load."""

import asyncio
import concurrent.futures
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.chaos.traffic import ask_all, differences, plan
from serve_app.telemetry.metric_summary import summarise
from tests.support.ray_head import RayHead, free_ports, ray_head, ray_node
from tests.support.services import ENGINE, MODEL, gauge_total, wait_for
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200)]

POOLS = {
    "prefill": {"replicas": 1, "num_cpus": 1, "label_selector": {"node": "prefill"}},
    "decode": {"replicas": 1, "num_cpus": 1, "label_selector": {"pool": "decode"}},
    "router": {"num_cpus": 1, "label_selector": {"node": "head"}},
}


@dataclass(frozen=True)
class Cluster:
    """A service on four nodes: the head, one that prefills, and two of which one decodes."""

    head: RayHead
    url: str
    kill: dict[str, Callable[[], None]]  # a decode node, by its label `node`

    def metric(self, name: str) -> float:
        """Summed over its series; 0 where there is none yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return gauge_total(text, f"truespec_{name}") if f"truespec_{name}{{" in text else 0.0

    def handoffs(self) -> dict[str, float]:
        counts = summarise(httpx.get(f"{self.url}/metrics", timeout=60).text)["handoffs_by_result"]
        return {result: number for result, number in counts.items() if number}

    def nodes_of(self, deployment: str) -> list[str]:
        """The nodes of its replicas, by their label `node`."""
        names = {node["node_id"]: node["labels"]["node"] for node in self.head.nodes()}
        deployments = self.head.get("/api/serve/applications/")["applications"]["four"]["deployments"]
        return [names[one["node_id"]] for one in deployments[deployment]["replicas"] if one["state"] == "RUNNING"]


def config(folder: Path, port: int) -> dict[str, Any]:
    args = {
        "model": {"source": str(folder), "name": MODEL},
        "engine": ENGINE,
        "topology": "disaggregated",
        "drafter": {"kind": "ngram", "ngram_min": 1},
        "pools": POOLS,
        "recovery": {"resume": True, "max_resumes": 20, "decode_timeout_s": 10},
        "replay": {"sample_rate": 1.0, "max_queue": 1000},
    }
    application = {"name": "four", "route_prefix": "/", "import_path": "serve_app.app:build_app", "args": args}
    http = {"host": "127.0.0.1", "port": port}
    return {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("four")
    (port,) = free_ports(1)
    # Slow enough for streams to run when a node dies, on a fast machine too.
    model = write_tiny_model(folder / "model", tokenizer=True, max_position_embeddings=2048, num_hidden_layers=48)
    (folder / "serve.yaml").write_text(yaml.safe_dump(config(model, port)))
    with (
        ray_head(num_cpus=1, labels={"node": "head"}) as head,
        ray_node(head, 1, {"node": "prefill"}),
        ray_node(head, 1, {"node": "decode-1", "pool": "decode"}) as first,
        ray_node(head, 1, {"node": "decode-2", "pool": "decode"}) as second,
    ):
        command = [str(Path(sys.executable).with_name("truespec")), "serve", str(folder / "serve.yaml")]
        with (folder / "shown").open("w") as out:
            service = subprocess.Popen(
                [*command, "--address", head.address], env=head.environment, stdout=out, stderr=out
            )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: service.poll() is not None or "Serving " in (folder / "shown").read_text(), "the start")
            assert service.poll() is None, (folder / "shown").read_text()
            yield Cluster(head, url, {"decode-1": first, "decode-2": second})
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(120)


def test_pools_are_on_their_nodes_and_handoffs_go_from_one_to_another(cluster: Cluster) -> None:
    placed = {name: cluster.nodes_of(name) for name in ("PrefillServer", "DecodeServer", "StreamRouter", "Controller")}
    assert placed.pop("DecodeServer") in (["decode-1"], ["decode-2"])
    assert placed == {"PrefillServer": ["prefill"], "StreamRouter": ["head"], "Controller": ["head"]}
    body = {"model": MODEL, "prompt": "one two three " * 20, "max_tokens": 20, "verify": True}
    answers = [httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300).json() for _ in range(4)]
    assert {answer["verdict"] for answer in answers} == {"verified"}
    wait_for(lambda: cluster.handoffs() == {"ok": len(answers)}, "the count of the handoffs")
    assert cluster.metric("handoff_bytes_total") > 0


def test_streams_go_on_at_another_node_when_theirs_dies(cluster: Cluster) -> None:
    long = {"max_tokens": 1400, "speculate": False, "stop": None}  # seconds, on any machine
    bodies = [body | long for body in plan(MODEL, 6, seed=5, max_tokens=600)]
    undisturbed = asyncio.run(ask_all(cluster.url, bodies, 6))
    assert all(one.complete for one in undisturbed)
    emitted = cluster.metric("emitted_tokens_total")
    with concurrent.futures.ThreadPoolExecutor(1) as clients:
        streams = clients.submit(asyncio.run, ask_all(cluster.url, bodies, 6))
        wait_for(lambda: cluster.metric("emitted_tokens_total") >= emitted + 200, "tokens of all streams")
        (before,) = cluster.nodes_of("DecodeServer")
        cluster.kill[before]()
        disturbed = streams.result()
    found = [differences(calm, after) for calm, after in zip(undisturbed, disturbed, strict=True)]
    assert all(one.identical for one in found), [one.error for one in disturbed if one.error]
    assert cluster.nodes_of("DecodeServer") == sorted({*cluster.kill} - {before})
    wait_for(lambda: cluster.metric("resumes_total") == len(bodies), "the count of streams that went on there")
    assert cluster.metric("replica_restarts_total") == 1
