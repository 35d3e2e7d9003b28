"""From the setting to the transport; those that are part of the reply itself are here."""

import numpy as np

from serve_app.backends.base import Handoff
from serve_app.transport.base import HandoffTransport, TransferPayload
from speculative.errors import ConfigError

TRANSPORTS = ("plasma", "inline", "nixl")
MOST_BYTES = 3 * 2**20  # of a message; gRPC takes 4 MiB


class PlasmaTransport:
    """The handoff is part of the reply, which Ray keeps in shared memory and copies between nodes.

    The caller owns the reply, so a handoff outlives the replica that made it; what comes out is read-only.
    """

    def pack(self, handoff: Handoff) -> TransferPayload:
        """Return the array as it is: Ray takes its bytes without a copy of ours."""
        return TransferPayload(handoff, handoff.nbytes)

    async def unpack(self, payload: TransferPayload) -> Handoff:
        """The array, over the store's own memory."""
        content: Handoff = payload.content
        return content


class InlineTransport:
    """For small models and short prompts: no object is made. What is too long for that goes through Ray's store."""

    def pack(self, handoff: Handoff) -> TransferPayload:
        """A copy of the bytes, or the array where it is long."""
        return TransferPayload(handoff.tobytes() if handoff.nbytes <= MOST_BYTES else handoff, handoff.nbytes)

    async def unpack(self, payload: TransferPayload) -> Handoff:
        """The bytes as an array; read-only."""
        return np.frombuffer(payload.content, np.uint8)


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
