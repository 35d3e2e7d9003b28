"""The replicas of an application on this machine: their processes, their deaths, and what they hold."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray._private.worker import global_worker

from speculative.errors import TruespecError

_SETTLE_S = 0.2


class PoolNotWhole(TruespecError):
    """Replicas of a pool are missing, and did not come back in time."""


def replica_pids(app: str, deployment: str) -> list[int]:
    """Processes of a deployment's replicas on this machine, by the title that Ray gives them; of the cluster that this
    process is connected to, as others may run an application of the same name."""
    title = f"ray::ServeReplica:{app}:{deployment}".encode()
    session = global_worker.node.session_name.encode() if ray.is_initialized() else b""
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    titled = (pid for pid in pids if title in command_line(pid))
    return sorted(pid for pid in titled if session in command_line(_parent(pid)))


def command_line(pid: int) -> bytes:
    """Read the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    """The process that started another; 0 where that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("PPid:")), 0)


def num_nodes() -> int:
    """Nodes of the cluster that this process is connected to, as far as they live."""
    return sum(node["Alive"] for node in ray.nodes())


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """The contents of Ray's object store. Pinned objects stay; the others make room as soon as it is wanted."""

    num_pinned: int
    num_unpinned: int
    num_bytes: int  # of all of them

    @classmethod
    def read(cls) -> "ObjectStore":
        """Read its current size, on all nodes together."""
        stats = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
        pinned = stats.num_object_store_primary_copies
        return cls(pinned, max(0, stats.num_local_objects - pinned), stats.object_store_bytes_used)


class Killer:
    """Kills replicas of an application with SIGKILL, one at a time, and never the last one of a pool that lives.

    Every second time, the first included, it is the replica's whole node that dies, until so many nodes have died as
    were asked for.

    Args:
        app: the application's name.
        sizes: replicas of each deployment that may lose one; two at least.
        seed: of the choice among them.
        most_nodes: how often a whole node dies.
        replace_node_of: kills the node that a process is of, and starts another; None = no node can die.
    """

    def __init__(
        self,
        app: str,
        sizes: dict[str, int],
        seed: int,
        most_nodes: int = 0,
        replace_node_of: Callable[[int], None] | None = None,
    ) -> None:
        self._app = app
        self._sizes = sizes
        self._rng = random.Random(seed)
        self._most_nodes, self._replace_node_of = most_nodes, replace_node_of
        self.kills: dict[str, int] = dict.fromkeys(sizes, 0)
        self.nodes_killed = 0  # with the replica that was to die

    def strike(self) -> bool:
        """Kill a replica of some deployment that has all of its own; False where none has."""
        whole = [deployment for deployment in self._sizes if self._is_whole(deployment)]
        if whole:
            self.kill(self._rng.choice(whole))
        return bool(whole)

    def kill(self, deployment: str) -> None:
        """Kill a replica of this deployment, which has all of its own, and wait until its process is gone."""
        pid = self._rng.choice(replica_pids(self._app, deployment))
        replace, is_due = self._replace_node_of, sum(self.kills.values()) % 2 == 0
        if replace is not None and self.nodes_killed < self._most_nodes and is_due:
            replace(pid)
            self.nodes_killed += 1
        else:
            os.kill(pid, signal.SIGKILL)
        while pid in replica_pids(self._app, deployment):
            time.sleep(_SETTLE_S)
        self.kills[deployment] += 1

    def wait_until_whole(self, timeout_s: float = 300.0) -> None:
        """Wait until every deployment has all of its replicas. Raises PoolNotWhole: that took too long."""
        deadline = time.monotonic() + timeout_s
        while missing := [deployment for deployment in self._sizes if not self._is_whole(deployment)]:
            if time.monotonic() > deadline:
                raise PoolNotWhole(f"{', '.join(missing)}: replicas did not come back within {timeout_s:.0f} s.")
            time.sleep(_SETTLE_S)

    def _is_whole(self, deployment: str) -> bool:
        """Serve may take a moment to see a death, and a process is there before it serves: so both are asked."""
        size = self._sizes[deployment]
        status = serve.status().applications[self._app].deployments[deployment]
        running = sum(count for state, count in status.replica_states.items() if state == "RUNNING")
        return size > 1 and running == size == len(replica_pids(self._app, deployment))
