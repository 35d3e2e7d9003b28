"""What the handoff benchmark sends is a real handoff, and its receiver notices what is not."""

import numpy as np
import pytest

from deploy.bench.handoff import Receiver, Sender, synthetic_handoff
from speculative.errors import HandoffRefused


@pytest.mark.parametrize("transport", ["plasma", "inline"])
def test_it_arrives_checked_and_copied(transport: str) -> None:
    sender = Sender(2**21)
    assert 0.9 * 2**21 < sender.size() < 1.1 * 2**21
    receiver = Receiver(sender.size())
    receiver.take(transport, sender.send(transport))
    cached = receiver._cache
    assert cached[: 2**20].any() and not np.array_equal(cached[: 2**19], cached[2**19 : 2**20])
    damaged = sender.send("plasma")
    damaged.content[len(damaged.content) // 2] ^= 1
    with pytest.raises(HandoffRefused, match="checksum"):
        receiver.take("plasma", damaged)


def test_it_is_as_long_as_asked_for() -> None:
    assert synthetic_handoff(300 * 2**10).nbytes < synthetic_handoff(900 * 2**10).nbytes
