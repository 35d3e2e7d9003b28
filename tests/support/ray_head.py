"""A Ray head of its own with token auth, as a cluster has it, for what is submitted to one."""

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.processes import until_interrupted
from tools.chaos.nodes import PATIENT, Node, NodeShape
from tools.chaos.sockets import free_ports

TOKEN = "a-token-of-this-test-only-0123456789"
_START_S = 300
_SCRIPTS = sysconfig.get_path("scripts")


@dataclass(frozen=True)
class RayHead:
    """A running head, and what a client of it has in its environment."""

    dashboard: str  # URL
    address: str  # host:port of the cluster
    environment: dict[str, str]

    @property
    def headers(self) -> dict[str, str]:
        """Of a request to the dashboard."""
        return {"Authorization": f"Bearer {TOKEN}"}

    def get(self, path: str) -> Any:
        """What the dashboard answers."""
        return httpx.get(f"{self.dashboard}{path}", headers=self.headers, timeout=60).raise_for_status().json()

    def nodes(self) -> list[dict[str, Any]]:
        """Those that are alive."""
        found = self.get("/api/v0/nodes?detail=1")["data"]["result"]["result"]
        return [node for node in found if node["state"] == "ALIVE"]

    def names(self) -> dict[str, str]:
        """Ray's ids of the nodes that live, with their label `node`."""
        return {node["node_id"]: node["labels"]["node"] for node in self.nodes()}

    def nodes_of(self, deployment: str, application: str) -> list[str]:
        """The nodes of its replicas, by their label `node`."""
        names = self.names()
        deployments = self.get("/api/serve/applications/")["applications"][application]["deployments"]
        return [names[one["node_id"]] for one in deployments[deployment]["replicas"] if one["state"] == "RUNNING"]

    @contextlib.contextmanager
    def serving(
        self, folder: Path, url: str, name: str, args: dict[str, Any], *, until: str = "Serving "
    ) -> Iterator[tuple[Callable[[], str], subprocess.Popen[bytes]]]:
        """`truespec serve` of one application at a URL of this machine until the block ends, which begins when it says
        that, or has ended: what it has said, and its process."""
        at = httpx.URL(url)
        application = {"name": name, "route_prefix": at.path, "import_path": "serve_app.app:build_app", "args": args}
        http = {"host": at.host, "port": at.port}
        file, shown = folder / f"{name}.yaml", folder / f"{name}.shown"
        data = {"proxy_location": "HeadOnly", "http_options": http, "applications": [application]}
        file.write_text(yaml.safe_dump(data))
        command = [sys.executable, "-m", "deploy.cli.main", "serve", str(file), "--address", self.address]
        with until_interrupted(command, shown, until, self.environment) as started:
            yield started

    def submit(self, *command: str, token: bool = True) -> subprocess.CompletedProcess[str]:
        """`ray job submit -- COMMAND`, until the job has ended."""
        inside = self.environment if token else self.environment | {"RAY_AUTH_TOKEN": "another-token-0123456789"}
        submit = [f"{_SCRIPTS}/ray", "job", "submit", "--address", self.dashboard, "--", *command]
        return subprocess.run(submit, capture_output=True, text=True, check=False, env=inside, timeout=500)


@contextlib.contextmanager
def ray_head(
    num_cpus: int, labels: Mapping[str, str] | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[RayHead]:
    """Start a head on free ports, and end all of it with the block. It says that it has so many CPUs, and its node
    these labels; `settings` are further environment of its processes."""
    gcs, dashboard, agent, metrics = free_ports(4)
    mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PATH": f"{_SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | mine
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [f"{_SCRIPTS}/ray", "start", "--head", "--block", f"--num-cpus={num_cpus}", f"--port={gcs}"]
        command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
        command += [f"--metrics-export-port={metrics}", f"--temp-dir={folder}", "--include-dashboard=true"]
        command += ["--include-log-monitor=false"]  # nobody is shown what the processes write
        if labels:
            command += ["--labels", ",".join(f"{key}={value}" for key, value in labels.items())]
        said = Path(folder, "ray-start.log")
        with said.open("wb") as log:
            ray = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=environment | {**(settings or {}), **PATIENT},
                start_new_session=True,
            )
        try:
            head = RayHead(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}", environment)
            deadline = time.monotonic() + _START_S
            while not _takes_jobs(head):
                assert ray.poll() is None and time.monotonic() < deadline, said.read_text()
                time.sleep(0.5)
            yield head
        finally:
            ray.terminate()  # ends what it started
            try:
                ray.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(ray.pid, signal.SIGKILL)
                ray.wait(10)


@contextlib.contextmanager
def ray_node(
    head: RayHead,
    num_cpus: int,
    labels: Mapping[str, str],
    settings: Mapping[str, str] | None = None,
    *,
    num_gpus: int = 0,
) -> Iterator[Callable[[], None]]:
    """One more node of its cluster, on this machine, which says that it has so many CPUs and GPUs and these labels; the
    value kills it with all that runs there. `settings` are further environment of its processes."""
    node = Node(head.address, NodeShape(num_cpus, labels, num_gpus), head.environment | dict(settings or {}))
    try:
        node.wait_until_joined(lambda: (known["labels"] for known in head.nodes()))
        yield node.kill
    finally:
        node.kill()


def _takes_jobs(head: RayHead) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{head.dashboard}/api/jobs/", headers=head.headers, timeout=120).is_success
    return False
