"""Pools on nodes of their own, as a cluster has them: handoffs from node to node, a node that dies under load, and
models that each node has to have or to fetch."""

import asyncio
import concurrent.futures
import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.telemetry.metric_summary import summarise
from speculative.config import kernels_folder
from tests.support.fake_hub import FakeHub, fake_hub
from tests.support.ray_head import RayHead, ray_head, ray_node
from tests.support.services import ENGINE, MODEL, OPERATOR, administered, app_args, metric_total
from tests.support.tiny_models import write_tiny_model
from tests.support.waiting import wait_for
from tools.chaos.sockets import free_ports
from tools.chaos.streams import ask_all, complete, differences, plan

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]

POOLS = {
    "prefill": {"replicas": 1, "num_cpus": 1, "label_selector": {"node": "prefill"}},
    "decode": {"replicas": 1, "num_cpus": 1, "label_selector": {"pool": "decode"}},
    "router": {"num_cpus": 1, "label_selector": {"node": "head"}},
}


@dataclass(frozen=True)
class Cluster:
    """A service on four nodes: the head, one that prefills, and two of which one decodes. These two have caches of
    their own, in folders of their labels, and a hub."""

    head: RayHead
    url: str
    kill: dict[str, Callable[[], None]]  # a decode node, by its label `node`
    hub: FakeHub
    folder: Path

    def metric(self, name: str) -> float:
        """Summed over its series; 0 where there is none yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return metric_total(text, name)

    def handoffs(self) -> dict[str, float]:
        counts = summarise(httpx.get(f"{self.url}/metrics", timeout=60).text)["handoffs_by_result"]
        return {result: number for result, number in counts.items() if number}

    def nodes_of(self, deployment: str, application: str = "four") -> list[str]:
        """The nodes of its replicas, by their label `node`."""
        return self.head.nodes_of(deployment, application)

    def serving(self, name: str, until: str = "Serving ", **args: Any) -> Any:
        """A service beside the first one, at a path of its own."""
        return self.head.serving(self.folder, f"{self.url}/{name}", name, args, until=until)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("four")
    (port,) = free_ports(1)
    # Slow enough for streams to run when a node dies, on a fast machine too.
    model = write_tiny_model(folder / "model", tokenizer=True, max_position_embeddings=2048, num_hidden_layers=48)
    small = write_tiny_model(folder / "small", tokenizer=True)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(fake_hub("org/tiny", small))

        def node(num_cpus: int, labels: dict[str, str]) -> Callable[[], None]:
            cache = folder / labels["node"]
            cache.mkdir()
            kernels_folder().mkdir(parents=True, exist_ok=True)
            (cache / "kernels").symlink_to(kernels_folder())  # a node would take half a minute to compile its own
            own = hub.environment(cache) | {"TRUESPEC_CACHE": str(cache)}
            return stack.enter_context(ray_node(head, num_cpus, labels, own))

        head = stack.enter_context(ray_head(num_cpus=1, labels={"node": "head"}))
        node(1, {"node": "prefill"})
        kill = {name: node(3, {"node": name, "pool": "decode"}) for name in ("decode-1", "decode-2")}
        shutil.copytree(small, folder / "decode-1" / "models" / "on-one-node")
        cluster = Cluster(head, f"http://127.0.0.1:{port}", kill, hub, folder)
        recovery = {"resume": True, "max_resumes": 20, "decode_timeout_s": 10}
        args = app_args(model, "disaggregated", pools=POOLS, recovery=recovery)
        shown, service = stack.enter_context(head.serving(folder, cluster.url, "four", args))
        assert service.poll() is None, shown()
        yield cluster


def test_pools_are_on_their_nodes_and_handoffs_go_from_one_to_another(cluster: Cluster) -> None:
    placed = {name: cluster.nodes_of(name) for name in ("PrefillServer", "DecodeServer", "StreamRouter", "Controller")}
    assert placed.pop("DecodeServer") in (["decode-1"], ["decode-2"])
    assert placed == {"PrefillServer": ["prefill"], "StreamRouter": ["head"], "Controller": ["head"]}
    body = {"model": MODEL, "prompt": "one two three " * 20, "max_tokens": 20, "verify": True}
    before = cluster.handoffs().get("ok", 0.0)

    def handed_over() -> bool:
        """Ask once more; a prompt that a busy node is too slow for is computed where it decodes."""
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=300).json()
        assert answer["verdict"] == "verified"
        return cluster.handoffs().get("ok", 0.0) >= before + 4

    wait_for(handed_over, "the fourth handoff")
    assert cluster.metric("handoff_bytes_total") > 0


ON_BOTH = {  # a node has 3 CPUs, and the other service takes one of them at most
    "topology": "monolith",
    "pools": {"monolith": {"replicas": 2, "num_cpus": 2, "label_selector": {"pool": "decode"}}},
}


def test_each_node_fetches_a_model_of_the_hub(cluster: Cluster) -> None:
    args = {"model": {"source": "org/tiny", "name": MODEL}, "engine": ENGINE, "admin": administered(cluster.folder)}
    with cluster.serving("fetched", **args, **ON_BOTH) as (shown, service):
        assert service.poll() is None, shown()
        assert sorted(cluster.nodes_of("MonolithServer", "fetched")) == ["decode-1", "decode-2"]
        assert cluster.hub.downloads["model.safetensors"] == 2, "once for each node"
        body = {"model": MODEL, "prompt": "one two", "max_tokens": 4}
        assert httpx.post(f"{cluster.url}/fetched/v1/completions", json=body, timeout=300).is_success
        # New weights that only one node has are refused on all of them.
        order = {"path": "on-one-node", "weight_version": "v2"}
        answer = httpx.post(f"{cluster.url}/fetched/admin/weights", json=order, headers=OPERATOR, timeout=300)
        assert answer.status_code == 409
        said = answer.json()["error"]["message"]
        assert "Nothing changed" in said and "path: No model 'on-one-node'" in said
        assert [name for node, name in cluster.head.names().items() if node in said] == ["decode-2"]


def test_a_head_that_one_node_lacks_is_reported_with_that_node_and_the_field(cluster: Cluster) -> None:
    """At once: Serve would try that replica again and again, since the one on the other node has started."""
    drafter = {"kind": "draft_model", "model": "on-one-node"}
    args = {"model": {"source": "org/tiny", "name": MODEL}, "engine": ENGINE, "drafter": drafter}
    with cluster.serving("lacking", until="No model", **args, **ON_BOTH) as (shown, service):
        assert service.wait(60) == 1
        (line,) = (line for line in shown().splitlines() if "No model" in line)
    assert "A replica cannot start" in line and "drafter.model: No model 'on-one-node'" in line
    assert [name for node, name in cluster.head.names().items() if node in line] == ["decode-2"]


@pytest.mark.last
def test_streams_go_on_at_another_node_when_theirs_dies(cluster: Cluster) -> None:
    long = {"max_tokens": 1400, "speculate": False, "stop": None}  # seconds, on any machine
    bodies = [body | long for body in plan(MODEL, 6, seed=5, max_tokens=600)]
    undisturbed = asyncio.run(ask_all(cluster.url, bodies, 6))
    assert all(map(complete, undisturbed)), [one.reported() for one in undisturbed]
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
