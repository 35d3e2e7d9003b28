"""A Ray cluster of several nodes on this machine, each of which can be killed whole and started again."""

import contextlib
import os
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import ray
from ray._private.authentication.authentication_token_setup import (
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
)

from deploy.run.cluster import connected, interrupt_on_sigterm, ray_environment, uninterrupted
from deploy.run.ports import free_ports
from deploy.run.processes import process_tree
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError, TruespecError

POOL_LABEL = "truespec-pool"
_NODE_LABEL = "truespec-node"
_HEAD = "head"
_RAY = Path(sysconfig.get_path("scripts"), "ray")
_START_S = 300.0  # on a machine that is busy with other things
_LOOK_EVERY_S = 0.2
PATIENT = {  # environment of `ray start` there: a raylet ends where its agents need longer than 30 s, and is not missed
    "RAY_raylet_start_wait_time_s": f"{_START_S:.0f}",
    "RAY_agent_register_timeout_ms": f"{1000 * _START_S:.0f}",
}
_END_S = 60.0


class NodeNotStarted(TruespecError):
    """A node of the cluster did not start; the message has what Ray said."""


@dataclass(frozen=True, slots=True)
class NodeShape:
    """The resources that a node says that it has."""

    num_cpus: int
    labels: Mapping[str, str]
    num_gpus: int = 0

    @property
    def arguments(self) -> list[str]:
        """Arguments of `ray start`."""
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        return [f"--num-cpus={self.num_cpus}", f"--num-gpus={self.num_gpus}", *(["--labels", labels] if labels else [])]


def one_node_a_replica(file: ServeFile) -> tuple[ServeFile, NodeShape, list[NodeShape]]:
    """The configuration with its replicas on nodes of their own, as the chart places them; the head's shape, which has
    the router and the controller; and those of the other nodes.

    Raises:
        ConfigError: a replica needs a GPU: the nodes of one machine would share it without knowing of each other.
    """
    args = file.application.effective_args
    sections: dict[str, object] = {}
    nodes = []
    for name in args.pool_names:
        pool = args.pool(name)
        if pool.num_gpus:
            raise ConfigError(
                f"applications[0].args.pools.{name}.num_gpus is {pool.num_gpus:g}: nodes that share this machine "
                "cannot share its GPUs; set it to 0, or kill no nodes (--kill-nodes 0)."
            )
        labels, num_cpus = {POOL_LABEL: name}, max(1, ceil(pool.num_cpus))  # a node has room for one
        sections[name] = pool.model_copy(update={"label_selector": labels, "num_cpus": num_cpus})
        nodes += [NodeShape(num_cpus, labels)] * pool.most_replicas
    router, head_cpus = args.router, 0
    if router is not None:
        sections["router"] = router.model_copy(update={"label_selector": {POOL_LABEL: _HEAD}})
        head_cpus = ceil(router.replicas * router.num_cpus)
    placed = args.model_copy(update={"pools": args.pools.model_copy(update=sections)})
    application = file.application.model_copy(update={"args": placed, "deployments": []})
    return (
        file.model_copy(update={"applications": [application]}),
        NodeShape(head_cpus, {POOL_LABEL: _HEAD}),
        nodes,
    )


class Node:
    """One node beside the head: `ray start --block` and all that it starts.

    Args:
        address: of the cluster, host:port.
        shape: what it says that it has.
        environment: of its processes.
    """

    def __init__(self, address: str, shape: NodeShape, environment: Mapping[str, str]) -> None:
        self.shape = shape
        self._name = {_NODE_LABEL: uuid.uuid4().hex}
        named = replace(shape, labels={**shape.labels, **self._name})
        agent, metrics = free_ports(2)
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the node)
        self._process = _ray_start(
            [f"--address={address}", *_ports(agent, metrics), *named.arguments], self._output.fileno(), environment
        )

    @property
    def pids(self) -> list[int]:
        """All its processes."""
        return process_tree(self._process.pid)

    def kill(self) -> None:
        """End all of it with SIGKILL, if it has not ended yet."""
        if self._process.poll() is None:
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(_END_S)
        self._output.close()

    def wait_until_joined(self, nodes: Callable[[], Iterable[Mapping[str, str]]]) -> None:
        """Wait until it is a node of the cluster.

        Args:
            nodes: the labels of those that live.

        Raises:
            NodeNotStarted: it has ended, or that took too long.
        """
        deadline = time.monotonic() + _START_S
        while not any(self._name.items() <= labels.items() for labels in nodes()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._output.seek(0)
                said = self._output.read().strip()[-500:] or "it said nothing"
                raise NodeNotStarted(f"A Ray node did not start: {said}")
            time.sleep(_LOOK_EVERY_S)


class LocalCluster:
    """A head and its nodes, on this machine.

    Args:
        address: of the head, host:port.
        environment: of the nodes' processes.
    """

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self.address = address
        self._environment = environment
        self._nodes: list[Node] = []

    def start(self, shapes: Sequence[NodeShape]) -> None:
        """Start nodes, one after the other: two that start at once can choose the same names for their sockets.

        Raises:
            NodeNotStarted: one ended, or took too long.
        """
        with connected(self.address):
            for shape in shapes:
                node = Node(self.address, shape, self._environment)
                self._nodes.append(node)
                node.wait_until_joined(_labels)

    def replace_node_of(self, pid: int) -> None:
        """Kill the node that a process is of, and start another like it, as a cluster's autoscaler or kubelet would.

        Raises:
            NodeNotStarted: the other one did not start.
        """
        (number,) = (number for number, node in enumerate(self._nodes) if pid in node.pids)
        self._nodes[number].kill()
        self._nodes[number] = Node(self.address, self._nodes[number].shape, self._environment)
        self._nodes[number].wait_until_joined(_labels)

    def end(self) -> None:
        """End all nodes but the head."""
        for node in self._nodes:
            node.kill()


@contextlib.contextmanager
def local_cluster(head: NodeShape, shapes: Sequence[NodeShape]) -> Iterator[LocalCluster]:
    """Start a cluster on this machine; it ends with the block.

    Raises:
        NodeNotStarted: a node did not start; the message has what Ray said.
    """
    interrupt_on_sigterm()  # else what has been started stays
    enable_token_auth_by_default()  # as for a cluster that `ray.init` starts: other users of this machine stay out
    ensure_token_if_auth_enabled()
    environment = {**os.environ, **ray_environment()}
    # A folder of its own: who starts Ray elsewhere is not led to this cluster. Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        gcs, agent, metrics = free_ports(3)
        arguments = ["--head", f"--port={gcs}", f"--temp-dir={folder}", "--include-dashboard=false"]
        output = Path(folder, "ray-start.log")
        with output.open("wb") as log:
            process = _ray_start([*arguments, *_ports(agent, metrics), *head.arguments], log.fileno(), environment)
        cluster = LocalCluster(f"127.0.0.1:{gcs}", environment)
        try:
            _wait_until_it_listens(process, gcs, output)
            cluster.start(shapes)
            yield cluster
        finally:
            with uninterrupted():
                cluster.end()
                process.terminate()  # it ends what it has started
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
                process.kill()
                process.wait()


def _labels() -> Iterator[Mapping[str, str]]:
    """Return the labels of the live nodes of the cluster that this process is connected to."""
    return (node["Labels"] for node in ray.nodes() if node["Alive"])


def _ports(agent: int, metrics: int) -> list[str]:
    """Return options for the ports that nodes of one machine would otherwise all want."""
    return [f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}"]


def _ray_start(arguments: Sequence[str], output: int, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    inside = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [str(_RAY), "start", "--block", "--disable-usage-stats", *arguments],
        stdout=output,
        stderr=output,
        env=inside | PATIENT,
        start_new_session=True,  # an interrupt at the terminal is for us, who end it in order
    )


def _wait_until_it_listens(process: "subprocess.Popen[bytes]", port: int, output: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise NodeNotStarted(f"Ray's head did not start: {output.read_text(errors='replace').strip()[-500:]}")
        time.sleep(_LOOK_EVERY_S)
