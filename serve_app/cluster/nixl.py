"""From memory to memory through NIXL (RDMA, or shared memory on one node), by Ray's direct transport."""

import asyncio
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from serve_app.backends.base import Handoff
from speculative.errors import ConfigError

_HELD_S = 1.0  # after the sender has replied


class NixlTransport:
    """The reply holds a reference only; the receiver reads the bytes out of the sender's memory.

    The sender owns what it sent: if it dies before the bytes are read, the prompt is computed again. They are freed
    once nobody refers to the reply, whether it was read or not.

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
        reference = await asyncio.to_thread(ray.put, torch.from_numpy(handoff), _tensor_transport="nixl")
        # Until Ray surely knows the receiver: without it, Ray 2.60 freed one of some dozens before it was read.
        asyncio.get_running_loop().call_later(_HELD_S, id, reference)
        return [reference]

    async def unpack(self, payload: Any) -> Handoff:
        """Read them. Raises ConnectionError: the sender is gone."""
        (reference,) = payload
        try:
            tensor: torch.Tensor = await asyncio.get_running_loop().run_in_executor(self._reader, ray.get, reference)
        except RayError as error:
            raise ConnectionError(f"the handoff could not be read from its sender: {error}") from error
        finally:
            _forget(reference)
        return tensor.numpy()


def _forget(reference: "ray.ObjectRef[Any]") -> None:
    """Free what Ray keeps of a reference to another actor's memory, a kilobyte or more for each that was ever received
    (ray-project/ray#57962)."""
    manager = ray._private.worker.global_worker.rdt_manager
    with manager._lock:
        manager._managed_rdt_metadata.pop(reference.hex(), None)
