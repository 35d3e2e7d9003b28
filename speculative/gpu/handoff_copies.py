"""Handoffs beside a GPU's steps: rows between its caches and the host, piece by piece.

    leaving:  cache > (steps' stream) device piece > (own stream) pinned piece > (own thread) handoff, and its checksum
    arriving: handoff > (own thread) pinned piece > (own stream) device piece > (own stream) cache
    on the device: cache > (steps' stream) handoff, and its checksum (own thread and stream) > (own stream) cache

The engine's thread launches, and waits for no copy: rows that find no free piece are launched after a later step. What
a step has computed of a prompt leaves behind that step, so that it is copied and hashed while the next chunk is
computed. Rows are gathered in the order of the steps' stream: who gets their blocks next writes behind that. Arriving
rows are written behind all that the steps' stream was given until then, and read once the host has seen their end.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from speculative.config import EngineConfig
from speculative.gpu.device_handoff import DeviceExport, make_export
from speculative.gpu.memory import NUM_PIECES, PIECE_BYTES
from speculative.gpu.staged_inputs import send_once
from speculative.state.batch import Int64s
from speculative.state.handoff import Export
from speculative.state.kv_cache import KVCache
from speculative.state.sequence import Phase, Sequence

_LOOK_EVERY_S = 0.0005  # at copies, where nothing can be computed meanwhile

Shape = tuple[int, ...]
Read = Callable[[slice, Tensor], object]
"""Writes these of some rows into a tensor on the device."""


class Piece:
    """Memory that rows pass through: on the device, and pinned on the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        self.on_host = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.used = torch.cuda.Event(blocking=True)  # behind what was launched with it last

    def like(self, values: Tensor) -> Tensor:
        """Its memory on the device, in a tensor's shape and type."""
        return self.on_device[: values.nbytes].view(values.dtype).view(values.shape)


@dataclass(slots=True)
class _Leaving:
    """A handoff whose sequence is being computed, or held; of one stay in the cache."""

    admission: int
    export: Export
    num_sent: int = 0  # positions in the target's cache


class HandoffCopies:
    """The copies of an engine's handoffs; only the engine's thread calls it.

    Args:
        cache: of the target.
        caches_of: all caches whose rows a sequence's handoff has.
        new_export: room for a sequence's handoff.
        config: of the engine.
    """

    def __init__(
        self,
        cache: KVCache,
        caches_of: Callable[[Sequence], Mapping[str, KVCache]],
        new_export: Callable[[Sequence], Export],
        config: EngineConfig,
    ) -> None:
        self._cache, self._caches_of, self._new_export = cache, caches_of, new_export
        self._block_size, self._device = config.block_size, cache.data.device
        self.make_export = make_export if config.handoffs_on_device else Export
        self.stream = torch.cuda.Stream(self._device)
        self.worker = ThreadPoolExecutor(1, "truespec-handoffs")
        self.pieces = deque[Piece]()  # free once what was launched with them is done
        self._made: Future[None] | None = None
        self._leaving: dict[str, _Leaving] = {}

    def send(self, sequences: Iterable[Sequence]) -> None:
        """Begin to copy what these have computed since the last call, as far as pieces are free; each leaves as many as
        a held one before it needs to end."""
        spare = 0
        for sequence in sequences:
            name, num_computed = sequence.request.request_id, sequence.num_computed
            own = self._leaving.get(name)
            if own is None or own.admission != sequence.admission:
                own = self._leaving[name] = _Leaving(sequence.admission, self._new_export(sequence))
            if own.num_sent < num_computed:
                slots = sequence.slots(num_computed, self._block_size)[own.num_sent :]
                rows = self._rows(self._cache, slots)
                own.num_sent += self._send(own.export, *rows, spare=spare, of_target=True)
            spare = max(spare, self._num_needed(sequence) if sequence.phase is Phase.HELD else 0)

    def can_finish(self, sequence: Sequence) -> bool:
        """Return whether `finish` has nothing to wait for: rows are on their way, and pieces free for its drafter's."""
        needed, left = self._num_needed(sequence), self._has_left(sequence)
        return left and (not needed or sum(piece.used.query() for piece in tuple(self.pieces)) >= needed)

    @torch.inference_mode()
    def finish(self, sequence: Sequence, state: Mapping[str, Tensor]) -> Export:
        """The handoff of a held sequence, with its drafter's rows and state; what is not copied yet is left to it."""
        while not self._has_left(sequence):
            self.wait()
            self.send((sequence,))
        export = self._leaving[sequence.request.request_id].export
        slots = sequence.slots(sequence.num_computed, self._block_size)
        parts = [self._rows(cache, slots) for cache in self._drafters(sequence)]
        parts += [(tuple(rows.shape), partial(_read, rows)) for rows in state.values()]
        for shape, read in parts:
            sent = 0
            while (sent := sent + self._send(export, shape, read, sent)) < shape[0]:
                self.wait()
        if isinstance(export, DeviceExport):
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
            checked = self.worker.submit(export.check, self.stream, sequence.num_computed)
            export.left.append(partial(_raise, checked))
        return export

    def arrival(self) -> "ArrivingRows":
        """A handoff that is to be brought in."""
        return ArrivingRows(self)

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""
        self._leaving.pop(request_id, None)

    def wait(self) -> None:
        """Let copies get on, where nothing can be computed meanwhile."""
        time.sleep(_LOOK_EVERY_S)

    def take(self, spare: int = 0) -> Piece | None:
        """A piece that nothing uses; None = there is none at present beside those to spare. The first call has them
        made."""
        if self._made is None:
            self._made = self.worker.submit(self._make_pieces)
        if self._made.done():
            self._made.result()  # which raises where there was no memory
        return self.pieces.popleft() if len(self.pieces) > spare and self.pieces[0].used.query() else None

    @contextmanager
    def beside(self) -> Iterator[torch.cuda.Stream]:
        """Launch beside the steps, behind all that their stream was given until now."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            yield torch.cuda.current_stream(self._device)

    def _make_pieces(self) -> None:
        with torch.cuda.device(self._device):  # which pinned memory is of, too
            self.pieces.extend(Piece(self._device) for _ in range(NUM_PIECES))

    def _has_left(self, sequence: Sequence) -> bool:
        own = self._leaving.get(sequence.request.request_id)
        return own is not None and (own.admission, own.num_sent) == (sequence.admission, sequence.num_computed)

    def _num_needed(self, sequence: Sequence) -> int:
        """Pieces for the rows of its drafter, but for one that others get on with."""
        own, drafters = self._leaving.get(sequence.request.request_id), self._drafters(sequence)
        if not drafters or (own is not None and isinstance(own.export, DeviceExport)):
            return 0
        num_values = sequence.num_computed * sum(cache.shape.num_values for cache in drafters)
        return min(2 + num_values * self._cache.data.itemsize // PIECE_BYTES, NUM_PIECES - 1)

    def _drafters(self, sequence: Sequence) -> list[KVCache]:
        return [cache for cache in self._caches_of(sequence).values() if cache is not self._cache]

    def _rows(self, cache: KVCache, slots: Int64s) -> tuple[Shape, Read]:
        (there,) = send_once([slots], self._device)
        return (len(slots), *cache.shape.of_position), lambda rows, out: cache.read_all(there[rows], out)

    def _send(
        self, export: Export, shape: Shape, read: Read, begin: int = 0, *, spare: int = 0, of_target: bool = False
    ) -> int:
        """Copy rows from `begin` on into a handoff, as many as there are free pieces for; return how many."""
        if isinstance(export, DeviceExport):
            read(slice(shape[0]), export.place(shape))
            return shape[0]
        most = PIECE_BYTES // (math.prod(shape[1:]) * self._cache.data.itemsize)
        filled, end = list[tuple[Piece, Tensor]](), begin
        while end < shape[0] and (piece := self.take(spare)) is not None:
            rows = slice(end, min(end + most, shape[0]))
            values = export.place((rows.stop - end, *shape[1:]))
            read(rows, piece.like(values))
            filled.append((piece, values))
            end = rows.stop
        with self.beside() as stream:
            for piece, values in filled:
                piece.on_host[: values.nbytes].copy_(piece.on_device[: values.nbytes], non_blocking=True)
                piece.used.record(stream)
        for piece, values in filled:
            kept = self.worker.submit(self._keep, piece, export, values, of_target=of_target)
            export.left.append(partial(_raise, kept))
        return end - begin

    @torch.inference_mode()
    def _keep(self, piece: Piece, export: Export, values: Tensor, *, of_target: bool) -> None:
        """Put into a handoff what a piece brings."""
        try:
            piece.used.synchronize()
            _bytes(values).copy_(piece.on_host[: values.nbytes])
            export.take(values, of_target=of_target)
        finally:
            self.pieces.append(piece)


class _Filled(NamedTuple):
    """Rows that are copied into a piece, and the slots [N] of a cache that they are for."""

    copied: Future[Tensor]
    piece: Piece
    cache: KVCache
    slots: Tensor
    values: Tensor


class ArrivingRows:
    """Rows of a handoff on their way into an engine's caches: an `Arrival`."""

    def __init__(self, copies: HandoffCopies) -> None:
        self._copies = copies
        self._left = deque[tuple[KVCache, Tensor, Tensor]]()  # which have no piece yet
        self._filled = deque[_Filled]()
        self._slots: list[Tensor] = []  # which launched copies read
        self._written = torch.cuda.Event()
        self.is_lost = False

    def bring(self, cache: KVCache, slots: Int64s, values: Tensor) -> None:
        """Begin with more rows [N, num_layers, 2, num_kv_heads, head_dim] for slots [N] of a cache."""
        (there,) = send_once([slots], cache.data.device)
        self._slots.append(there)
        if values.is_cuda:
            with self._copies.beside() as stream:
                cache.write_all(there, values)
                self._written.record(stream)
            return
        most = PIECE_BYTES // (cache.shape.num_values * values.itemsize)
        self._left.extend((cache, *own) for own in zip(there.split(most), values.split(most), strict=True))
        self._fill()

    def proceed(self) -> bool:
        """Launch what lies in pieces, and fill others; return whether all rows were seen to lie in the caches."""
        ready = list[_Filled]()
        while self._filled and self._filled[0].copied.done() and not self.is_lost:
            self.is_lost = self._filled[0].copied.exception() is not None
            ready += [] if self.is_lost else [self._filled.popleft()]
        with self._copies.beside() as stream:
            for _, piece, cache, slots, values in ready:
                piece.on_device[: values.nbytes].copy_(piece.on_host[: values.nbytes], non_blocking=True)
                cache.write_all(slots, piece.like(values))
                piece.used.record(stream)
                self._written.record(stream)
                self._copies.pieces.append(piece)
        self._fill()
        return not (self._left or self._filled) and self._written.query()

    def cancel(self) -> None:
        """Launch nothing more; what steps launch from now on waits for what was."""
        self._left.clear()
        for one in self._filled:
            one.copied.cancel()
            one.copied.add_done_callback(partial(_give_back, self._copies.pieces, one.piece))
        self._filled.clear()
        torch.cuda.current_stream(self._copies.stream.device).wait_stream(self._copies.stream)

    def _fill(self) -> None:
        while self._left and (piece := self._copies.take()) is not None:
            cache, slots, values = self._left.popleft()
            copied = self._copies.worker.submit(piece.on_host[: values.nbytes].copy_, _bytes(values))
            self._filled.append(_Filled(copied, piece, cache, slots, values))


def _read(rows: Tensor, which: slice, out: Tensor) -> None:
    out.copy_(rows[which])


def _bytes(values: Tensor) -> Tensor:
    return values.reshape(-1).view(torch.uint8)


def _raise(future: Future[None], _: Export) -> None:
    future.result()


def _give_back(pieces: deque[Piece], piece: Piece, _: object) -> None:
    pieces.append(piece)
