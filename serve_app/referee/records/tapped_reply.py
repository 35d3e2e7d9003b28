"""The bytes of one request and of its reply, kept while they pass, for the checks of what a client got.

They are kept in memory only, within bounds, and are in no log.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from serve_app.referee.records.replay_selection import Checks
from serve_app.referee.wire.exchange import Exchange

MOST_BYTES, MOST_BYTES_OF_ALL = 32 * 2**20, 256 * 2**20


@dataclass(slots=True)
class TappedBytes:
    """A count of the bytes that are kept in this process."""

    most: int = MOST_BYTES  # of one exchange
    most_of_all: int = MOST_BYTES_OF_ALL  # of all exchanges together
    num_bytes: int = 0

    def release(self, num_bytes: int) -> None:
        """Note that so many bytes are let go of."""
        self.num_bytes -= num_bytes

    def has_room(self, of_one: int, more: int) -> bool:
        """Return whether an exchange that has so many bytes may have more."""
        return of_one + more <= self.most and self.num_bytes + more <= self.most_of_all


@dataclass(slots=True)
class TappedReply:
    """One request on its way, and the reply to it."""

    path: str  # of the request
    checks: Checks  # what the whole exchange goes to, if the reply is one that they choose
    held: TappedBytes  # what its bytes are counted in
    _began_at: float = field(default_factory=time.time)
    _reply_id: str = ""
    _lost: str = ""  # why there are no bytes, as the metrics name it
    _num_bytes: int = 0
    _request: list[bytes] = field(default_factory=list)
    _reply: list[bytes] = field(default_factory=list)
    _preview: list[bytes] = field(default_factory=list)
    _status: int = 0
    _streamed: bool = False
    _whole: bool = False

    def choose(self, reply_id: str, *, awaited: bool) -> None:
        """Go on if this reply is checked, and else keep nothing. awaited: whether its client waits for a verdict."""
        if self.checks.expect(reply_id, awaited=awaited):
            self._reply_id = reply_id
        else:
            self._drop("not_chosen")

    def fail(self) -> None:
        """Note that the reply ends in an error, whatever its status."""
        self._drop("ended_early")

    def take_request(self, part: bytes) -> None:
        """Keep a part of the request."""
        self._keep(self._request, part)

    def begin_reply(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Note the head of the reply, which has gone out."""
        self._status = status
        kinds = [value for name, value in headers if name.lower() == b"content-type"]
        self._streamed = any(value.startswith(b"text/event-stream") for value in kinds)

    def take_reply(self, part: bytes, *, last: bool) -> None:
        """Keep a part of the reply, which has gone out."""
        self._keep(self._reply, part)
        self._whole = self._whole or last

    def preview(self, part: bytes) -> None:
        """Keep what is about to go out, for a verdict that goes out behind it."""
        self._keep(self._preview, part)

    def previewed(self, *, streamed: bool) -> Exchange | None:
        """Return the exchange as it is about to go out; None = there was no room for it."""
        return None if self._lost else self._exchange(self._preview, streamed=streamed)

    def close(self) -> None:
        """Hand the exchange over: nothing more comes of it."""
        if not (self._whole and self._status == 200):
            self._drop("ended_early")
        if not self._reply_id:
            self._drop("not_chosen")
        elif self._lost:
            self.checks.lost(self._reply_id, self._lost)
        else:
            exchange, num_bytes = self._exchange(self._reply, streamed=self._streamed), self._num_bytes
            self.held.num_bytes += num_bytes  # of the exchange, in the place of its parts
            self._drop("read")
            reading = self.checks.sent(self._reply_id, exchange)
            reading.add_done_callback(lambda _: self.held.release(num_bytes))

    def _exchange(self, reply: list[bytes], *, streamed: bool) -> Exchange:
        bodies = b"".join(self._request), b"".join(reply)
        return Exchange(self.path, *bodies, streamed, self._began_at, time.time())

    def _keep(self, parts: list[bytes], part: bytes) -> None:
        if self._lost:
            return
        if not self.held.has_room(self._num_bytes, len(part)):
            self._drop("too_large")
            return
        parts.append(bytes(part))  # the same object, unless it is one that may change
        self._num_bytes += len(part)
        self.held.num_bytes += len(part)

    def _drop(self, why: str) -> None:
        self._lost = self._lost or why
        for parts in (self._request, self._reply, self._preview):
            parts.clear()
        self.held.release(self._num_bytes)
        self._num_bytes = 0
