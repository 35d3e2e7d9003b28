"""A step's inputs: filled on the host, sent to static device buffers in one copy; and copies that the host waits for
later."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    """One input of a captured function, and what stands in it where there is nothing.

    in_part: only its first rows are sent, as many as `send` is given; behind them lies what was sent before, or zeros.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64
    padding: float = 0
    in_part: bool = False

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
        places: dict[str, slice] = {}
        end = self._num_padded = self._begin_in_part = self._row_bytes = 0
        for name, field in sorted(fields.items(), key=lambda item: item[1].in_part):
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + field.num_bytes
            places[name] = slice(begin, end)
            if field.in_part:
                assert self._row_bytes == 0, "one field is sent in part"
                self._begin_in_part, self._row_bytes = begin, field.num_bytes // field.shape[0]
            else:
                self._num_padded = end
        on_cuda = device.type == "cuda"
        self._bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(end, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(_NUM_HOST_BUFFERS)]
        self._sent = [torch.cuda.Event() if on_cuda else None for _ in self._hosts]
        self._turn = 0
        self.on_device: dict[str, Tensor] = {
            name: self._bytes[place].view(fields[name].dtype).view(fields[name].shape) for name, place in places.items()
        }
        self._arrays: list[dict[str, Array]] = [
            {
                name: host.numpy()[place].view(_NUMPY[fields[name].dtype]).reshape(fields[name].shape)
                for name, place in places.items()
            }
            for host in self._hosts
        ]
        for name, field in fields.items():
            self._arrays[0][name].fill(0 if field.in_part else field.padding)
        self._padding = self._hosts[0].numpy()[: self._num_padded].copy()
        self.next_host()
        self.send()

    def next_host(self) -> dict[str, Array]:
        """The host arrays of the next step, full of padding, but for the field that is sent in part."""
        self._turn = (self._turn + 1) % len(self._hosts)
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()  # the copy of two steps ago: long done
        self._hosts[self._turn].numpy()[: self._num_padded] = self._padding
        return self._arrays[self._turn]

    def send(self, num_rows: int = 0) -> None:
        """Copy what was filled last to the device, in the order of the stream; `num_rows` of the field sent in part."""
        end = self._num_padded if not self._row_bytes else self._begin_in_part + num_rows * self._row_bytes
        self._bytes[:end].copy_(self._hosts[self._turn][:end], non_blocking=True)
        event = self._sent[self._turn]
        if event is not None:
            event.record(torch.cuda.current_stream(self._bytes.device))


def send_once(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Bring arrays of any sizes to a device in one copy, which the host does not wait for."""
    ends = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
    # torch keeps pinned memory, and gives it out again when its copies are done.
    host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    places = [slice(begin, begin + array.nbytes) for begin, array in zip(ends, arrays, strict=False)]
    for place, array in zip(places, arrays, strict=True):
        host.numpy()[place].view(array.dtype)[:] = array.reshape(-1)
    sent, types = host.to(device, non_blocking=True), [torch.from_numpy(array).dtype for array in arrays]
    return [
        sent[place].view(dtype).view(array.shape) for place, dtype, array in zip(places, types, arrays, strict=True)
    ]


def copy_late(tensor: Tensor) -> Callable[[], Array]:
    """Copy a tensor to the host, in the order of the stream; what is returned waits for the copy alone, and not for
    what the device was given after it."""
    host = tensor.to("cpu", non_blocking=True)  # into pinned memory, which torch keeps
    copied = torch.cuda.Event() if tensor.device.type == "cuda" else None
    if copied is not None:
        copied.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Array:
        if copied is not None:
            copied.synchronize()
        found: Array = host.numpy()
        return found

    return wait
