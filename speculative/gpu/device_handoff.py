"""Handoffs that stay on a device, to be read from there into the memory of another one.

What is on the host is in the wire format, with a checksum of the keys and values in their place.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from speculative.errors import HandoffRefused
from speculative.gpu.memory import room_on_device
from speculative.state.handoff import Blob, Export, Manifest

_SECTIONS_ROOM = 2**20  # bytes, with sections of a single position
_CHECKSUM_BYTES = 8
_WORDS_AT_ONCE = 2**21
_ODD = -0x61C8864680B583EB  # 2**64 / golden ratio


class DeviceExport(Export):
    """A handoff on its way out of an engine: its values to `memory`, some bytes on the device."""

    def __init__(self, manifest: Manifest, num_tokens: int, memory: Tensor) -> None:
        super().__init__(manifest, num_tokens, _CHECKSUM_BYTES)
        self._memory, self._num_filled = memory, 0
        self._dtype: torch.dtype = getattr(torch, manifest.dtype)

    def place(self, shape: Sequence[int]) -> Tensor:
        """The next values, to be filled in the order of the steps' stream."""
        values = self._memory[self._num_filled :].view(self._dtype)[: math.prod(shape)].view(*shape)
        self._num_filled += values.nbytes
        return values

    @torch.inference_mode()
    def check(self, stream: torch.cuda.Stream, num_computed: int) -> None:
        """Do what `take` does with all that was placed, on a stream that lies behind it; the host waits for that."""
        shape = self._manifest.kv_shape(num_computed)
        with torch.cuda.stream(stream):
            self.on_device = self._memory[: self._num_filled]
            values = self._memory.view(self._dtype)[: math.prod(shape)].view(shape)
            is_finite = values[-1:].isfinite().all() & values[:, -1].isfinite().all()
            found = checksum(self.on_device)
            self._is_finite = bool(is_finite)
        place = super().place((_CHECKSUM_BYTES // self._dtype.itemsize,))
        place.view(torch.int64).copy_(found)
        self.take(place, of_target=False)


def make_export(manifest: Manifest, num_tokens: int, num_bytes: int) -> Export:
    """Make room for a handoff: on the device where there is some, else on the host, as for one without any rows."""
    memory = room_on_device(num_bytes + _SECTIONS_ROOM) if num_tokens > 1 else None
    return Export(manifest, num_tokens, num_bytes) if memory is None else DeviceExport(manifest, num_tokens, memory)


@torch.inference_mode()
def checksum(values: Tensor) -> Tensor:
    """The sum [1], on the host, of bytes on any device as 16-bit words, each times an odd number of its place.

    It is made modulo 2**64 there, on the current stream; the host waits for it.
    """
    total, begin = torch.zeros(1, dtype=torch.int64, device=values.device), 0
    for part in values.view(torch.int16).split(_WORDS_AT_ONCE):
        mixed = torch.arange(begin, begin := begin + len(part), device=values.device) * _ODD
        total = total + (part * ((mixed ^ mixed >> 29) * _ODD | 1)).sum()
    found = torch.empty(1, dtype=torch.int64, pin_memory=values.is_cuda)
    found.copy_(total, non_blocking=values.is_cuda)
    if values.is_cuda:
        copied = torch.cuda.Event(blocking=True)
        copied.record(torch.cuda.current_stream(values.device))
        copied.synchronize()
    return found


def compared(values: Tensor, written: Blob) -> Tensor:
    """Return values that travelled apart from their checksum. Raises HandoffRefused: they are others."""
    if checksum(values).numpy().tobytes() != written.tobytes():
        raise HandoffRefused("damaged", "The handoff's keys and values are not those that were sent.")
    return values
