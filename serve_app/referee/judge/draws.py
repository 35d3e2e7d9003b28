"""Checks of draws: whether the tokens of an answer are those that its seed demands, as far as rounding lets one say."""

import enum
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.backends.base import Replayed
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.drift import TokenDrift
from serve_app.referee.judge.evidence import RareTest
from speculative.request import ReplayedToken, SamplingParams, TokenKind
from speculative.selfcheck.replayed_draws import DrawCheck

_LEAST_NATS = 1e-3  # two engines of equal arithmetic still sum in another order here and there
_MEASURED = 256  # drifts from which the tolerance is measured
_MOST_EDGES = 4.0  # of what the arithmetic says, where a drafter's kernels are others
_NOISE_FACTOR = 12.0  # standard deviations that rounding does not exceed
_DRIFT_FACTOR = 4.0  # a token's own drift says how much rounding moved just there
_MOST_DRIFTS = 3.0  # tolerances that this may add
_NEAR = 0.25  # of the tolerance
_NEAR_RATE = 0.02  # the share of sound tokens that come so near, at most
_WRONG_RATE = 1e-4
_KEPT_WORST = 3


class DrawResult(enum.StrEnum):
    """The result of the draw of one token, made again."""

    FOLLOWS = "follows"  # it is the token that the seed demands
    NEAR = "near"  # it would be, if rounding had moved the replayed logits a little
    WRONG = "wrong"  # no rounding explains it


@dataclass(slots=True)
class DrawTolerance:
    """The moves of logits by rounding between the engines that answer and those that replay, in nats.

    Measured by the moves of log odds, and of log q for checks that compute it again; until enough of them are known, it
    is what `edge_nats` says of the arithmetic.
    """

    edge_nats: float  # what rounding may shift a logit by
    # moves: the sum of their squares, and their number
    _target: list[float] = field(default_factory=lambda: [0.0, 0.0])
    _drafter: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, moves: Iterable[float]) -> None:
        """Learn from uncertain tokens for which nothing was drafted; none of them counts more than `edge_nats`."""
        for move in moves:
            self._learn(self._target, abs(move))

    def add_drafts(self, checks: Iterable[DrawCheck]) -> None:
        """Learn how far log q drifts from the checks that computed it again; bounded in the same way."""
        for check in checks:
            if check.draft_drift is not None:
                self._learn(self._drafter, check.draft_drift)

    def _learn(self, of: list[float], move: float) -> None:
        of[:] = of[0] + min(move, self.edge_nats) ** 2, of[1] + 1

    @property
    def nats(self) -> float:
        """A miss above this is no rounding. What is measured only lowers it: those measured may be at fault."""
        return min(self._nats(self._target), self.edge_nats)

    def _nats(self, of: list[float]) -> float:
        squares, num = of
        if num < _MEASURED:
            return self.edge_nats
        measured = _NOISE_FACTOR * math.sqrt(squares / num)
        return min(max(_LEAST_NATS, measured), _MOST_EDGES * self.edge_nats)

    def judge(self, check: DrawCheck, drift: TokenDrift | None) -> DrawResult:
        """Return what one check shows of a token whose logprob drifted so far; None = it was served without one."""
        nats, moved = self.nats, 0.0 if drift is None else drift.nats
        if check.draft_drift is not None:
            nats, moved = max(nats, self._nats(self._drafter)), max(moved, check.draft_drift)
        own = nats * (1 + min(_MOST_DRIFTS, _DRIFT_FACTOR * moved / nats))
        # Where arithmetic is equal, so are the edges of the filters; a drafter's is not: it drafts in other kernels.
        miss = check.miss if nats <= _LEAST_NATS and check.draft_drift is None else check.loose
        return DrawResult.WRONG if not miss <= own else DrawResult.NEAR if miss > _NEAR * own else DrawResult.FOLLOWS

    def judge_all(self, checks: Sequence[DrawCheck], drifts: Sequence[TokenDrift | None]) -> list[DrawResult]:
        """The result of each check; drifts: of each token of the answer."""
        return [self.judge(check, drifts[check.token_index]) for check in checks]


class DrawTest:
    """A test for more tokens than rounding explains that are not, or only nearly, those that their seeds demand.

    Args:
        delta: probability of a false alarm, whenever one looks.
    """

    def __init__(self, delta: float) -> None:
        self._wrong, self._near = RareTest(_WRONG_RATE, delta / 2), RareTest(_NEAR_RATE, delta / 2)

    def add(self, results: Sequence[DrawResult], at: float = 0.0) -> None:
        """Take in the results of tokens of that time, in seconds."""
        self._wrong.add((result is DrawResult.WRONG for result in results), at)
        self._near.add((result is not DrawResult.FOLLOWS for result in results), at)

    @property
    def evidence_since(self) -> float:
        """Return when the evidence of the alarm began, in seconds."""
        return min(test.evidence_since for test in (self._wrong, self._near) if test.alarm)

    @property
    def alarm(self) -> bool:
        """Return whether it is so."""
        return self._wrong.alarm or self._near.alarm


@dataclass(frozen=True, slots=True)
class DrawsChecked:
    """The findings about the draws of one answer."""

    results: tuple[DrawResult | None, ...] = ()  # of each token; None = not checked
    worst: tuple[DrawCheck, ...] = ()  # the checks that missed by most, the worst first
    reason: str = ""  # why tokens were not checked, "" = all were

    @property
    def wrong(self) -> int | None:
        """The first token that is not the one its seed demands; None = there is none."""
        return next((index for index, result in enumerate(self.results) if result is DrawResult.WRONG), None)

    @property
    def num_checked(self) -> int:
        """Tokens whose draws were made again."""
        return sum(result is not None for result in self.results)

    def to_wire(self) -> dict[str, Any]:
        """Return the form that the API returns."""
        counts = Counter(result.value for result in self.results if result is not None)
        return {
            "num_checked": self.num_checked,
            **{f"num_{result.value}": counts[result.value] for result in DrawResult},
            "worst": [
                {"index": check.token_index, "check": check.kind, "miss_nats": min(check.miss, 1e9)}
                for check in self.worst
            ],
            "unchecked": self.reason or None,
        }


NOT_REPLAYED = DrawsChecked(reason="not replayed")


def placement_checks(rows: Sequence[ReplayedToken], params: SamplingParams) -> list[DrawCheck]:
    """Checks that need no random numbers: each token of a greedy answer is the likeliest, each of a sampled one is
    allowed.

    The edges of a nucleus and of min_p are a mass and a ratio: what rounding moves across them may lie whole nats
    below the last token that was kept. So with these only what a rule forbids counts here.
    """
    if params.greedy:
        return [DrawCheck(index, "likeliest", row.gap, row.gap) for index, row in enumerate(rows)]
    in_nats = params.top_p == 1 and params.min_p == 0
    beyond = ((index, row.outside) for index, row in enumerate(rows) if row.outside > 0)
    return [DrawCheck(index, "allowed", nats, nats) for index, nats in beyond if in_nats or nats == math.inf]


def check_draws(num_tokens: int, checks: Sequence[DrawCheck], found: Sequence[DrawResult]) -> DrawsChecked:
    """Sum up the checks of an answer of so many tokens; found: the result of each check."""
    order = tuple(DrawResult)
    results: list[DrawResult | None] = [None] * num_tokens
    for check, result in zip(checks, found, strict=True):
        before = results[check.token_index]
        results[check.token_index] = result if before is None else max(result, before, key=order.index)
    worst = sorted((check for check in checks if check.miss > 0), key=lambda check: -check.miss)[:_KEPT_WORST]
    reason = "" if None not in results else "they end a round that was cut short"
    return DrawsChecked(tuple(results), tuple(worst), reason)


def draws_of(
    tolerance: DrawTolerance, answer: Answer, replayed: Replayed, drifts: Sequence[TokenDrift | None]
) -> tuple[DrawsChecked, tuple[tuple[str, DrawResult], ...]]:
    """Make the draws of an answer again; drifts: of its tokens. The second value is what was checked of each draw, and
    its result."""
    if answer.request.params.greedy:
        return DrawsChecked(reason="nothing was drawn"), ()
    if answer.replayable_rounds is None or replayed.replayed is None:
        return DrawsChecked(reason="the engine did not report how it sampled"), ()
    checks = answer.replayable_rounds.check(replayed.replayed)
    found = tolerance.judge_all(checks, drifts)
    if not answer.request.canary:  # which may be wrong on purpose
        tolerance.add_drafts(checks)
    results = tuple((check.kind, result) for check, result in zip(checks, found, strict=True))
    return check_draws(len(answer.token_ids), checks, found), results


def wrong_place(
    tolerance: DrawTolerance, answer: Answer, replayed: Replayed, drifts: Sequence[TokenDrift | None]
) -> str:
    """The first token that is not the likeliest of a greedy answer, or not allowed in a sampled one, in words; "" =
    all are. drifts: of the answer's tokens."""
    checks = placement_checks(replayed.replayed or (), answer.request.params)
    found = tolerance.judge_all(checks, drifts)
    for (index, kind, nats, *_), result in zip(checks, found, strict=True):
        if result is DrawResult.WRONG:
            beyond = "below the likeliest" if kind == "likeliest" else "outside what the request allows"
            return f"{kind}: token {index} is {nats:.3g} nats {beyond}"
    return ""


def wrong_draw(draws: DrawsChecked, kinds: Sequence[TokenKind]) -> str:
    """The first token that its seed does not give, in words; "" = all are what it gives. kinds: of the answer's."""
    if draws.wrong is None:
        return ""
    return f"draws: token {draws.wrong} ({kinds[draws.wrong].value}) is not the one that the request's seed demands"
