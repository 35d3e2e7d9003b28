"""Runs the audits: sound engines raise no alarm; every known fault is found."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import islice
from typing import Any

from deploy.reports.progress import View
from speculative.config import VerifierName
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.request import DEFAULT_VERSION, Request, SamplingParams
from speculative.stats import CHECKS, CheckSums, StepStats
from tools.faults.front import watch_front_end
from tools.faults.mutants import FRONT_END, MUTANTS, Mutant
from tools.faults.toy import table_engine, tiny_engine, tiny_weights
from tools.faults.traffic import (
    DECODERS,
    FILTERED,
    PLAIN,
    TABLES,
    DecoderTraffic,
    TableTraffic,
    mixed,
    sampling,
)
from tools.faults.watch import MAX_Z, Recompute, ReplayAudit, ServedRequest, Watch, by_engine, by_transformers

VOCAB_SIZE = 1024
MAX_POSITIONS = 200_000
MAX_REQUESTS = 200
REPLAY_SHARE = 0.1

_AT_ONCE = 128
_HANGS_UP = 7  # every seventh client
_REMEMBERED = 8  # conversations that may be continued
_UPDATE_EVERY = 24  # requests
_SOUND_POSITIONS = 5_000  # that tell the acceptance of a sound engine
_SOUND_REQUESTS = 32

Until = Callable[[Watch, int], bool]
"""Test whether to stop, given who found something so far, and the positions or requests served."""


@dataclass(frozen=True, slots=True)
class MutantAudit:
    """The result of an audit of one mutant."""

    fault: str
    detectors: dict[str, int]  # each with the positions (or requests) it needed, first to fire first
    unit: str
    delay: int | None  # of the first; None where nothing fired
    acceptance: float  # of drafts, by the metric, meanwhile
    sound_acceptance: float  # the same without the fault

    def as_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        return asdict(self)


def audit_mutant(name: str, patience: float = 2.0) -> MutantAudit:
    """Put one fault into an engine and serve until somebody has found it; then on, to `patience` times as much."""
    mutant = MUTANTS[name]
    samples = mutant.traffic in TABLES
    most = MAX_POSITIONS if samples else MAX_REQUESTS
    sound = sound_watch(mutant.traffic, tuple(mutant.settings.items())).acceptance

    def until(watch: Watch, count: int) -> bool:
        return count >= min(most, patience * min(watch.found.values(), default=most))

    watch = _watch(mutant, until, sound)
    found = dict(sorted(watch.found.items(), key=lambda item: item[1]))
    unit = "positions" if samples else "requests"
    return MutantAudit(name, found, unit, min(found.values(), default=None), watch.acceptance, sound)


@cache
def sound_watch(traffic: str, settings: tuple[tuple[str, Any], ...]) -> Watch:
    """Watch an engine without a fault: its acceptance, and false alarms."""
    few = _SOUND_POSITIONS if traffic in TABLES else _SOUND_REQUESTS
    return _watch(_sound(traffic, **dict(settings)), lambda _, count: count >= few, None)


def _sound(traffic: str, **settings: Any) -> Mutant:
    return Mutant("sound", lambda _: None, traffic, settings)


def audit_mutants(
    names: Sequence[str] = tuple(MUTANTS), view: View | None = None, patience: float = 2.0
) -> list[MutantAudit]:
    """Audit every mutant."""
    view, findings = view or View(), list[MutantAudit]()

    def note() -> str:
        missed = [one.fault for one in findings if one.delay is None]
        return f"{len(findings) - len(missed)} found, missed so far: {', '.join(missed) or 'none'}"

    for number, name in enumerate(names, start=1):
        view.stage(f"fault {number} of {len(names)}, {name}", note)
        findings.append(audit_mutant(name, patience))
        view.say(f"{name}: {next(iter(findings[-1].detectors), 'NOT FOUND')} after {findings[-1].delay}")
    return findings


@dataclass(frozen=True, slots=True)
class CleanRun:
    """The result of a sound engine's self-checks: its alarms and violations, and the terms."""

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


VERIFIERS: tuple[VerifierName, ...] = ("token_wise", "coupled")
CLEAN_SETTINGS = tuple(
    CleanSetting(verifier, deterministic, params)
    for verifier in VERIFIERS
    for deterministic in (False, True)
    for params in (PLAIN, FILTERED)
)
Serve = Callable[[CleanSetting, int], tuple[EngineCore, Iterator[Request]]]
"""An engine for a setting, and endless requests that follow from a seed."""


def audit_clean(num_positions: int, view: View | None = None, serve: Serve | None = None) -> list[CleanRun]:
    """Serve `num_positions` with sound engines, all verifiers, kinds of drafts and filters taken together.

    serve: makes the engines; without it they are tables of VOCAB_SIZE tokens, and the traffic in which the faults are
    looked for is served as well, and replayed.
    """
    kinds = () if serve else (*TABLES, *DECODERS)
    share = num_positions / (len(CLEAN_SETTINGS) + len(kinds))

    def until(watch: Watch, _: int) -> bool:
        return watch.total.num_emitted >= share

    view, runs = view or View(), list[CleanRun]()

    def so_far() -> str:
        return f"{len(runs)} of {len(CLEAN_SETTINGS) + len(kinds)} settings done, {len(alarms_of(runs))} alarms so far"

    def note(setting: str, watch: Watch) -> None:
        total = watch.total
        replays = {detector: 1 for detector in watch.found if detector.startswith("replay")}
        runs.append(CleanRun(setting, total.num_emitted, total.alarms | replays, total.violations, total.checks))
        view.say(f"{setting}: {total.num_emitted} positions, worst z {runs[-1].worst_z:.2f}, alarms {runs[-1].alarms}")

    for index, setting in enumerate(CLEAN_SETTINGS):
        engine, requests = (serve or serve_table)(setting, 1000 + index)
        clients = _Clients(engine, requests, Watch())
        view.stage(str(setting), so_far)
        clients.serve(until)
        note(str(setting), clients.watch)
    for kind in kinds:
        view.stage(f"faults' traffic: {kind}", so_far)
        note(f"faults' traffic: {kind}", _watch(_sound(kind, self_check_sample_rate=1.0), until, None))
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


def _watch(mutant: Mutant, until: Until, sound_acceptance: float | None) -> Watch:
    """Serve a mutant's traffic with an engine that has its fault."""
    if mutant.traffic == FRONT_END:
        return watch_front_end(mutant, until)
    if mutant.traffic in TABLES:
        return _watch_table(mutant, TABLES[mutant.traffic], until, sound_acceptance)
    return _watch_decoder(mutant, DECODERS[mutant.traffic], until, sound_acceptance)


def _watch_table(mutant: Mutant, traffic: TableTraffic, until: Until, sound_acceptance: float | None) -> Watch:
    watch = Watch(sound_acceptance, one_seed=traffic.seed is not None, sound=mutant.place == "self-checks")
    engine, referee = (table_engine(VOCAB_SIZE, **traffic.table, **mutant.settings) for _ in range(2))
    mutant.install(engine)
    replayer = ReplayAudit(lambda _: by_engine(referee), REPLAY_SHARE, engine.max_model_len)
    requests = sampling(VOCAB_SIZE, traffic.params, one_seed=traffic.seed)
    _Clients(engine, requests, watch, [replayer], counts_requests=False).serve(until)
    return watch


def _watch_decoder(mutant: Mutant, traffic: DecoderTraffic, until: Until, sound_acceptance: float | None) -> Watch:
    watch = Watch(sound_acceptance)
    engine = tiny_engine(own_drafts=traffic.drafted, **{"kv_cache_tokens": traffic.room, **mutant.settings})
    mutant.install(engine)

    @cache
    def referee(version: str) -> Recompute:
        seed = 1 if version == DEFAULT_VERSION else int(version)
        again = tiny_engine(seed=seed, max_model_len=engine.max_model_len)
        if mutant.place == "referee":
            mutant.install(again)
        return by_engine(again)

    replayers = [ReplayAudit(referee, REPLAY_SHARE, engine.max_model_len)]
    if mutant.place == "referee":
        independent = by_transformers(tiny_weights().decoder)
        replayers.append(ReplayAudit(lambda _: independent, REPLAY_SHARE, engine.max_model_len, "transformers: "))
    earlier: list[tuple[int, ...]] = []
    longest = mutant.settings.get("max_model_len")
    requests = mixed(
        engine.model.vocab_size, longest=longest, earlier=earlier, continues=traffic.continues, salted=traffic.salted
    )
    clients = _Clients(engine, requests, watch, replayers, earlier=earlier)
    if traffic.handoffs:
        clients.prefill = tiny_engine(own_drafts=traffic.drafted)
    if traffic.switched:
        clients.update = lambda version: tiny_weights(seed=int(version), own_drafts=traffic.drafted)
    clients.serve(until)
    return watch


@dataclass
class _Clients:
    """They keep an engine busy and look at every step; some hang up before their answer is complete.

    earlier: what was said so far, for the requests to continue; None = nobody hangs up.
    update: makes the weights of versions 2, 3 and so on, of which the engine gets the next after every `_UPDATE_EVERY`
        requests.
    """

    engine: EngineCore
    requests: Iterator[Request]
    watch: Watch
    replayers: Sequence[ReplayAudit] = ()
    counts_requests: bool = True
    earlier: list[tuple[int, ...]] | None = None
    prefill: EngineCore | None = None  # computes prompt and first token of each request
    update: Callable[[str], Weights] | None = None
    _answers: dict[str, ServedRequest] = field(default_factory=dict)
    _num_begun: int = 0

    def serve(self, until: Until) -> None:
        """Until it says so, given what was found and the positions or requests served."""
        count, version = 0, 1
        at_once = min(_AT_ONCE, self.engine.config.max_num_seqs)
        while not until(self.watch, count):
            for request in islice(self.requests, at_once - len(self._answers)):
                self._begin(request)
            deltas = self.engine.step()
            for delta in deltas:
                self._answers[delta.request_id].deltas.append(delta)
            finished = [self._answers.pop(delta.request_id) for delta in deltas if delta.finished]
            count += len(finished) if self.counts_requests else sum(len(delta.token_ids) for delta in deltas)
            self.watch.look(self.engine.take_stats(), count)
            for replayer in self.replayers:
                self.watch.note([detector for answer in finished for detector in replayer.check(answer)], count)
            self._hang_up(finished)
            if self.update is not None and count >= version * _UPDATE_EVERY:
                version += 1
                self.engine.switch(self.update(str(version)), str(version))

    def _begin(self, request: Request) -> None:
        """Hand a request to the engine, by way of another that computes its prompt and first token where there is
        one."""
        self._num_begun += 1
        answer = ServedRequest(request, self.prefill is not None, hangs_up=self._num_begun % _HANGS_UP == 0)
        self._answers[request.request_id] = answer
        if self.prefill is None:
            self.engine.add(request)
            return
        self.prefill.add(request, prefill_only_after=1)
        while self.prefill.has_work:
            answer.deltas += self.prefill.step()
        self.engine.insert(request, self.engine.unpack(self.prefill.export(request.request_id).finish()))

    def _hang_up(self, finished: list[ServedRequest]) -> None:
        """Abort the requests of clients that leave; what was said is there to be continued."""
        if self.earlier is None:
            return
        leaving = [answer for answer in self._answers.values() if answer.hangs_up and len(answer.deltas) > 2]
        for answer in leaving:
            self.engine.abort(answer.request.request_id)
            del self._answers[answer.request.request_id]
        self.earlier += [answer.sequence for answer in (*finished, *leaving) if answer.token_ids]
        del self.earlier[:-_REMEMBERED]
