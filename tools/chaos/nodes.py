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
from deploy.run.processes import process_tree
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError, TruespecError
from tools.chaos.sockets import free_ports

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


def one_node_a_replica(file: ServeFile, *, router_on_head: bool = True) -> tuple[ServeFile, NodeShape, list[NodeShape]]:
    """Place each replica on a node of its own, as the chart does, and the controller on the head.

    Args:
        file: the configuration.
        router_on_head: the router is there as well, where it survives the death of a node; else on a node of the
            decoding pool, as in the chart.

    Returns:
        The configuration with these places, the head's shape, and those of the other nodes.

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
    head = NodeShape(0, {POOL_LABEL: _HEAD})
    if (router := args.router) is not None:
        place = {POOL_LABEL: _HEAD if router_on_head else args.decoding_pool}
        sections["router"] = router.model_copy(update={"label_selector": place})
        num_cpus = ceil(router.replicas * router.num_cpus)
        head, *nodes = (
            replace(node, num_cpus=node.num_cpus + num_cpus) if node.labels == place else node
            for node in (head, *nodes)
        )
    placed = args.model_copy(update={"pools": args.pools.model_copy(update=sections)})
    application = file.application.model_copy(update={"args": placed, "deployments": []})
    return file.model_copy(update={"applications": [application]}), head, nodes


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
        agent, self.metrics_port = free_ports(2)
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the node)
        arguments = [f"--address={address}", *_ports(agent, self.metrics_port), *named.arguments]
        self._process = _ray_start(arguments, self._output.fileno(), environment)

    @property
    def pids(self) -> list[int]:
        """All its processes."""
        return process_tree(self._process.pid)

    @property
    def ended(self) -> bool:
        """Return whether `ray start` has ended, as it does after any of Ray's own processes there."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End all of it with SIGKILL, if it has not ended yet."""
        if self._process.poll() is None:
            _kill(self.pids)
            self._process.wait(_END_S)
        self._output.close()

    def wait_until_joined(self, nodes: Callable[[], Iterable[Mapping[str, str]]]) -> None:
        """Wait until it is a node of the cluster. nodes: the labels of those that live. Raises NodeNotStarted: it has
        ended, or that took too long."""
        deadline = time.monotonic() + _START_S
        while not any(self._name.items() <= labels.items() for labels in nodes()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._output.seek(0)
                said = self._output.read().strip()[-500:] or "it said nothing"
                raise NodeNotStarted(f"A Ray node did not start: {said}")
            time.sleep(_LOOK_EVERY_S)


class HeadNode:
    """The head: its first start, and those after a death, at the same ports and with the same folder.

    Args:
        shape: what it says that it has.
        folder: of sockets and logs.
        environment: of its processes.
    """

    def __init__(self, shape: NodeShape, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = environment
        gcs, agent, self.metrics_port = free_ports(3)
        self._gcs = gcs
        self.address = f"127.0.0.1:{gcs}"
        self._output = folder / "ray-start.log"
        self._arguments = ["--head", f"--port={gcs}", f"--temp-dir={folder}", "--include-dashboard=false"]
        self._arguments += [*_ports(agent, self.metrics_port), *shape.arguments]
        self.start()

    @property
    def pids(self) -> list[int]:
        """All its processes."""
        return process_tree(self._process.pid)

    def start(self) -> None:
        """Begin to start it."""
        # A head that was killed: Ray takes the raylets of its nodes, on this machine too, for the head's own.
        self._output.with_name("ray_current_cluster").unlink(missing_ok=True)
        with self._output.open("wb") as log:
            self._process = _ray_start(self._arguments, log.fileno(), self._environment)

    def wait_until_it_listens(self) -> None:
        """Wait until nodes can join. Raises NodeNotStarted: it has ended, or that took too long."""
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._gcs), timeout=1).close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = self._output.read_text(errors="replace").strip()[-500:]
                raise NodeNotStarted(f"Ray's head did not start: {said}")
            time.sleep(_LOOK_EVERY_S)

    def kill(self) -> None:
        """End all of it with SIGKILL."""
        _kill(self.pids)
        self._process.wait(_END_S)

    def end(self) -> None:
        """End it in order."""
        pids = self.pids
        self._process.terminate()  # it ends what it has started, but for HAProxy
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        _kill(pids)
        self._process.wait()


class LocalCluster:
    """A head and its nodes, on this machine.

    Args:
        head: which has started.
        environment: of the nodes' processes.
    """

    def __init__(self, head: HeadNode, environment: Mapping[str, str]) -> None:
        self.head = head
        self.address = head.address
        self._environment = environment
        self.nodes: list[Node] = []

    def start(self, shapes: Sequence[NodeShape]) -> None:
        """Start nodes, one after the other: two that start at once can choose the same names for their sockets. Raises
        NodeNotStarted: one ended, or took too long."""
        with connected(self.address):
            for shape in shapes:
                node = Node(self.address, shape, self._environment)
                self.nodes.append(node)
                node.wait_until_joined(_labels)

    def replace_node_of(self, pid: int) -> None:
        """Kill the node that a process is of, and start another like it, as a cluster's autoscaler or kubelet would.
        Raises NodeNotStarted: the other one did not start."""
        self.begin_replacing(self.node_of(pid)).wait_until_joined(_labels)

    def node_of(self, pid: int) -> int:
        """The number of the node that a process is of."""
        (number,) = (number for number, node in enumerate(self.nodes) if pid in node.pids)
        return number

    def begin_replacing(self, number: int) -> Node:
        """Kill a node, and begin to start another like it."""
        self.nodes[number].kill()
        self.nodes[number] = Node(self.address, self.nodes[number].shape, self._environment)
        return self.nodes[number]

    def end(self) -> None:
        """End all nodes but the head."""
        for node in self.nodes:
            node.kill()


@contextlib.contextmanager
def local_cluster(
    head: NodeShape, shapes: Sequence[NodeShape], settings: Mapping[str, str] | None = None
) -> Iterator[LocalCluster]:
    """Start a cluster on this machine; it ends with the block.

    Args:
        head: shape of the head.
        shapes: those of the other nodes.
        settings: further environment of all of its processes.

    Raises:
        NodeNotStarted: a node did not start; the message has what Ray said.
    """
    interrupt_on_sigterm()  # else what has been started stays
    enable_token_auth_by_default()  # as for a cluster that `ray.init` starts: other users of this machine stay out
    ensure_token_if_auth_enabled()
    environment = {**os.environ, **ray_environment(), **(settings or {})}
    # A folder of its own: who starts Ray elsewhere is not led to this cluster. Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        started = HeadNode(head, Path(folder), environment)
        cluster = LocalCluster(started, environment)
        try:
            started.wait_until_it_listens()
            cluster.start(shapes)
            yield cluster
        finally:
            with uninterrupted():
                cluster.end()
                started.end()


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


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
