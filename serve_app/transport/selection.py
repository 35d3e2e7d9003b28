"""From the setting to the transport."""

from serve_app.transport.base import HandoffTransport
from serve_app.transport.inline import InlineTransport
from serve_app.transport.plasma import PlasmaTransport
from speculative.errors import ConfigError

TRANSPORTS = ("plasma", "inline", "nixl")


def make_transport(name: str) -> HandoffTransport:
    """The transport that `handoff.transport` names.

    Raises:
        ConfigError: there is none of that name, or what it needs is not installed.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"There is no transport {name!r}, only {', '.join(TRANSPORTS)}.")
    if name == "nixl":
        from serve_app.transport.nixl import NixlTransport  # torch and NIXL only where they are wanted

        return NixlTransport()
    return InlineTransport() if name == "inline" else PlasmaTransport()
