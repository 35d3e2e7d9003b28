"""Probes: a question to a server, and what came of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from deploy.exchange.client import Attempt
from serve_app.referee.wire.reply import Json


class ProbeVerdict(StrEnum):
    """Result of a probe."""

    PASSED = "passed"
    FAILED = "failed"
    UNCLEAR = "unclear"
    UNSUPPORTED = "not supported"


@dataclass(slots=True)
class ProbeFinding:
    """A fault, with the first request that showed it, and how often it was seen."""

    expected: str
    observed: str
    request: Json
    count: int = 1

    def in_words(self) -> str:
        """Return it as part of a sentence."""
        return f"expected {self.expected}; {self.observed}"


@dataclass(slots=True)
class ProbeOutcome:
    """Result of a probe."""

    probe: str
    asks: str
    verdict: ProbeVerdict
    seen: str  # what came of it, in a few words
    findings: list[ProbeFinding] = field(default_factory=list)
    requests: int = 0  # sent for it


class Stopped(Exception):
    """A probe cannot go on: `verdict` is its result, and the message says why."""

    def __init__(self, verdict: ProbeVerdict, seen: str) -> None:
        super().__init__(seen)
        self.verdict = verdict


class Trial:
    """One run of a probe, which reports to it."""

    def __init__(self) -> None:
        self.num_cases = 0
        self.seen = ""
        self._found: dict[str, ProbeFinding] = {}

    @property
    def findings(self) -> list[ProbeFinding]:
        """One of each kind."""
        return list(self._found.values())

    def check(self, holds: bool, request: Json, expected: str, observed: str) -> bool:
        """Count a case, and record a finding if it does not hold; of each kind the first is kept, and counted."""
        self.num_cases += 1
        if not holds and expected in self._found:
            self._found[expected].count += 1
        elif not holds:
            self._found[expected] = ProbeFinding(expected, observed, request)
        return holds

    def answered(self, attempt: Attempt) -> bool:
        """Return whether a valid request was answered; that it is refused is no fault, any other failure is."""
        if attempt.ok or attempt.refused:
            return attempt.ok
        return self.check(False, attempt.body, "an answer to a valid request", attempt.reported())

    def verdict(self) -> tuple[ProbeVerdict, str]:
        """Return the result, and what was seen."""
        if self._found:
            return ProbeVerdict.FAILED, self.findings[0].in_words()
        if not self.num_cases:
            return ProbeVerdict.UNCLEAR, self.seen or "nothing could be checked"
        return ProbeVerdict.PASSED, self.seen or f"{self.num_cases} cases"


@dataclass(frozen=True, slots=True)
class Probe:
    """A question."""

    name: str
    asks: str  # in a sentence
    run: Callable[[Any, Trial], None]
    needs_ids: bool  # whether it compares token ids, which some servers do not report


PROBES: dict[str, Probe] = {}


def probe(name: str, asks: str, *, needs_ids: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a probe: a function of the desk and its trial."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        PROBES[name] = Probe(name, asks, run, needs_ids)
        return run

    return register
