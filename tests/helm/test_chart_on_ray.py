"""The chart's CPU example as a cluster runs it: its Serve config put to a real Ray, its smoke script against that."""

import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from speculative.model.catalogue import fetch_model
from tests.helm.test_smoke import smoke
from tests.support.chart import EXAMPLES, Object, one, pod_templates, serve_config, template
from tests.support.ray_head import RayHead, ray_head
from tests.support.waiting import wait_for
from tools.chaos.sockets import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]

APPLICATIONS = "/api/serve/applications/"


@pytest.fixture
def port() -> int:
    """Of the API."""
    return free_ports(1)[0]


@pytest.fixture
def objects(port: int) -> list[Object]:
    """The CPU example, at a free port."""
    return template(EXAMPLES / "cpu-demo-values.yaml", "--set", f"service.port={port},worker.drainSeconds=1")


@pytest.fixture
def head(objects: list[Object]) -> Iterator[RayHead]:
    """One node that plays the head and every worker group, with their labels and their environment."""
    groups = one(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    labels = {key: value for group in groups for key, value in group["labels"].items()}
    (container,) = groups[0]["template"]["spec"]["containers"]
    of_ray = {entry["name"]: entry["value"] for entry in container["env"] if entry["name"].startswith("RAY_")}
    with ray_head(2, labels, of_ray) as found:
        wait_for(lambda: answers(found), "Serve's part of the dashboard", 400)
        yield found


def application(head: RayHead) -> dict[str, Any]:
    return head.get(APPLICATIONS)["applications"].get("truespec", {})  # type: ignore[no-any-return]


def answers(head: RayHead) -> bool:
    try:
        application(head)
    except (httpx.HTTPError, KeyError, ValueError):
        return False
    return True


def put(head: RayHead, config: dict[str, Any]) -> bool:
    """Deploy as KubeRay does, over the dashboard's REST API; False where the cluster is not ready."""
    reply = httpx.put(f"{head.dashboard}{APPLICATIONS}", json=config, headers=head.headers, timeout=60)
    return reply.is_success


def test_the_cpu_example_serves_and_the_smoke_script_passes(head: RayHead, objects: list[Object], port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    assert smoke(url, seconds="1").returncode != 0, "nobody is there yet"
    for group in one(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (fetch,) = group["template"]["spec"]["initContainers"]
        for name in fetch["args"]:
            fetch_model(name)  # what the init container does
    wait_for(lambda: put(head, serve_config(objects)), "a cluster that takes the configuration")
    wait_for(lambda: application(head).get("status") in ("RUNNING", "DEPLOY_FAILED"), "the application", 600)
    found = application(head)
    assert found["status"] == "RUNNING", found["message"]
    assert set(found["deployments"]) == {"PrefillServer", "DecodeServer", "Controller"}
    done = smoke(url, seconds="300")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok: ") == 6
    assert drain(head, objects) == "", "Ray accepts that the node is drained"


def drain(head: RayHead, objects: list[Object]) -> str:
    """What a worker pod's preStop hook says to standard error when it runs on the cluster."""
    (container,) = pod_templates(objects)["decode"]["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    inside = head.environment | {"RAY_ADDRESS": head.address, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=inside, timeout=300)
    return "\n".join(line for line in done.stderr.splitlines() if "\tINFO " not in line)
