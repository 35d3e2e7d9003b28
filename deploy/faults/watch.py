"""What finds a fault in a running engine: its own self-checks, and replays of a share of what it served."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.faults.toy import NUM_DRAFTS, EvenAndOdd, write_checkpoint
from serve_app.referee.evidence import CalibrationTest, DriftTest
from speculative.engine import EngineCore
from speculative.errors import InvalidRequest
from speculative.model.decoder import Decoder
from speculative.request import FinishReason, ReplayedToken, Request, TokenDelta
from speculative.selfcheck.replayed_draws import Rounds
from speculative.stats import StepStats

_LIMIT_NATS = 1e-3  # float32 rounding is a hundred times smaller
_RATE = 1e-3
_LEAST_ROUNDS = 500  # without drafts, before that means anything
_LEAST_ACCEPTED = 100  # that a sound engine would have had, before an acceptance rate means anything
_LEAST_SHARE = 0.5  # of the acceptance a sound engine has
MAX_Z = 5.0  # of the mean of a term where the engine is sound


@dataclass
class Watch:
    """Collects who found something, and when.

    sound_acceptance: of the same traffic through a sound engine; None = not known yet. one_seed: every client sends the
    same. sound: the engine has no fault, so that a term whose mean is not 0 shows one of the self-checks.
    """

    sound_acceptance: float | None = None
    one_seed: bool = False
    sound: bool = False
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
class Answer:
    """What a request was served.

    handed_off: the first delta came of a prefill elsewhere. hangs_up: its client does not wait for the end.
    """

    request: Request
    handed_off: bool = False
    hangs_up: bool = False
    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(token for delta in self.deltas for token in delta.token_ids)

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.request.prompt_token_ids, *self.token_ids)

    @property
    def drawn(self) -> Rounds:
        """How they were drawn."""
        rounds = tuple(delta.round for delta in self.deltas if delta.round is not None)
        kinds = tuple(kind for delta in self.deltas for kind in delta.kinds)
        return Rounds(len(self.request.prompt_token_ids), rounds, self.token_ids, kinds)


Recompute = Callable[[Request], tuple[Sequence[float], Sequence[ReplayedToken]]]
"""Raw logprobs of a scoring request's tokens, and where they lie in its distribution."""


class Replayer:
    """Has a share of the answers computed again by others, and compares. One test for each stratum.

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
        strata = ("output", "first", "handoff", "limit", "prompt")
        self._drifts = {name: DriftTest(_LIMIT_NATS, _RATE) for name in strata}
        self._distribution = CalibrationTest(tolerance=1e-4, edge_nats=_LIMIT_NATS, rate=_RATE)

    def check(self, answer: Answer) -> list[str]:
        """Replay an answer, if it is of the share; which detectors have fired so far."""
        fired = list[str]()
        if self._chosen(answer):
            try:
                fired += self._compare(answer)
            except InvalidRequest:
                fired.append(f"{self._by}replay refused")
        fired += [f"{self._by}replay drift ({stratum})" for stratum, test in self._drifts.items() if test.alarm]
        found = self._distribution.alarm
        return fired + ([f"{self._by}replay distribution: {found}"] if found else [])

    def _compare(self, answer: Answer) -> list[str]:
        """Show an answer to the tests; which detectors it alone makes fire."""
        request, drawn = answer.request, answer.drawn
        recompute = self._recompute(answer.deltas[0].weight_version)
        num_prompt = len(request.prompt_token_ids)
        draws = drawn.draws() if drawn.complete and not request.params.greedy else ()
        params = replace(request.params, prompt_logprobs=None)
        request = replace(request, request_id=f"replay-{request.request_id}", params=params)
        replayed, rows = recompute(
            replace(request, prompt_token_ids=answer.sequence, score_from=num_prompt, draws=draws)
        )
        self._distribution.add(rows, greedy=params.greedy)
        missed = sorted({check.kind for check in drawn.check(rows) if check.miss > _LIMIT_NATS}) if draws else []
        fired = [f"{self._by}replayed draws: {kind}" for kind in missed]
        served = [entry.logprob for delta in answer.deltas for entry in delta.logprobs or ()]
        if not served:
            return fired
        drifts = [abs(a - b) for a, b in zip(served, replayed, strict=True)]
        self._drifts["first"].add(drifts[:1])
        if answer.handed_off:
            begin = len(answer.deltas[0].token_ids)
            self._drifts["handoff"].add(drifts[begin : begin + 1])
        self._drifts["limit"].add(drifts[max(0, self._limit - NUM_DRAFTS - num_prompt) :])
        self._drifts["output"].add(drifts)
        prompt = [entry.logprob for delta in answer.deltas for entry in delta.prompt_logprobs or ()]
        if prompt:
            pairs = zip(prompt, recompute(replace(request, score_from=1))[0], strict=True)
            self._drifts["prompt"].add(abs(a - b) for a, b in pairs)
        return fired

    def _chosen(self, answer: Answer) -> bool:
        """Whether it is of the share and can be computed again: not what broke, nor what two versions made."""
        digest = hashlib.blake2b(answer.request.request_id.encode(), digest_size=8).digest()
        broke = not answer.token_ids or answer.deltas[-1].finish_reason is FinishReason.ERROR
        one_version = len({delta.weight_version for delta in answer.deltas}) == 1
        return int.from_bytes(digest, "big") < self._share * 2.0**64 and one_version and not broke


def by_engine(engine: EngineCore) -> Recompute:
    """By another engine."""

    def recompute(request: Request) -> tuple[Sequence[float], Sequence[ReplayedToken]]:
        engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                return [entry.logprob for entry in delta.logprobs or ()], delta.replayed or ()
        raise RuntimeError("The replay ended without a result.")

    return recompute


def by_transformers(decoder: Decoder) -> Recompute:
    """By `transformers`, which has none of our model's code."""
    from serve_app.referee.transformers_model import TransformersModel  # only where it is asked for

    with TemporaryDirectory() as folder:
        write_checkpoint(decoder, Path(folder))
        model = TransformersModel(Path(folder))

    def recompute(request: Request) -> tuple[Sequence[float], Sequence[ReplayedToken]]:
        replayed = model.replay(request, lambda _: EvenAndOdd(decoder.config.vocab_size))
        return replayed.logprobs, replayed.replayed or ()

    return recompute
