"""From the setting to the transport. None opens a handoff: its checksum goes with it, and the engine that takes it in
checks it."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from serve_app.backends.base import Handoff

MOST_BYTES = 3 * 2**20  # of a message; gRPC takes 4 MiB


class HandoffTransport(Protocol):
    """One side packs, the other unpacks; both run in replicas of one application, with the same transport."""

    async def pack(self, handoff: Handoff) -> Any:
        """Make a handoff ready to travel as part of a prefill replica's reply; only the same transport understands
        it."""

    async def unpack(self, payload: Any) -> Handoff:
        """The handoff, byte for byte. Raises ConnectionError: it did not arrive."""


@dataclass(frozen=True, slots=True)
class ReplyTransport:
    """The handoff is part of the reply. An array in it Ray keeps in shared memory, without a copy of ours, and copies
    between nodes; the caller owns the reply, so a handoff outlives the replica that made it. What comes out is
    read-only."""

    most_inline: int = 0  # bytes of a handoff that goes in the message itself, so that no object is made; 0 = none does

    async def pack(self, handoff: Handoff) -> Any:
        """A copy of the bytes, or the array where it is long."""
        assert isinstance(handoff, np.ndarray)
        return handoff.tobytes() if handoff.nbytes <= self.most_inline else handoff

    async def unpack(self, payload: Any) -> Handoff:
        """The bytes as an array, over the store's own memory if they lie there."""
        return np.frombuffer(payload, np.uint8)


def make_transport(name: str) -> HandoffTransport:
    """The transport that `handoff.transport` names. Raises ConfigError: what it needs is not installed."""
    if name == "nixl":
        from serve_app.cluster.nixl import NixlTransport  # torch and NIXL only where they are wanted

        return NixlTransport()
    return ReplyTransport(MOST_BYTES if name == "inline" else 0)
