"""Probes: a question to a server, what it needs, and its result."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from deploy.exchange.client import Attempt

FALSE_ALARMS = 1e-4
"""False-alarm rate of an audit of a correct server; split evenly over all statistical tests."""

_LONGEST_REQUEST = 600  # characters shown of a request's text


class ProbeVerdict(StrEnum):
    """Result of a probe."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    UNSUPPORTED = "not supported by this server"


class Need(StrEnum):
    """A requirement of a probe."""

    LOGPROBS = "logprobs"
    TOKEN_IDS = "token ids, in and out"
    PROMPT_LOGPROBS = "prompt_logprobs"
    METRICS = "/metrics of vLLM or truespec"
    REFERENCE = "the model's weights (--model)"
    BESIDE = "a second server without speculation (--beside), or one that accepts speculate = false"
    LIMIT = "a context length in /v1/models that is not too long for this budget"


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """A fault, with one request that shows it.

    faults: catalogue ids that it resembles, or a name if none fits.
    count: how often the probe saw it.
    """

    probe: str
    faults: tuple[str, ...]
    request: dict[str, Any]
    expected: str
    observed: str
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self) | {"request": shortened(self.request)}


@dataclass(slots=True)
class ProbeOutcome:
    """Result of one probe: verdict, reason, measured figures, and series [n] to plot."""

    probe: str
    asks: str
    verdict: ProbeVerdict
    reported: str
    findings: list[AuditFinding] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    num_requests: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self) | {"findings": [one.as_dict() for one in self.findings]}


class Stopped(Exception):
    """A probe cannot continue; `verdict` is its result."""

    def __init__(self, verdict: ProbeVerdict, reported: str) -> None:
        super().__init__(reported)
        self.verdict = verdict


class Trial:
    """One run of a probe, which reports to it. `delta`: the false-alarm rate of each of its tests."""

    def __init__(self, probe: "Probe", delta: float) -> None:
        self.probe = probe
        self.delta = delta
        self.figures: dict[str, float] = {}
        self.series: dict[str, list[float]] = {}
        self.num_cases = 0
        self.reported = ""
        self.unclear = ""
        self._found: dict[tuple[tuple[str, ...], str], AuditFinding] = {}

    def check(
        self, holds: bool, faults: tuple[str, ...], request: dict[str, Any], expected: str, observed: str
    ) -> bool:
        """Count a case, and record a finding if it does not hold."""
        self.num_cases += 1
        if not holds:
            self.found(faults, request, expected, observed)
        return holds

    def found(self, faults: tuple[str, ...], request: dict[str, Any], expected: str, observed: str) -> None:
        """Record a finding; of those of one kind the first is kept, and counted."""
        new = AuditFinding(self.probe.name, faults, request, expected, observed, count=0)
        first = self._found.get((faults, expected), new)
        self._found[faults, expected] = replace(first, count=first.count + 1)

    def answered(self, attempt: Attempt, faults: tuple[str, ...] = ()) -> bool:
        """Return whether a valid request was answered; a rejection is no fault, any other failure is.

        `faults` is what the failure resembles. By default, a server that fails while reporting logprobs may have none
        for a token (F10), or one that is not a number (F16) and cannot be sent.
        """
        if attempt.ok or attempt.refused:
            return attempt.ok
        failed_reporting = attempt.status is not None and attempt.body.get("logprobs") not in (None, False)
        faults = faults or (*(("F10", "F16") if failed_reporting else ()), "request fails")
        return self.check(False, faults, attempt.body, "an answer to a valid request", attempt.reported())

    def findings(self) -> list[AuditFinding]:
        """One finding of each kind, with how often it was seen."""
        return list(self._found.values())

    def outcome(self) -> ProbeOutcome:
        """The verdict."""
        found = self.findings()
        verdict = ProbeVerdict.FAILED if found else ProbeVerdict.INCONCLUSIVE if self.unclear else ProbeVerdict.PASSED
        if not found and not self.unclear and not self.num_cases:
            verdict, self.unclear = ProbeVerdict.INCONCLUSIVE, "nothing could be checked"
        reported = f"{found[0].observed}" if found else self.unclear or self.reported or f"{self.num_cases} cases"
        return ProbeOutcome(self.probe.name, self.probe.asks, verdict, reported, found, self.figures, self.series)


@dataclass(frozen=True, slots=True)
class Probe:
    """A question.

    asks: the question, in a sentence.
    needs: what it requires.
    tests: number of statistical tests, each of which gets an equal share of FALSE_ALARMS.
    """

    name: str
    asks: str
    run: Callable[[Any, Trial], None]
    needs: tuple[Need, ...]
    tests: int


PROBES: dict[str, Probe] = {}


def probe(name: str, asks: str, *needs: Need, tests: int = 0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a probe: a function of the lab and its trial."""

    def register(run: Callable[..., None]) -> Callable[..., None]:
        PROBES[name] = Probe(name, asks, run, needs, tests)
        return run

    return register


def delta_per_test() -> float:
    """The false-alarm rate of each statistical test."""
    return FALSE_ALARMS / max(sum(one.tests for one in PROBES.values()), 1)


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    """A request with long values truncated, for display."""

    def cut(value: Any) -> Any:
        if isinstance(value, list) and len(value) > 24:
            return [*value[:16], f"... {len(value)} in total"]
        return value[:_LONGEST_REQUEST] if isinstance(value, str) else value

    return {name: cut(value) for name, value in body.items()}
