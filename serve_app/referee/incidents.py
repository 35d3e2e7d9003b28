"""What was found wrong, when, and on which replica: trips and alarms, remembered after the replica is gone."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from serve_app.telemetry.metrics import Series
from speculative.stats import CLIENTS_FAULT

_KEPT = 40  # different ones

IncidentKind = Literal["trip", "canary", "selfcheck", "invariant", "logprobs", "replay", "independent"]

_COUNTERS: dict[str, IncidentKind] = {  # of a replica; their last label names the alarm
    "truespec_selfcheck_alarms_total": "selfcheck",
    "truespec_selfcheck_violations_total": "invariant",
    "truespec_logprob_violations_total": "logprobs",
}


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that was found wrong, once or again and again."""

    kind: IncidentKind
    name: str  # a trip's reason, a check, an invariant, a rule of logprobs, or what replays found
    replica: str
    first_at: float  # unix seconds
    at: float  # the last time
    num: float
    strata: tuple[str, ...] = ()  # in which replays found it
    suspect_since: float | None = None  # of a trip or a canary: answers that ended after this are suspect

    def to_wire(self) -> dict[str, Any]:
        """For the status page."""
        return dataclasses.asdict(self)


class IncidentLog:
    """The latest of them; what is found again is counted, so that one fault does not push out the others.

    Args:
        clock: unix seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, ...], Incident] = OrderedDict()  # the latest last

    def note(
        self,
        kind: IncidentKind,
        name: str,
        replica: str,
        *,
        num: float = 1,
        at: float | None = None,
        strata: tuple[str, ...] = (),
        suspect_since: float | None = None,
    ) -> None:
        """Something was found wrong; `at` = now."""
        key = (kind, name, replica)
        at = self._clock() if at is None else at
        first_at, before = at, self._known.pop(key, None)
        if before is not None:
            first_at, num = before.first_at, before.num + num
            strata = tuple(dict.fromkeys(before.strata + strata))
        self._known[key] = Incident(kind, name, replica, first_at, at, num, strata, suspect_since)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def count(self, replica: str, counters: Mapping[Series, float]) -> None:
        """Note the alarms among what a replica counted; what a client's own parameters break is none."""
        for (metric, labels), value in counters.items():
            kind = _COUNTERS.get(metric)
            if kind is not None and value > 0 and labels[-1] != CLIENTS_FAULT:
                self.note(kind, labels[-1], replica, num=value)

    def to_wire(self) -> list[dict[str, Any]]:
        """All that are kept, the latest first."""
        return [incident.to_wire() for incident in reversed(self._known.values())]
