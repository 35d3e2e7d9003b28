"""Runs an audit: every probe in turn, even if the server fails meanwhile."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.exchange.dialect import Ask
from deploy.probes import contract, counters, lengths, parameters, replay, twins
from deploy.probes.lab import Lab
from deploy.probes.probes import (
    FALSE_ALARMS,
    PROBES,
    AuditFinding,
    Probe,
    ProbeOutcome,
    ProbeVerdict,
    Stopped,
    Trial,
    delta_per_test,
)
from deploy.reports.progress import View
from speculative.request import SamplingParams

_MODULES = (replay, twins, lengths, contract, parameters, counters)  # importing them registers their probes
_LAST = ("logprob contract", "nonsense", "own alarms", "top_k", "neighbours of scored ids")
"""Probes that inspect what the others gathered, or may kill the server."""


@dataclass(frozen=True, slots=True)
class Audit:
    """Result of an audit. `num_requests`: sent to the server; `facts`: what was audited, and how."""

    url: str
    facts: dict[str, Any]
    outcomes: tuple[ProbeOutcome, ...]
    num_requests: int
    seconds: float

    @property
    def findings(self) -> tuple[AuditFinding, ...]:
        """All of them."""
        return tuple(finding for outcome in self.outcomes for finding in outcome.findings)

    @property
    def faults(self) -> tuple[str, ...]:
        """Ids of the faults that the findings resemble."""
        return tuple(dict.fromkeys(fault for finding in self.findings for fault in finding.faults))

    def count(self, verdict: ProbeVerdict) -> int:
        """Number of probes with this verdict."""
        return sum(outcome.verdict is verdict for outcome in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return {
            "url": self.url,
            "facts": self.facts,
            "probes": [outcome.as_dict() for outcome in self.outcomes],
            "num_requests": self.num_requests,
            "seconds": self.seconds,
        }


def run_audit(
    lab: Lab, view: View | None = None, only: Sequence[str] = (), keep: Callable[[Audit], None] = lambda _: None
) -> Audit:
    """Run every probe that the server and the budget allow; Ctrl-C ends the audit and keeps the results so far.

    Args:
        lab: the server, and what it is compared with.
        view: shows which probe runs, and what was found so far; None = nothing does.
        only: names of probes; empty = all.
        keep: called with the results so far after every probe.
    """
    view, began = view or View(), time.monotonic()
    outcomes: list[ProbeOutcome] = []
    gone = ""

    def so_far() -> Audit:
        return Audit(lab.server.url, _facts(lab), tuple(outcomes), lab.server.num_requests, time.monotonic() - began)

    def note() -> str:
        failed = [one.probe for one in outcomes if one.findings]
        computed = f", {lab.num_computed} answers computed again" if lab.num_computed else ""
        return f"{lab.server.num_requests} requests sent{computed}; found so far: {', '.join(failed) or 'nothing'}"

    probes = _in_order(only)
    for number, probe in enumerate(probes, start=1):
        if gone:
            outcomes.append(ProbeOutcome(probe.name, probe.asks, ProbeVerdict.INCONCLUSIVE, gone))
            continue
        view.stage(f"probe {number} of {len(probes)}, {probe.name}", note)
        try:
            outcomes.append(_run(lab, probe))
        except KeyboardInterrupt:
            gone = "the audit was interrupted"
            outcomes.append(ProbeOutcome(probe.name, probe.asks, ProbeVerdict.INCONCLUSIVE, gone))
            continue
        if not _serves(lab, outcomes[-1]):
            _note_death(lab, outcomes[-1], f"it stopped answering during '{probe.name}'")
            gone = f"the server is down: {outcomes[-1].reported}"
        view.say(f"{probe.name}: {outcomes[-1].verdict} ({outcomes[-1].reported})")
        keep(so_far())
    return so_far()


def _in_order(only: Sequence[str]) -> list[Probe]:
    chosen = [PROBES[name] for name in PROBES if not only or name in only]
    modules = [module.__name__ for module in _MODULES]
    return sorted(
        chosen,
        key=lambda one: (_LAST.index(one.name) + 1 if one.name in _LAST else 0, modules.index(one.run.__module__)),
    )


def _run(lab: Lab, probe: Probe) -> ProbeOutcome:
    missing = [need for need in probe.needs if need in lab.missing]
    if missing:
        return ProbeOutcome(probe.name, probe.asks, ProbeVerdict.UNSUPPORTED, f"needs {'; '.join(missing)}")
    trial, began, sent = Trial(probe, delta_per_test()), time.monotonic(), lab.server.num_requests
    try:
        probe.run(lab, trial)
        outcome = trial.outcome()
    except Stopped as stopped:
        outcome = trial.outcome()
        if not outcome.findings:
            outcome.verdict, outcome.reported = stopped.verdict, str(stopped)
    return dataclasses.replace(outcome, num_requests=lab.server.num_requests - sent, seconds=time.monotonic() - began)


def _serves(lab: Lab, outcome: ProbeOutcome) -> bool:
    """Return whether the server is up; if requests failed, whether it still answers a plain one."""
    if not lab.server.alive():
        return False
    if not any("request fails" in finding.faults for finding in outcome.findings):
        return True
    plain = lab.dialect.body(Ask("The", SamplingParams(max_tokens=1, temperature=0)))
    return any(not (one := lab.server.post(plain)).error or one.refused for _ in range(2))


def _note_death(lab: Lab, outcome: ProbeOutcome, reported: str) -> None:
    request = outcome.findings[-1].request if outcome.findings else lab.server.last_failed
    outcome.findings.append(
        AuditFinding(outcome.probe, ("server dies",), request, "a server that keeps running", reported)
    )
    outcome.verdict, outcome.reported = ProbeVerdict.FAILED, reported


def _facts(lab: Lab) -> dict[str, Any]:
    compared = lab.reference is not None
    return {
        "model": lab.dialect.model,
        "max_model_len": lab.dialect.max_model_len,
        "can": lab.dialect.can.reported(),
        "compared with the weights": compared,
        "compared without speculation": lab.beside is not None or lab.dialect.can.switches_speculation,
        "logprobs": lab.mode if compared and "traffic" in lab.__dict__ else "unknown",
        "tolerance": lab.tolerance.to_wire() if "tolerance" in lab.__dict__ else None,
        "refused": lab.refused,
        "budget": lab.budget.name,
        "destructive": lab.destructive,
        "false alarms": FALSE_ALARMS,
        "tests": sum(probe.tests for probe in PROBES.values()),
    }
