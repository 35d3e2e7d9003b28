"""Ports of this machine: which are free, and which processes have one open, as Linux's /proc lists sockets."""

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

LISTENING, ESTABLISHED = "0A", "01"  # states of sockets in /proc/net/tcp


def free_ports(number: int) -> list[int]:
    """Return different ports of this machine that nobody listens on now.

    They lie below the range from which systems take ports for outgoing connections (from 32768 on Linux) and above
    that of Ray's workers (up to 19999), and are chosen at random: another process is unlikely to take one in between.
    """
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == number:
            return found
    raise RuntimeError(f"{number} free ports were not found between 20000 and 32000 of this machine")


def pids_of_port(port: int, state: str) -> list[int]:
    """Processes that have a socket of this local port, at any address, in this state: one for each socket. Only those
    that may be inspected; none without /proc."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(table, port, state)}
    files = Path("/proc").glob("[0-9]*/fd/*") if inodes else ()
    return [int(file.parts[2]) for file in files if _target(file) in inodes]


def _inodes(table: str, port: int, state: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _target(link: Path) -> str:
    """Return the place that a link points to; none once its process has closed it, or where it is somebody else's."""
    try:
        return str(link.readlink())
    except OSError:
        return ""
