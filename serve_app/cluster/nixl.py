"""From memory to memory through NIXL (RDMA, or shared memory on one node), by Ray's direct transport."""

import asyncio
import importlib.util
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from serve_app.backends.base import Handoff
from speculative.errors import ConfigError


class NixlTransport:
    """The reply holds a reference only; the receiver reads the bytes out of the sender's memory.

    The sender owns what it sent: if it dies before the bytes are read, the prompt is computed again.

    Raises:
        ConfigError: NIXL is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("nixl") is None:
            raise ConfigError(
                "handoff.transport nixl needs NIXL: pip install --no-deps nixl nixl-cu12, or set it to plasma."
            )

    def pack(self, handoff: Handoff) -> Any:
        """Register the bytes with NIXL."""
        return [ray.put(torch.from_numpy(handoff), _tensor_transport="nixl")]

    async def unpack(self, payload: Any) -> Handoff:
        """Read them. Raises ConnectionError: the sender is gone."""
        try:
            tensor: torch.Tensor = await asyncio.to_thread(ray.get, payload[0])
        except RayError as error:
            raise ConnectionError(f"the handoff could not be read from its sender: {error}") from error
        return tensor.numpy()
