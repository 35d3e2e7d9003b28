"""What the handoff benchmark sends is a real handoff, and its receiver notices what is not."""

from typing import get_args

import numpy as np
import pytest
from click.testing import CliRunner

from serve_app.config.app_config import HandoffSection
from serve_app.transport.selection import TRANSPORTS, make_transport
from speculative.errors import ConfigError, HandoffRefused
from tools.bench import handoff
from tools.bench.handoff import HandoffSender, Receiver, synthetic_handoff


@pytest.mark.parametrize("transport", ["plasma", "inline"])
def test_it_arrives_checked_and_copied(transport: str) -> None:
    sender = HandoffSender(2**21)
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


@pytest.mark.parametrize(("names", "stranger"), [("foo", "foo"), ("plasma,inlin", "inlin"), ("", ""), ("plasma,", "")])
def test_an_unknown_transport_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, names: str, stranger: str
) -> None:
    monkeypatch.setattr(handoff.ray, "init", lambda **_: pytest.fail("Ray was started"))
    reported = CliRunner().invoke(handoff.main, ["--transports", names])
    assert reported.exit_code == 1
    assert f"--transports: there is no {stranger!r}, only plasma, inline, nixl." in reported.output
    with pytest.raises(ConfigError, match="There is no transport"):
        make_transport(stranger)


def test_the_transports_are_those_of_the_setting() -> None:
    assert get_args(HandoffSection.model_fields["transport"].annotation) == TRANSPORTS
