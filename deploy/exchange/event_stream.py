"""Server-sent events as they pass by, each as it came."""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_DATA = re.compile(rb"data: ?(?=\{)")

Change = Callable[[str], str | None]
"""From the JSON of an event to what replaces it; None leaves the event out."""


class EventEditor:
    """Changes the JSON of events, and leaves every other byte as it came."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._rest = b""

    def push(self, data: bytes) -> Iterator[bytes]:
        """Return what to pass on once these bytes have come: the first whole event as soon as it is there, then the
        others."""
        data = self._rest + data if self._rest else data
        ends = [found.end() for found in _END.finditer(data)]
        self._rest = data[ends[-1] :] if ends else data
        events = (self._event(data[start:end]) for start, end in pairwise([0, *ends]))
        yield next(events, b"")
        yield b"".join(events)

    def last(self) -> bytes:
        """Return what is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return self._event(rest) if rest else b""

    def _event(self, event: bytes) -> bytes:
        lines = event.splitlines(keepends=True)
        data = [place for place, line in enumerate(lines) if line.startswith(b"data:")]
        start = _DATA.match(lines[data[0]]) if len(data) == 1 else None
        if start is None:
            return event
        line = lines[data[0]]
        body = line[start.end() :].rstrip()
        try:
            changed = self._change(body.decode("utf-8"))
        except (ValueError, RecursionError):
            return event
        if changed is None:
            return b""
        lines[data[0]] = line[: start.end()] + changed.encode() + line[start.end() + len(body) :]
        return b"".join(lines)
