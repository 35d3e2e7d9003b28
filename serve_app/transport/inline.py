"""Inside the message itself."""

import numpy as np

from serve_app.backends.base import Handoff
from serve_app.transport.base import TransferPayload

MOST_BYTES = 3 * 2**20  # gRPC takes messages of 4 MiB


class InlineTransport:
    """For small models and short prompts: no object is made. What is too long for that goes through Ray's store."""

    def pack(self, handoff: Handoff) -> TransferPayload:
        """A copy of the bytes, or the array where it is long."""
        return TransferPayload(handoff.tobytes() if handoff.nbytes <= MOST_BYTES else handoff, handoff.nbytes)

    async def unpack(self, payload: TransferPayload) -> Handoff:
        """The bytes as an array; read-only."""
        return np.frombuffer(payload.content, np.uint8)
