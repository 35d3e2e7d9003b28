"""The chart's CPU example as a cluster runs it: its Serve config put to a real Ray, its smoke script against that."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from speculative.model.catalogue import fetch_model
from tests.support.chart import EXAMPLES, Object, one, pod_templates, serve_config, template
from tests.support.ray_head import RayHead, ray_head
from tools.chaos.sockets import free_ports
from tools.chart import CHART

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Cluster:
    """A Ray head as KubeRay talks to it: over the dashboard's REST API, with the cluster's token."""

    head: RayHead

    def put(self, config: dict[str, Any], timeout_s: float) -> None:
        """Deploy, and try again while the cluster is not ready, as KubeRay does at each of its rounds."""
        deadline = time.monotonic() + timeout_s
        while not (answer := self._request("PUT", config)).is_success:
            assert time.monotonic() < deadline, answer.text
            time.sleep(2)

    def application(self) -> dict[str, Any]:
        return self._request("GET").json()["applications"].get("truespec", {})

    def _request(self, method: str, body: object = None) -> httpx.Response:
        url = f"{self.head.dashboard}/api/serve/applications/"
        return httpx.request(method, url, json=body, headers=self.head.headers, timeout=60)


@pytest.fixture
def port() -> int:
    """Of the API."""
    return free_ports(1)[0]


@pytest.fixture
def objects(port: int) -> list[Object]:
    """The CPU example, at a free port."""
    return template(EXAMPLES / "cpu-demo-values.yaml", "--set", f"service.port={port},worker.drainSeconds=1")


@pytest.fixture
def cluster(objects: list[Object]) -> Iterator[Cluster]:
    """One node that plays the head and every worker group, with their labels and their environment."""
    groups = one(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    labels = {key: value for group in groups for key, value in group["labels"].items()}
    (container,) = groups[0]["template"]["spec"]["containers"]
    of_ray = {entry["name"]: entry["value"] for entry in container["env"] if entry["name"].startswith("RAY_")}
    with ray_head(2, labels, of_ray) as head:
        found = Cluster(head)
        wait_until(lambda: _answers(found), "Serve's part of the dashboard", 400)
        yield found


def _answers(cluster: Cluster) -> bool:
    try:
        cluster.application()
    except (httpx.HTTPError, KeyError, ValueError):
        return False
    return True


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} was not there after {timeout_s:.0f} s"
        time.sleep(1)


def smoke(url: str, timeout_s: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CHART / "files" / "smoke.py"), url, str(timeout_s)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_cpu_example_serves_and_the_smoke_script_passes(cluster: Cluster, objects: list[Object], port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    assert smoke(url, 1).returncode != 0, "nobody is there yet"
    for group in one(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (fetch,) = group["template"]["spec"]["initContainers"]
        for name in fetch["args"]:
            fetch_model(name)  # what the init container does
    cluster.put(serve_config(objects), 300)
    wait_until(lambda: cluster.application().get("status") in ("RUNNING", "DEPLOY_FAILED"), "the application", 600)
    application = cluster.application()
    assert application["status"] == "RUNNING", application["message"]
    assert set(application["deployments"]) == {"PrefillServer", "DecodeServer", "Controller"}
    done = smoke(url, 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok: ") == 6
    assert drain(cluster, objects) == "", "Ray accepts that the node is drained"


def drain(cluster: Cluster, objects: list[Object]) -> str:
    """What a worker pod's preStop hook says to standard error when it runs on the cluster."""
    (container,) = pod_templates(objects)["decode"]["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    inside = cluster.head.environment | {"RAY_ADDRESS": cluster.head.address, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=inside, timeout=300)
    return "\n".join(line for line in done.stderr.splitlines() if "\tINFO " not in line)
