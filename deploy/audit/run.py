"""Runs the audits: sound engines raise no alarm; every known fault is found."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from typing import Any

from deploy.audit.mutants import MUTANTS, Install
from deploy.audit.toy import table_engine, tiny_engine
from deploy.audit.traffic import FILTERED, PLAIN, STOPPING, mixed, sampling
from deploy.audit.watch import Answer, Replayer, Watch
from speculative.config import VerifierName
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from speculative.stats import CHECKS, CheckSums, StepStats

VOCAB_SIZE = 1024
MAX_POSITIONS = 200_000
MAX_REQUESTS = 200
REPLAY_SHARE = 0.1
MAX_Z = 5.0  # of the mean of a term over all clean runs
SAMPLED = {"sampled": PLAIN, "deterministic": PLAIN, "stopping": STOPPING}
"""Traffic that a table serves, and how it is sampled."""

_AT_ONCE = 128
_SOUND_POSITIONS = 5_000  # that tell the acceptance of a sound engine
_SOUND_REQUESTS = 24

Report = Callable[[str], None]
Until = Callable[[Watch, int], bool]
"""Whether to stop, given who found something so far, and the positions or requests served."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What an audit of one mutant came to.

    detectors: each with the positions (or requests) it needed, first to fire first. delay: of the first; None where
    nothing fired. acceptance: what the metric showed meanwhile, sound_acceptance what it shows without the fault.
    """

    fault: str
    detectors: dict[str, int]
    unit: str
    delay: int | None
    acceptance: float
    sound_acceptance: float

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def audit_mutant(name: str, patience: float = 2.0) -> Finding:
    """Put one fault into an engine and serve until somebody has found it; then on, to `patience` times as much."""
    mutant = MUTANTS[name]
    samples = mutant.traffic in SAMPLED
    most = MAX_POSITIONS if samples else MAX_REQUESTS
    sound = sound_acceptance(mutant.traffic, tuple(mutant.settings.items()))

    def until(watch: Watch, count: int) -> bool:
        return count >= min(most, patience * min(watch.found.values(), default=most))

    watch = _watch(mutant.traffic, mutant.settings, mutant.install, until, sound)
    found = dict(sorted(watch.found.items(), key=lambda item: item[1]))
    unit = "positions" if samples else "requests"
    return Finding(name, found, unit, min(found.values(), default=None), watch.acceptance, sound)


@cache
def sound_acceptance(traffic: str, settings: tuple[tuple[str, Any], ...]) -> float:
    """The acceptance of an engine without a fault."""
    few = _SOUND_POSITIONS if traffic in SAMPLED else _SOUND_REQUESTS
    return _watch(traffic, dict(settings), lambda _: None, lambda _, count: count >= few, None).acceptance


def audit_mutants(
    names: Iterable[str] = MUTANTS, report: Report = lambda _: None, patience: float = 2.0
) -> list[Finding]:
    """Audit every mutant."""
    findings = []
    for name in names:
        findings.append(audit_mutant(name, patience))
        report(f"{name}: {next(iter(findings[-1].detectors), 'NOT FOUND')} after {findings[-1].delay}")
    return findings


@dataclass(frozen=True, slots=True)
class CleanRun:
    """What a sound engine's self-checks came to: its alarms and violations, and the terms."""

    setting: str
    num_positions: int
    alarms: dict[str, int]
    violations: dict[str, int]
    checks: dict[str, CheckSums]

    @property
    def worst_z(self) -> float:
        """The largest deviation of a term's sum from 0, in standard deviations."""
        return max((abs(sums.z) for sums in self.checks.values()), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self) | {"worst_z": self.worst_z}


@dataclass(frozen=True, slots=True)
class CleanSetting:
    """One way to serve: who verifies, how drafts are made, and how requests are sampled."""

    verifier: VerifierName
    deterministic: bool  # drafts are the likeliest tokens
    params: SamplingParams

    def __str__(self) -> str:
        drafts, filters = "deterministic" if self.deterministic else "sampled", "off" if self.params == PLAIN else "on"
        return f"{self.verifier}, {drafts} drafts, filters {filters}"


VERIFIERS: tuple[VerifierName, ...] = ("token_wise", "block", "coupled")
CLEAN_SETTINGS = tuple(
    CleanSetting(verifier, deterministic, params)
    for verifier in VERIFIERS
    for deterministic in (False, True)
    for params in (PLAIN, FILTERED)
)
Serve = Callable[[CleanSetting, int], tuple[EngineCore, Iterator[Request]]]
"""An engine for a setting, and endless requests that follow from a seed."""


def audit_clean(num_positions: int, report: Report = lambda _: None, serve: Serve | None = None) -> list[CleanRun]:
    """Serve `num_positions` with sound engines, all verifiers, kinds of drafts and filters taken together.

    serve: makes the engines; without it they are tables of VOCAB_SIZE tokens.
    """
    runs = []
    for index, setting in enumerate(CLEAN_SETTINGS):
        engine, requests = (serve or serve_table)(setting, 1000 + index)
        watch = Watch()
        _serve(engine, requests, watch, lambda _, count: count >= num_positions / len(CLEAN_SETTINGS), unit="positions")
        total = watch.total
        runs.append(CleanRun(str(setting), total.num_emitted, total.alarms, total.violations, total.checks))
        report(f"{setting}: {total.num_emitted} positions, worst z {runs[-1].worst_z:.2f}, alarms {total.alarms}")
    return runs


def serve_table(setting: CleanSetting, seed: int, vocab_size: int = VOCAB_SIZE) -> tuple[EngineCore, Iterator[Request]]:
    """Serve from a table."""
    engine = table_engine(
        vocab_size, self_check_sample_rate=1.0, verifier=setting.verifier, deterministic=setting.deterministic
    )
    return engine, sampling(vocab_size, setting.params, seed)


def pooled(runs: Sequence[CleanRun]) -> dict[str, CheckSums]:
    """The terms of all runs together, by self-check."""
    total = StepStats()
    for run in runs:
        total.merge(StepStats(checks=dict(run.checks)))
    return {check: total.checks[check] for check in CHECKS if check in total.checks}


def alarms_of(runs: Sequence[CleanRun]) -> list[str]:
    """A line for each alarm of these runs, and for each term whose mean over all of them is not 0."""
    alarms = [f"{run.setting}: {run.alarms | run.violations}" for run in runs if run.alarms or run.violations]
    return alarms + [
        f"{check}: its mean is {sums.z:+.1f} standard deviations from 0"
        for check, sums in pooled(runs).items()
        if abs(sums.z) > MAX_Z
    ]


# -- serving ---------------------------------------------------------------------------------------------------------


def _watch(
    traffic: str, settings: Mapping[str, Any], install: Install, until: Until, sound_acceptance: float | None
) -> Watch:
    """Serve one kind of traffic with an engine that `install` has changed."""
    watch = Watch(sound_acceptance)
    if traffic in SAMPLED:
        engine = table_engine(VOCAB_SIZE, deterministic=traffic != "sampled", **settings)
        install(engine)
        _serve(engine, sampling(VOCAB_SIZE, SAMPLED[traffic]), watch, until, unit="positions")
        return watch
    own_drafts = traffic.startswith("drafted")
    engine = tiny_engine(own_drafts=own_drafts, **settings)
    install(engine)
    requests = mixed(engine.model.vocab_size, longest=settings.get("max_model_len"))
    prefill = tiny_engine(own_drafts=own_drafts) if traffic.endswith("handoffs") else None
    replayer = Replayer(tiny_engine(max_model_len=engine.max_model_len), REPLAY_SHARE, engine.max_model_len)
    _serve(engine, requests, watch, until, unit="requests", replayer=replayer, prefill=prefill)
    return watch


def _serve(
    engine: EngineCore,
    requests: Iterator[Request],
    watch: Watch,
    until: Until,
    *,
    unit: str,
    replayer: Replayer | None = None,
    prefill: EngineCore | None = None,
) -> None:
    """Keep an engine busy, and look at every step."""
    answers: dict[str, Answer] = {}
    count = 0
    at_once = min(_AT_ONCE, engine.config.max_num_seqs)
    while not until(watch, count):
        for request in islice(requests, at_once - len(answers)):
            answers[request.request_id] = Answer(request, handed_off=prefill is not None)
            _begin(engine, prefill, answers[request.request_id])
        deltas = engine.step()
        for delta in deltas:
            answers[delta.request_id].deltas.append(delta)
        finished = [answers.pop(delta.request_id) for delta in deltas if delta.finished]
        count += sum(len(delta.token_ids) for delta in deltas) if unit == "positions" else len(finished)
        watch.look(engine.take_stats(), count)
        if replayer is not None:
            watch.note([detector for answer in finished for detector in replayer.check(answer)], count)


def _begin(engine: EngineCore, prefill: EngineCore | None, answer: Answer) -> None:
    """Hand a request to the engine, by way of another that computes its prompt and first token where there is one."""
    request = answer.request
    if prefill is None:
        engine.add(request)
        return
    prefill.add(request, prefill_only_after=1)
    while prefill.has_work:
        answer.deltas += prefill.step()
    engine.insert(request, prefill.export(request.request_id))
