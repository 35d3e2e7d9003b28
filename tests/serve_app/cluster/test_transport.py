"""Handoffs travel byte for byte, and a way that is not there is refused with the fix."""

import pickle

import numpy as np
import pytest

from serve_app.cluster.transports import MOST_BYTES, make_transport
from speculative.errors import ConfigError


@pytest.mark.parametrize("name", ["plasma", "inline"])
@pytest.mark.parametrize("size", [1, 4097, 2**20])
async def test_what_goes_in_comes_out(name: str, size: int) -> None:
    transport = make_transport(name)
    handoff = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    payload = pickle.loads(pickle.dumps(transport.pack(handoff)))  # as a reply between processes
    arrived = await transport.unpack(payload)
    assert arrived.dtype == np.uint8
    assert np.array_equal(arrived, handoff)


async def test_what_is_too_long_for_a_message_goes_another_way() -> None:
    transport = make_transport("inline")
    assert isinstance(transport.pack(np.zeros(MOST_BYTES, np.uint8)), bytes)
    long = np.arange(MOST_BYTES + 1, dtype=np.uint8)
    payload = transport.pack(long)
    assert payload is long
    assert np.array_equal(await transport.unpack(payload), long)


def test_without_nixl_the_setting_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps nixl nixl-cu12, or set it to plasma"):
        make_transport("nixl")
