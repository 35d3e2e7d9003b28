"""What finds a fault in a running engine: its own self-checks, and replays of a share of what it served."""

import hashlib
from dataclasses import dataclass, field, replace

from deploy.audit.toy import NUM_DRAFTS
from speculative.engine import EngineCore
from speculative.errors import InvalidRequest
from speculative.request import FinishReason, Request, TokenDelta
from speculative.selfcheck.replay import CalibrationTest, DriftTest
from speculative.stats import StepStats

_LIMIT_NATS = 1e-3  # float32 rounding is a hundred times smaller
_RATE = 1e-3
_LEAST_DRAFTS = 500  # before an acceptance rate means anything
_LEAST_SHARE = 0.5  # of the acceptance a sound engine has


@dataclass
class Watch:
    """Collects who found something, and when.

    sound_acceptance: of the same traffic through a sound engine; None = not known yet.
    """

    sound_acceptance: float | None = None
    found: dict[str, int] = field(default_factory=dict)  # detector -> positions or requests until it fired
    total: StepStats = field(default_factory=StepStats)

    def look(self, stats: StepStats, delay: int) -> None:
        """Take in the counts of a step."""
        self.total.merge(stats)
        fired = [f"term {check}" for check in stats.alarms]
        fired += [f"invariant {kind}" for kind in stats.violations]
        fired += [f"logprob contract: {kind}" for kind in stats.logprob_violations]
        if self.total.num_repeated_seeds:
            fired.append("repeated random streams")
        if self.total.num_rounds_with_logprobs > _LEAST_DRAFTS and not self.total.num_drafted_with_logprobs:
            fired.append("no drafts while logprobs are asked for")
        sound = self.sound_acceptance
        if sound and self.total.num_drafted > _LEAST_DRAFTS and self.acceptance < _LEAST_SHARE * sound:
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
    """What a request was served; `handed_off`: the first delta came of a prefill elsewhere."""

    request: Request
    handed_off: bool = False
    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens."""
        return tuple(token for delta in self.deltas for token in delta.token_ids)


class Replayer:
    """Has a share of the answers computed again by a sound engine, and compares. One test for each stratum.

    Args:
        reference: computes them again.
        share: of the answers; which ones is a function of their ids.
        limit: the longest sequence of the engine that served them.
    """

    def __init__(self, reference: EngineCore, share: float, limit: int) -> None:
        self._reference = reference
        self._share = share
        self._limit = limit  # of prompt and output
        strata = ("output", "first", "handoff", "limit", "prompt")
        self._drifts = {name: DriftTest(_LIMIT_NATS, _RATE) for name in strata}
        self._distribution = CalibrationTest(tolerance=1e-4, edge_nats=_LIMIT_NATS, rate=_RATE)

    def check(self, answer: Answer) -> list[str]:
        """Replay an answer, if it is of the share; which detectors have fired so far."""
        request = answer.request
        served = [entry.logprob for delta in answer.deltas for entry in delta.logprobs or ()]
        fired = list[str]()
        if self._chosen(request) and served and answer.deltas[-1].finish_reason is not FinishReason.ERROR:
            try:
                self._compare(answer, served)
            except InvalidRequest:
                fired.append("replay refused")
        fired += [f"replay drift ({name})" for name, test in self._drifts.items() if test.alarm]
        return fired + ([f"replay distribution: {self._distribution.alarm}"] if self._distribution.alarm else [])

    def _compare(self, answer: Answer, served: list[float]) -> None:
        request = answer.request
        whole, num_prompt = (*request.prompt_token_ids, *answer.token_ids), len(request.prompt_token_ids)
        reported = self._score(replace(request, prompt_token_ids=whole, score_from=num_prompt))
        replayed = [entry.logprob for entry in reported.logprobs or ()]
        drifts = [abs(a - b) for a, b in zip(served, replayed, strict=True)]
        self._drifts["first"].add(drifts[:1])
        if answer.handed_off:
            begin = len(answer.deltas[0].token_ids)
            self._drifts["handoff"].add(drifts[begin : begin + 1])
        self._drifts["limit"].add(drifts[max(0, self._limit - NUM_DRAFTS - num_prompt) :])
        self._drifts["output"].add(drifts)
        self._distribution.add(reported.replayed or (), greedy=request.params.greedy)
        prompt = [entry.logprob for delta in answer.deltas for entry in delta.prompt_logprobs or ()]
        if prompt:
            reported = self._score(replace(request, score_from=1))
            pairs = zip(prompt, [entry.logprob for entry in reported.logprobs or ()], strict=True)
            self._drifts["prompt"].add(abs(a - b) for a, b in pairs)

    def _score(self, request: Request) -> TokenDelta:
        params = replace(request.params, prompt_logprobs=None)
        self._reference.add(replace(request, request_id=f"replay-{request.request_id}", params=params))
        while self._reference.has_work:
            for delta in self._reference.step():
                return delta
        raise RuntimeError("The replay ended without a result.")

    def _chosen(self, request: Request) -> bool:
        digest = hashlib.blake2b(request.request_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self._share * 2.0**64
