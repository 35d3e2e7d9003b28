"""The interface of a transport. None opens a handoff: its checksum goes with it, and the engine that takes it in checks
it."""

from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.backends.base import Handoff


@dataclass(frozen=True, slots=True)
class TransferPayload:
    """A handoff on its way, as part of a prefill replica's reply."""

    content: Any  # what only its transport understands
    num_bytes: int  # of the handoff


class HandoffTransport(Protocol):
    """One side packs, the other unpacks; both run in replicas of one application, with the same transport."""

    def pack(self, handoff: Handoff) -> TransferPayload:
        """Make a handoff ready to travel."""
        ...

    async def unpack(self, payload: TransferPayload) -> Handoff:
        """The handoff, byte for byte.

        Raises:
            ConnectionError: it did not arrive.
        """
        ...
