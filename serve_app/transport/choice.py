"""From the setting to the transport."""

from serve_app.transport.base import HandoffTransport
from serve_app.transport.inline import InlineTransport
from serve_app.transport.plasma import PlasmaTransport


def make_transport(name: str) -> HandoffTransport:
    """The transport that `handoff.transport` names.

    Raises:
        ConfigError: what it needs is not installed.
    """
    if name == "nixl":
        from serve_app.transport.nixl import NixlTransport  # torch and NIXL only where they are wanted

        return NixlTransport()
    return InlineTransport() if name == "inline" else PlasmaTransport()
