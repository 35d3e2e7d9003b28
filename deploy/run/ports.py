"""The port of a service: whether it can listen at its configured address.

Ray Serve's proxy binds with SO_REUSEPORT, which lets ports be shared: a second service on the same port starts
silently, and clients reach one or the other. Binding without that option fails if anything listens there.
"""

import errno
import socket

from serve_app.config.serve_file import HttpOptions
from speculative.errors import ConfigError

_REASONS = {
    errno.EADDRINUSE: "is in use; stop what listens there (`ss -ltnp` shows it), or take another port (--port).",
    errno.EACCES: "is for root only; set a port from 1024 on.",
}


def url_of(http: HttpOptions) -> str:
    """Return where the proxy is reached from this machine."""
    host = f"[{http.host}]" if ":" in http.host else http.host
    return f"http://{host}:{http.port}"


def free_port(http: HttpOptions, port: int = 0, named: str = "http_options.") -> int:
    """Return a port that nobody listens on at this host: the given one, or with 0 any.

    Args:
        named: begins the names of the settings in a message, before `port` and `host`.

    Raises:
        ConfigError: the port is in use, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET  # as Serve's proxy chooses it
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an ended service do not count
            probe.bind((http.host, port))
            return int(probe.getsockname()[1])
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno in _REASONS and not isinstance(error, socket.gaierror):
            raise ConfigError(f"{named}port: {port} on {http.host} {_REASONS[error.errno]}") from error
        raise ConfigError(
            f"{named}host: {http.host} is not an address of this machine ({error}); set it to 127.0.0.1 to be "
            "reached from this machine only, or to 0.0.0.0 to be reached from others too."
        ) from error
