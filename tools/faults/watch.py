"""Detectors of faults in a running engine: its own self-checks, and replays of a share of what it served."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from serve_app.backends.base import Replayed
from serve_app.referee.book.replay_checker import comparable
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.detectors import ReplicaWatch
from serve_app.referee.judge.draws import DrawResult
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.records.records import Record
from serve_app.referee.records.replay_selection import chosen
from speculative.engine import EngineCore
from speculative.errors import InvalidRequest
from speculative.model.decoder import Decoder
from speculative.request import FinishReason, Request, TokenDelta
from speculative.stats import StepStats
from tools.faults.toy import NUM_DRAFTS, EvenAndOdd, write_checkpoint

_LEAST_ROUNDS = 500  # without drafts, before that means anything
_LEAST_ACCEPTED = 100  # that a sound engine would have had, before an acceptance rate means anything
_LEAST_SHARE = 0.5  # of the acceptance a sound engine has
_SHOWN = ("all", "prompt", "first", "handoff_0", "handoff_1", "near_limit")  # strata that point to a fault, and all
MAX_Z = 5.0  # of the mean of a term where the engine is sound


@dataclass
class Watch:
    """Collects who found something, and when."""

    sound_acceptance: float | None = None  # of the same traffic through a sound engine; None = not known yet
    one_seed: bool = False  # every client sends the same
    sound: bool = False  # the engine has no fault, so that a term whose mean is not 0 shows one of the self-checks
    found: dict[str, int] = field(default_factory=dict)  # detector -> positions or requests until it fired
    total: StepStats = field(default_factory=StepStats)

    def look(self, stats: StepStats, delay: int) -> None:
        """Take in the counts of a step."""
        self.total.merge(stats)
        fired = [f"term {check}" for check in stats.alarms]
        fired += [f"invariant {kind}" for kind in stats.violations]
        fired += [f"logprob contract: {kind}" for kind in stats.logprob_violations]
        if self.sound:
            fired += [f"clean run: mean of {check}" for check, sums in self.total.checks.items() if abs(sums.z) > MAX_Z]
        if self.total.num_repeated_seeds and not self.one_seed:
            fired.append("repeated random streams")
        if self.total.num_rounds_with_logprobs > _LEAST_ROUNDS and not self.total.num_drafted_with_logprobs:
            fired.append("no drafts while logprobs are asked for")
        sound = (self.sound_acceptance or 0.0) * self.total.num_drafted
        if sound > _LEAST_ACCEPTED and self.total.num_accepted < _LEAST_SHARE * sound:
            fired.append("acceptance floor")
        self.note(fired, delay)

    def note(self, fired: list[str], delay: int) -> None:
        """Keep when each detector fired first."""
        for detector in fired:
            self.found.setdefault(detector, max(delay, 1))

    @property
    def acceptance(self) -> float:
        """Share of drafts accepted, as the engine's own metrics tell it."""
        return self.total.num_accepted / max(self.total.num_drafted, 1)


@dataclass
class ServedRequest:
    """A request with what it was served."""

    request: Request
    handed_off: bool = False  # the first delta came of a prefill elsewhere
    hangs_up: bool = False  # its client does not wait for the end
    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(token for delta in self.deltas for token in delta.token_ids)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.request.prompt_token_ids, *self.token_ids)

    def answer(self, limit: int) -> Answer | None:
        """Return the referee's form; None if it broke off and cannot be computed again. limit: the longest sequence of
        the engine."""
        record = Record(self.request, "engine", 0.0, limit, NUM_DRAFTS)
        for delta in self.deltas:
            record.take(delta)
            if self.handed_off and record.num_rounds is None:
                record.num_rounds = 0
        broke = self.deltas[-1].finish_reason is FinishReason.ERROR
        return None if broke else record.answer()


Recompute = Callable[[Request], Replayed]
"""Computes a scoring request."""


class ReplayAudit:
    """Has a share of the answers computed again by others, and judges them as a service does.

    Args:
        recompute: with the weights of this version.
        share: of the answers; which ones is a function of their ids.
        limit: the longest sequence of the engine that served them.
        by: who computes; in the name of what it finds.
    """

    def __init__(self, recompute: Callable[[str], Recompute], share: float, limit: int, by: str = "") -> None:
        self._recompute = recompute
        self._share = share
        self._limit = limit  # of prompt and output
        self._by = by
        tolerance = Tolerance.between_equals("float32")
        self._judge = Judge(tolerance)
        self._watch = ReplicaWatch(tolerance)

    def check(self, served: ServedRequest) -> list[str]:
        """Replay an answer, if it is of the share; which detectors fire."""
        answer = served.answer(self._limit)
        if answer is None:
            return []
        if answer.broken_limit:  # which a service compares of every answer
            return ["request limit"]
        if not chosen(answer.request.request_id, self._share):
            return []
        try:
            return [f"{self._by}{detector}" for detector in self._compare(answer)]
        except InvalidRequest:
            return [f"{self._by}replay refused"]

    def _compare(self, answer: Answer) -> Iterator[str]:
        version, greedy = answer.weight_versions[-1], answer.request.params.greedy
        recompute = self._recompute(version)
        replayed = recompute(answer.scored(f"replay-{answer.request.request_id}"))
        if answer.prompt_logprobs:
            replayed = replayed.after(recompute(answer.scored_prompt("replay-prompt")))
        replayed = replace(replayed, weight_version=version)
        own = comparable(answer, replayed)
        if own is None:
            return
        judgement = self._judge.judge(*own)
        for alarm in self._watch.see(judgement.tokens, greedy=greedy, drift_tolerance=judgement.drift_tolerance):
            if alarm.name == "drift":
                if alarm.stratum in _SHOWN:
                    yield f"replay drift ({alarm.stratum})"
            elif alarm.name == "alternatives":
                yield "replayed alternatives (all)"
            elif alarm.name != "draws":
                yield f"replay distribution: {alarm.name}"
        for kind in sorted({kind for kind, result in judgement.draws if result is DrawResult.WRONG}):
            yield f"replayed draws: {kind}"
        kind, _, detail = judgement.checked.reason.partition(": ")
        if kind == "drift":
            yield "replay drift (one answer)"
        elif kind == "distribution":
            yield f"replay distribution: {detail}"
        elif kind == "alternatives":
            yield "replayed alternatives (one answer)"
        elif kind in ("likeliest", "allowed"):
            yield f"replayed token: {kind}"


def by_engine(engine: EngineCore) -> Recompute:
    """By another engine."""

    def recompute(request: Request) -> Replayed:
        engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                return Replayed.reported(delta)
        raise RuntimeError("The replay ended without a result.")

    return recompute


def by_transformers(decoder: Decoder) -> Recompute:
    """By `transformers`, which has none of our model's code."""
    from serve_app.referee.book.transformers_model import TransformersModel  # only where it is asked for

    with TemporaryDirectory() as folder:
        write_checkpoint(decoder, Path(folder))
        model = TransformersModel(Path(folder))

    return lambda request: model.replay(request, lambda _: EvenAndOdd(decoder.config.vocab_size))
