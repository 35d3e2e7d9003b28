"""One request to a watched server and its reply, as they went over the wire."""

import base64
import json
import math
from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, GENERATE = "/v1/responses", "/inference/v1/generate"
WATCHED_PATHS = (COMPLETIONS, CHAT)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that was answered with 200."""

    path: str  # of the URL, one of `WATCHED_PATHS`
    request: bytes  # the client's body, without what was added to it
    reply: bytes  # the body as the server sent it, with token ids and logprobs; of a stream its server-sent events
    streamed: bool
    began_at: float  # unix seconds
    ended_at: float  # unix seconds
    replica: str = ""  # that answered, where a header names it
    dialect: str = ""  # the server's; "" = unknown
    added: tuple[str, ...] = ()  # fields that the server was asked for beside what the client wanted

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON."""
        names = ("path", "streamed", "began_at", "ended_at", "replica", "dialect", "added")
        fields = {name: getattr(self, name) for name in names}
        return fields | {name: base64.b64encode(getattr(self, name)).decode("ascii") for name in ("request", "reply")}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> "Exchange":
        """From JSON. Raises ValueError, KeyError, TypeError: it is none."""
        if not (math.isfinite(wire["began_at"]) and math.isfinite(wire["ended_at"])):
            raise ValueError("a time is not finite")
        bodies = {name: base64.b64decode(wire[name]) for name in ("request", "reply")}
        return cls(**wire | bodies | {"added": tuple(wire["added"])})


@dataclass(frozen=True, slots=True)
class ExchangeBatch:
    """A message from a proxy to its referee: exchanges, and counts since the batch before, by result."""

    exchanges: tuple[Exchange, ...]
    counts: dict[str, int]

    def to_wire(self) -> bytes:
        """The body of `POST /v1/exchanges` on the referee."""
        return json.dumps({"exchanges": [one.to_wire() for one in self.exchanges], "counts": self.counts}).encode()

    @classmethod
    def from_wire(cls, body: bytes) -> "ExchangeBatch":
        """From such a body. Raises ValueError, KeyError, TypeError: it is none."""
        wire = json.loads(body)
        counts = {str(name): int(number) for name, number in wire["counts"].items()}
        if any(number < 0 for number in counts.values()):
            raise ValueError("a count is negative")
        return cls(tuple(map(Exchange.from_wire, wire["exchanges"])), counts)
