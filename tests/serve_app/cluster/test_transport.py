"""Handoffs travel byte for byte, and a way that is not there is refused with the fix."""

import asyncio
import pickle
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import ray.experimental
import torch
from ray.exceptions import RayDirectTransportError

from serve_app.backends.base import DeviceHandoff
from serve_app.cluster.transports import MOST_BYTES, make_transport
from speculative.errors import ConfigError


@pytest.mark.parametrize("name", ["plasma", "inline"])
@pytest.mark.parametrize("size", [1, 4097, 2**20])
async def test_what_goes_in_comes_out(name: str, size: int) -> None:
    transport = make_transport(name)
    handoff = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    payload = pickle.loads(pickle.dumps(await transport.pack(handoff)))  # as a reply between processes
    arrived = await transport.unpack(payload)
    assert arrived.dtype == np.uint8
    assert np.array_equal(arrived, handoff)


async def test_what_is_too_long_for_a_message_goes_another_way() -> None:
    transport = make_transport("inline")
    assert isinstance(await transport.pack(np.zeros(MOST_BYTES, np.uint8)), bytes)
    long = np.arange(MOST_BYTES + 1, dtype=np.uint8)
    payload = await transport.pack(long)
    assert payload is long
    assert np.array_equal(await transport.unpack(payload), long)


def test_without_nixl_the_setting_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps nixl nixl-cu12, or set it to plasma"):
        make_transport("nixl")


async def test_nixl_reads_one_handoff_at_a_time_and_keeps_nothing_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads side by side break each other off in Ray 2.60, and what it knows of a sender's memory it never frees."""
    stored, reading = dict[str, Any](), threading.Lock()
    known = ray._private.worker.global_worker.rdt_manager._managed_rdt_metadata

    def put(tensor: Any, _tensor_transport: str) -> Any:
        name = str(len(stored))
        stored[name], known[name] = tensor, None
        return SimpleNamespace(hex=lambda: name)

    def get(reference: Any) -> Any:
        assert reading.acquire(blocking=False), "two at once"
        time.sleep(0.01)
        reading.release()
        if reference.hex() == "7":
            raise RayDirectTransportError("the sender is gone")
        return stored[reference.hex()]

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", get)
    transport = make_transport("nixl")
    handoffs = [np.full(index + 1, index, np.uint8) for index in range(8)]
    payloads = [await transport.pack(handoff) for handoff in handoffs]
    *arrived, lost = await asyncio.gather(*map(transport.unpack, payloads), return_exceptions=True)
    assert isinstance(lost, ConnectionError), "a prompt that is computed again"
    assert all(map(np.array_equal, arrived, handoffs)) and not known


@pytest.mark.parametrize("has_room", [True, False])
async def test_nixl_reads_from_a_device_into_the_memory_that_there_is(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    references, waited, streams = list[Any](), list[Any](), list[str]()
    rooms = {8: torch.zeros(8, dtype=torch.uint8), 9: torch.zeros(9, dtype=torch.uint8)}

    def put(tensor: torch.Tensor, _tensor_transport: str) -> Any:
        references.append(SimpleNamespace(hex=lambda: "", tensor=tensor, to=None))
        return references[-1]

    def get(reference: Any) -> torch.Tensor:
        (to,) = [target() for target in reference.to]
        assert to is not None, "nobody kept the memory"
        if len(to) == 9:
            raise RayDirectTransportError("the sender is gone")
        return to.copy_(reference.tensor)  # type: ignore[no-any-return]

    def set_target(reference: Any, to: list[torch.Tensor]) -> None:
        reference.to = [weakref.ref(one) for one in to]

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray.experimental, "set_target_for_ref", set_target)
    monkeypatch.setattr("speculative.gpu.memory.room_on_device", lambda size: rooms[size] if has_room else None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: waited.append(1)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(ray.experimental, "set_nixl_cuda_stream", streams.append)
    transport = make_transport("nixl")
    on_gpu: Any = SimpleNamespace(is_cuda=True, device="cuda:1", nbytes=8)
    await transport.pack(DeviceHandoff(on_gpu, np.zeros(1, np.uint8)))
    assert streams == ["a stream of cuda:1"], "steps are not waited for"
    sent = DeviceHandoff(torch.arange(8, dtype=torch.uint8), np.array([1, 2, 3], np.uint8))
    arrived = await transport.unpack(await transport.pack(sent))
    assert isinstance(arrived, DeviceHandoff) and arrived.nbytes == 11
    assert torch.equal(arrived.values, sent.values) and np.array_equal(arrived.sealed, sent.sealed)
    assert (arrived.values is rooms[8]) == has_room == bool(waited), "read before what used the memory has ended"
    with pytest.raises(ConnectionError, match="the sender is gone"):
        await transport.unpack(await transport.pack(DeviceHandoff(torch.ones(9, dtype=torch.uint8), sent.sealed)))
