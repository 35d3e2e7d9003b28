"""A Ray head of its own with token auth, as a cluster has it, for what is submitted to one."""

import contextlib
import os
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.processes import children

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

    def submit(self, *command: str, token: bool = True) -> subprocess.CompletedProcess[str]:
        """`ray job submit -- COMMAND`, until the job has ended."""
        inside = self.environment if token else self.environment | {"RAY_AUTH_TOKEN": "another-token-0123456789"}
        submit = [f"{_SCRIPTS}/ray", "job", "submit", "--address", self.dashboard, "--", *command]
        return subprocess.run(submit, capture_output=True, text=True, check=False, env=inside, timeout=500)


@contextlib.contextmanager
def ray_head(
    num_cpus: int, labels: Mapping[str, str] | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[RayHead]:
    """Start a head on free ports, and end all of it with the block.

    Args:
        num_cpus: that it says it has.
        labels: of its node.
        settings: further environment of its processes.
    """
    gcs, dashboard, agent, metrics = free_ports(4)
    mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "PATH": f"{_SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | mine
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [f"{_SCRIPTS}/ray", "start", "--head", "--block", f"--num-cpus={num_cpus}", f"--port={gcs}"]
        command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
        command += [f"--metrics-export-port={metrics}", f"--temp-dir={folder}", "--include-dashboard=true"]
        if labels:
            command += ["--labels", ",".join(f"{key}={value}" for key, value in labels.items())]
        said = Path(folder, "ray-start.log")
        with said.open("wb") as log:
            ray = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=environment | {**(settings or {}), "RAY_raylet_start_wait_time_s": str(_START_S)},  # slow machines
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
    head: RayHead, num_cpus: int, labels: Mapping[str, str], *, num_gpus: int = 0
) -> Iterator[Callable[[], None]]:
    """One more node of its cluster, on this machine; the value kills it with all that runs there."""
    agent, metrics = free_ports(2)
    command = [f"{_SCRIPTS}/ray", "start", f"--address={head.address}", "--block", f"--num-cpus={num_cpus}"]
    command += [f"--num-gpus={num_gpus}", f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}"]
    command += ["--labels", ",".join(f"{key}={value}" for key, value in labels.items())]
    with tempfile.TemporaryFile("w+") as said:
        node = subprocess.Popen(command, stdout=said, stderr=said, env=head.environment, start_new_session=True)

        def joined() -> bool:
            return any(labels.items() <= known["labels"].items() for known in head.nodes())

        def output() -> str:
            said.seek(0)
            return said.read()

        def kill() -> None:
            for pid in [node.pid, *children(node.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        try:
            deadline = time.monotonic() + _START_S
            while not joined():
                assert node.poll() is None and time.monotonic() < deadline, output()
                time.sleep(0.5)
            yield kill
        finally:
            kill()
            node.wait(30)


def _takes_jobs(head: RayHead) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{head.dashboard}/api/jobs/", headers=head.headers, timeout=120).is_success
    return False


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
