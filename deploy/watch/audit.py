"""`truespec watch audit`: probes of a server and ordinary traffic, every answer of which the referee judges."""

import asyncio
import itertools
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from deploy.exchange.client import Attempt, Client
from deploy.exchange.traffic import SETTINGS, Traffic, drive
from deploy.reports.progress import View
from deploy.run.replayers import ReplayerOptions
from deploy.watch.probes import limits, numbers, pairs
from deploy.watch.probes.desk import AT_ONCE, SEED, Desk
from deploy.watch.probes.trial import PROBES, Probe, ProbeFinding, ProbeOutcome, ProbeVerdict, Stopped, Trial
from deploy.watch.referee import Referee, RefereeOptions
from deploy.watch.run import running_referee
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.wire.exchange import Exchange
from serve_app.text.tokenizer import Tokenizer
from speculative.request import EXAMPLES

_MODULES = (pairs, limits, numbers)  # importing them registers their probes
_LAST = ("contract", "nonsense")  # which looks at all answers; which may kill a server
_JUDGED_AT_ONCE = 64
_OF_A_TRIP = "the replica tripped"  # an answer that is suspect because of others
_PENALTIES = {"frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2}
TRIED = (
    *SETTINGS,
    {"temperature": 0.0, **_PENALTIES},
    {"temperature": 1.0, "top_k": 8},
    {"temperature": 0.6, "top_p": 0.9, "seed": SEED},
    {"temperature": 0.0, "logit_bias": {"7": 4.0}, "min_tokens": 9},
    *({"temperature": 0.0, name: value} for name, value in EXAMPLES.items()),
)
"""Sampling parameters of the traffic, in turn; those that a server refuses are no finding."""

TRAFFIC = "traffic"
_TRAFFIC_ASKS = "Are ordinary answers, of many parameters at once, those of the model?"
NAMES = (TRAFFIC, *(name for name in PROBES if name not in _LAST), *_LAST)
"""Parts of an audit, in their order."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """The way in which a server is audited."""

    url: str
    served: str | None = None  # which of its models; None = the first
    api_key: str | None = None
    requests: int = 200  # of ordinary traffic
    only: Collection[str] = NAMES  # of `NAMES`
    publishing_s: float = 1.1  # the longest time between updates of its metrics


async def run_audit(
    options: AuditOptions, referee_options: RefereeOptions, replayer: ReplayerOptions, view: View | None = None
) -> dict[str, Any]:
    """Audit a server, and return the referee's report with `audit`: what came of each probe. Raises ServiceError: no
    server answers there."""
    view = view or View()
    tokenizer, edge_nats = Tokenizer.from_folder(replayer.folder), referee_options.tolerance.edge_nats
    outcomes: list[ProbeOutcome] = []
    with Client(options.url, options.api_key) as server:
        desk = await asyncio.to_thread(
            Desk, server, tokenizer, edge_nats, referee_options.dialect, options.served, options.publishing_s
        )
        view.stage("loading the model")
        async with running_referee(referee_options, replayer) as referee:
            interrupted, gone = False, ""
            names = [name for name in NAMES if name in options.only]
            try:
                for number, name in enumerate(names, start=1):
                    if gone:
                        asks = PROBES[name].asks if name in PROBES else _TRAFFIC_ASKS
                        outcomes.append(ProbeOutcome(name, asks, ProbeVerdict.UNCLEAR, gone))
                        continue
                    view.stage(f"{number} of {len(names)}, {name}", lambda: f"{server.num_requests} requests sent")
                    if name == TRAFFIC:
                        outcome = await _traffic(desk, options)
                    else:
                        outcome = await asyncio.to_thread(run_probe, desk, PROBES[name])
                    judged = await _judged(referee, desk.take_kept())
                    suspect = [one for one in judged if one.verdict is Verdict.SUSPECT]
                    suspect = [one for one in suspect if not one.reason.startswith(_OF_A_TRIP)]
                    if suspect:
                        seen = f"{len(suspect)} of {len(judged)} answers are suspect: {suspect[0].reason}"
                        expected = "answers that the referee computes again alike"
                        _add(outcome, ProbeFinding(expected, seen, {}, len(suspect)))
                    if not await asyncio.to_thread(server.alive):
                        gone = f"the server stopped answering during {name}"
                        _add(outcome, ProbeFinding("a server that keeps running", gone, server.last_failed))
                    outcomes.append(outcome)
                    view.say(f"{name}: {outcome.verdict} ({outcome.seen})")
            except asyncio.CancelledError:
                interrupted = True
            about = {
                "url": options.url,
                "requests": sum(one.requests for one in outcomes),
                "probes": list(map(asdict, outcomes)),
            }
            return referee.report() | {"audit": about, "interrupted": interrupted}


def run_probe(desk: Desk, probe: Probe) -> ProbeOutcome:
    """Run one probe, without the referee."""
    if probe.needs_ids and not desk.reports_ids:
        return ProbeOutcome(probe.name, probe.asks, ProbeVerdict.UNSUPPORTED, "the server reports no token ids")
    trial, sent = Trial(), desk.server.num_requests
    try:
        probe.run(desk, trial)
        verdict, seen = trial.verdict()
    except Stopped as stopped:
        verdict, seen = (stopped.verdict, str(stopped)) if not trial.findings else trial.verdict()
    return ProbeOutcome(probe.name, probe.asks, verdict, seen, trial.findings, desk.server.num_requests - sent)


async def _traffic(desk: Desk, options: AuditOptions) -> ProbeOutcome:
    """Ordinary requests of many kinds at once, streamed and not."""
    trial, refused, begun = Trial(), set[str](), itertools.count()

    def seen(attempt: Attempt) -> None:
        desk.keep(attempt)
        trial.num_cases += attempt.ok
        if not trial.answered(attempt) and attempt.refused:
            refused.add(attempt.error)

    prompts = [{"prompt": desk.body(desk.prompt(number))["prompt"], **desk.fields} for number in range(48)]
    traffic = Traffic(desk.model, prompts, TRIED, (16, 32, 64), AT_ONCE)
    await drive(options.url, traffic, lambda: next(begun) >= options.requests, options.api_key, seen)
    trial.seen = f"{trial.num_cases} answers" + (f"; refused: {', '.join(sorted(refused))}" if refused else "")
    return ProbeOutcome(TRAFFIC, _TRAFFIC_ASKS, *trial.verdict(), trial.findings, options.requests)


async def _judged(referee: Referee, exchanges: Iterable[Exchange]) -> list[Checked]:
    room = asyncio.Semaphore(_JUDGED_AT_ONCE)

    async def judge(exchange: Exchange) -> list[Checked]:
        async with room:
            return await referee.judge(exchange)

    return [checked for found in await asyncio.gather(*map(judge, exchanges)) for checked in found]


def _add(outcome: ProbeOutcome, finding: ProbeFinding) -> None:
    if not outcome.findings:
        outcome.seen = finding.in_words()
    outcome.findings.append(finding)
    outcome.verdict = ProbeVerdict.FAILED
