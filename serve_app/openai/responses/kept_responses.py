"""Responses that are kept for later requests, bounded in memory and age."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


class KeptResponses(Protocol):
    """A store of responses. Each belongs to the key that it was made with; who has another one finds nothing."""

    async def put(self, response_id: str, owner: str, record: bytes) -> bool:
        """Keep a response; returns whether it is kept."""
        ...

    async def get(self, response_id: str, owner: str) -> bytes | None:
        """A response that is kept; None where there is none."""
        ...

    async def delete(self, response_id: str, owner: str) -> bool:
        """Forget a response; returns whether there was one."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    owner: str
    expires_at: float
    record: bytes


@dataclass(slots=True)
class ResponseStore:
    """Responses by their ids, in this process; the oldest go first (a `KeptResponses`)."""

    max_bytes: int  # of all of them together
    max_age_s: float  # how long each is kept
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    _entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    _num_bytes: int = 0

    async def put(self, response_id: str, owner: str, record: bytes) -> bool:
        """Keep a response; returns whether it is kept: one that is larger than all may be is not."""
        if len(record) > self.max_bytes:
            return False
        self._drop_old()
        self._drop(response_id)
        self._entries[response_id] = _Entry(owner, self.clock() + self.max_age_s, record)
        self._num_bytes += len(record)
        while self._num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
        return True

    async def get(self, response_id: str, owner: str) -> bytes | None:
        """A response that is kept; None where there is none."""
        self._drop_old()
        entry = self._entries.get(response_id)
        return None if entry is None or entry.owner != owner else entry.record

    async def delete(self, response_id: str, owner: str) -> bool:
        """Forget a response; returns whether there was one."""
        found = await self.get(response_id, owner) is not None
        if found:
            self._drop(response_id)
        return found

    def _drop_old(self) -> None:
        while self._entries and next(iter(self._entries.values())).expires_at <= self.clock():
            self._drop(next(iter(self._entries)))

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        self._num_bytes -= 0 if entry is None else len(entry.record)
