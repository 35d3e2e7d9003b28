"""Incidents: trips and alarms by time and replica, remembered after the replica is gone."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from serve_app.referee.judge.detectors import Alarm
from serve_app.referee.judge.drift import Side

_KEPT = 40  # different ones

IncidentKind = Literal["trip", "canary", "selfcheck", "invariant", "logprobs", "replay", "independent"]


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
    doubtful_since: float | None = None  # answers that ended after this and are not verified may be wrong
    side: Side = ""  # to which replays found a mean shifted; "" = to both, or to none


@dataclass(slots=True)
class IncidentLog:
    """The latest of them; what is found again is counted, so that one fault does not push out the others."""

    clock: Callable[[], float]  # unix seconds
    doubtful_since: Callable[[str], float | None]  # of a replica
    _known: OrderedDict[tuple[str, ...], Incident] = field(default_factory=OrderedDict)  # the latest last

    def note(
        self,
        kind: IncidentKind,
        name: str,
        replica: str,
        *,
        num: float = 1,
        at: float | None = None,
        alarm: Alarm | None = None,
        suspect_since: float | None = None,
    ) -> None:
        """Something was found wrong, by an alarm of replays or otherwise; `at` = now."""
        key = (kind, name, replica)
        at = self.clock() if at is None else at
        first_at, before = at, self._known.pop(key, None)
        strata: tuple[str, ...] = () if alarm is None else (alarm.stratum,)
        side: Side = "" if alarm is None else alarm.side
        sound = None if kind == "independent" else self.doubtful_since(replica)  # the cause is no replica's
        doubtful_since = min((one for one in (sound, suspect_since) if one is not None), default=None)
        if before is not None:
            first_at, num, doubtful_since = before.first_at, before.num + num, before.doubtful_since
            strata = tuple(dict.fromkeys(before.strata + strata))
            side = side if side == before.side else ""
        since = suspect_since, doubtful_since
        self._known[key] = Incident(kind, name, replica, first_at, at, num, strata, *since, side)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def to_wire(self) -> list[dict[str, Any]]:
        """Return all kept incidents, the latest first."""
        return [dataclasses.asdict(incident) for incident in reversed(self._known.values())]
