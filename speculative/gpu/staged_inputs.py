"""A step's inputs: filled on the host, sent to static device buffers in one copy; and copies that the host waits for
later."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGNMENT = 16  # bytes
_NUM_HOST_BUFFERS = 2
_NUMPY = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}


@dataclass(frozen=True, slots=True)
class Field:
    """One input of a captured function, and what stands in it where there is nothing."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64
    padding: float = 0

    @property
    def num_bytes(self) -> int:
        """Unaligned."""
        return math.prod(self.shape) * self.dtype.itemsize


class StagedInputs:
    """Static device tensors, and the host arrays that are sent to them.

    The host has two pinned buffers in turn: one is filled while the copy of the other may still be under way.

    on_device: the tensors, by name; they never move.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        self._fields = dict(fields)
        self._places: dict[str, slice] = {}
        end = 0
        for name, field in self._fields.items():
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + field.num_bytes
            self._places[name] = slice(begin, end)
        on_cuda = device.type == "cuda"
        self._bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(end, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(_NUM_HOST_BUFFERS)]
        self._sent = [torch.cuda.Event() if on_cuda else None for _ in self._hosts]
        self._turn = 0
        self.on_device: dict[str, Tensor] = {
            name: self._bytes[place].view(self._fields[name].dtype).view(self._fields[name].shape)
            for name, place in self._places.items()
        }
        self.num_bytes = end
        self.next_host()
        self.send()

    def next_host(self) -> dict[str, Array]:
        """The host arrays of the next step, full of padding."""
        self._turn = (self._turn + 1) % len(self._hosts)
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()  # the copy of two steps ago: long done
        raw = self._hosts[self._turn].numpy()
        arrays: dict[str, Array] = {}
        for name, field in self._fields.items():
            array: Array = raw[self._places[name]].view(_NUMPY[field.dtype]).reshape(field.shape)
            array.fill(field.padding)
            arrays[name] = array
        return arrays

    def send(self) -> None:
        """Copy what was filled last to the device, in the order of the stream."""
        self._bytes.copy_(self._hosts[self._turn], non_blocking=True)
        event = self._sent[self._turn]
        if event is not None:
            event.record(torch.cuda.current_stream(self._bytes.device))


class LateCopy:
    """A static tensor's copy on the host, made in the order of the stream; the host waits for it when it needs it."""

    def __init__(self, tensor: Tensor) -> None:
        on_cuda = tensor.device.type == "cuda"
        self._tensor = tensor
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None

    def start(self) -> None:
        """Copy what the stream will have written so far."""
        self._host.copy_(self._tensor, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._tensor.device))

    def wait(self) -> Array:
        """What was copied last, until the next copy."""
        if self._copied is not None:
            self._copied.synchronize()
        copied: Array = self._host.numpy()
        return copied
