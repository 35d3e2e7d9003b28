"""From memory to memory through NIXL (RDMA, or shared memory on one node), by Ray's direct transport."""

import asyncio
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
import ray.experimental
import torch
from ray.exceptions import RayError

from serve_app.backends.base import DeviceHandoff, Handoff
from speculative.errors import ConfigError

_HELD_S = 1.0  # after the sender has replied


class NixlTransport:
    """The reply holds a reference only; the receiver reads the bytes out of the sender's memory.

    The sender owns what it sent: if it dies before the bytes are read, the prompt is computed again. They are freed
    once nobody refers to the reply, whether it was read or not. Those of a `DeviceHandoff` go from device to device, or
    to the host where the other one has no room.

    Raises:
        ConfigError: NIXL is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("nixl") is None:
            raise ConfigError(
                "handoff.transport nixl needs NIXL: pip install --no-deps nixl nixl-cu12, or set it to plasma."
            )
        # One read at a time: Ray 2.60 disconnects a sender whose registered memory has changed, whoever reads from it.
        self._reader = ThreadPoolExecutor(1, "truespec-nixl")

    async def pack(self, handoff: Handoff) -> Any:
        """Register the bytes with NIXL, beside the event loop: that takes time for each page."""
        values = torch.from_numpy(handoff) if isinstance(handoff, np.ndarray) else handoff.values
        if values.is_cuda:  # and whole: Ray would otherwise wait for all that the device was given
            ray.experimental.set_nixl_cuda_stream(torch.cuda.Stream(values.device))
        reference = await asyncio.to_thread(ray.put, values, _tensor_transport="nixl")
        # Until Ray surely knows the receiver: without it, Ray 2.60 freed one of some dozens before it was read.
        asyncio.get_running_loop().call_later(_HELD_S, id, reference)
        return [reference] if isinstance(handoff, np.ndarray) else [reference, values.nbytes, handoff.sealed]

    async def unpack(self, payload: Any) -> Handoff:
        """Read them. Raises ConnectionError: the sender is gone."""
        reference, *apart = payload
        try:
            tensor = await asyncio.get_running_loop().run_in_executor(self._reader, _read, reference, *apart[:1])
        except RayError as error:
            raise ConnectionError(f"the handoff could not be read from its sender: {error}") from error
        finally:
            _forget(reference)
        return DeviceHandoff(tensor, apart[1]) if apart else tensor.numpy()


def _read(reference: "ray.ObjectRef[Any]", num_bytes: int | None = None) -> torch.Tensor:
    """Read a tensor; `num_bytes`: of one that lies on a device."""
    if num_bytes is not None:
        from speculative.gpu.memory import room_on_device  # an engine on a CPU loads nothing of speculative.gpu

        room = room_on_device(num_bytes)
        if room is not None:
            torch.cuda.current_stream(room.device).synchronize()  # with what used the memory before
        to = torch.empty(num_bytes, dtype=torch.uint8) if room is None else room
        ray.experimental.set_target_for_ref(reference, [to])  # which Ray does not keep alive
    tensor: torch.Tensor = ray.get(reference)
    return tensor


def _forget(reference: "ray.ObjectRef[Any]") -> None:
    """Free what Ray keeps of a reference to another actor's memory, a kilobyte or more for each that was ever received
    (ray-project/ray#57962)."""
    manager = ray._private.worker.global_worker.rdt_manager
    with manager._lock:
        manager._managed_rdt_metadata.pop(reference.hex(), None)
