"""The port of a service: whether it can listen at its configured address.

Ray Serve's proxy binds with SO_REUSEPORT, which lets ports be shared: a second service on the same port starts
silently, and clients reach one or the other. Binding without that option fails if anything listens there.
"""

import contextlib
import errno
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx

from serve_app.config.serve_file import HttpOptions
from speculative.errors import ConfigError

_ASK_S = 2.0
LISTENING, ESTABLISHED = "0A", "01"  # states of sockets in /proc/net/tcp
_COMMAND_LENGTH = 100
_HOST, _PORT = "http_options.host", "http_options.port"


def url_of(http: HttpOptions) -> str:
    """Return where the proxy is reached from this machine."""
    host = f"[{http.host}]" if ":" in http.host else http.host
    return f"http://{host}:{http.port}"


def require_port(http: HttpOptions) -> None:
    """Make sure that a service can listen there, on the machine that this runs on.

    Raises:
        ConfigError: the port is in use, or the host is not this machine's.
    """
    _bind(http, http.port)


def free_port(http: HttpOptions) -> int:
    """A port that nobody listens on, at the same host.

    Raises:
        ConfigError: the host is not this machine's.
    """
    return _bind(http, 0)


def free_ports(number: int) -> list[int]:
    """Different ports of this machine that nobody listens on now.

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
    raise ConfigError(f"{number} free ports were not found between 20000 and 32000 of this machine")


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


def _bind(http: HttpOptions, port: int) -> int:
    """Bind and release; the port that was bound."""
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET  # as Serve's proxy chooses it
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended service do not count
            probe.bind((http.host, port))
            return int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:
        raise ConfigError(_fault(http, error)) from error


def _fault(http: HttpOptions, error: OSError | UnicodeError) -> str:
    number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
    if number == errno.EADDRINUSE:
        return (
            f"{_PORT}: {http.port} on {http.host} is taken by {_holder(http)}; stop it, or take another port, with "
            f"--port or {_PORT}."
        )
    if number == errno.EACCES:
        return f"{_PORT}: {http.port} may be taken by root only; take a port from 1024 on, with --port or {_PORT}."
    reason = error.strerror if isinstance(error, OSError) else error
    return (
        f"{_HOST}: {http.host} is not an address of this machine ({reason}); set it to 127.0.0.1 to be reached from "
        "this machine only, or to 0.0.0.0 to be reached from others too."
    )


def _holder(http: HttpOptions) -> str:
    """Return what listens there, as far as can be determined."""
    names = [name for name in (_service(http), *_processes(http.port)) if name is not None]
    return ", ".join(names) or "another program"


def _service(http: HttpOptions) -> str | None:
    """The service that answers, if it is one of ours; it may need a key, or be under a prefix."""
    asked = http.model_copy(update={"host": {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(http.host, http.host)})
    try:
        answer = httpx.get(f"{url_of(asked)}/v1/models", timeout=_ASK_S).json()
        card = answer["data"][0]
        return f"a truespec service that serves {card['id']}" if card["owned_by"] == "truespec" else None
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return None


def _processes(port: int) -> Iterator[str]:
    """Processes listening on the port that may be inspected; none without /proc."""
    for pid in dict.fromkeys(pids_of_port(port, LISTENING)):
        with contextlib.suppress(OSError):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            yield f"process {pid} ({command[:_COMMAND_LENGTH]})"
