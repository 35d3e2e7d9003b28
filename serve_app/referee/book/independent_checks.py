"""Checks a few of the replayed answers again, by a referee that shares no model code with the engine.

An engine that replays its own answers repeats its own mistakes: what is wrong in every forward pass agrees with itself.
So does what is wrong in passes of one size only, as where the last rows of a kernel's tile are: so the first answer of
each shape is checked, beside a share of all.
"""

import asyncio
import dataclasses
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from serve_app.backends.base import Numerics, Replayed
from serve_app.referee.book.replay_checker import comparable
from serve_app.referee.book.replica_book import Case, ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.detectors import ReplicaWatch, drifts_of
from serve_app.referee.judge.evidence import RareTest
from serve_app.referee.judge.judgement import Judge, Judgement
from serve_app.referee.judge.tolerance import Tolerance, Tolerances
from serve_app.referee.judge.verdicts import Verdict
from serve_app.referee.records.replay_selection import chosen
from speculative.errors import ConfigError
from speculative.request import Request

_logger = logging.getLogger("truespec.referee")

_MAX_QUEUE = 4
_DRIFT_RATE, _DELTA = 1e-3, 1e-6  # share of the logprobs that rounding moves by more than twice what it moves a logit
_LENGTHS = (4096, 16384, 65536)  # behind which a first answer is checked; of the share, none behind the first
_BLOCK = 256  # positions that attention of our kernels takes at once
_BEHIND = 8  # tokens behind the border of a block that a fault there can be seen by
_REST = 39.0  # times as long as the last check took: shapes take a fortieth of a core at most
_PERIODS = (_BLOCK, 12)  # rows: tiles of the kernels have 4 to 128, and each of these numbers divides 256 or 12

IndependentResult = Literal["agrees", "disagrees", "skipped", "outdated", "unsupported", "failed"]


_Shape = tuple[Numerics, Literal["length", "border", "rows"], int, int]
"""What kernels may do wrongly by: the engine; what is counted; and two numbers, by that."""


@dataclass(slots=True)
class IndependentChecks:
    """Checks a share of the answers that the engine's own replay has verified, one after another.

    A fault of the model code is every replica's, and speculation is not its cause: it makes answers suspect, and is
    counted for the alert, but trips no breaker. Evidence is gathered over all replicas.

    rate: the share of answers. Unless it is 0, an answer of a shape that was not checked yet is checked as well, as
        long as no other waits, in a fortieth of the time: of those offered meanwhile the one with most to tell.
    """

    replay: Callable[[Request], Awaitable[Replayed]]  # by another engine; raises ConfigError where it lacks the weights
    tolerances: Tolerances  # between the engine and the referee
    book: ReplicaBook  # is given the answers that were found wrong
    _: KW_ONLY
    rate: float
    ended: Callable[[IndependentResult], None] = lambda result: None  # called at the end of each check
    clock: Callable[[], float] = time.monotonic  # seconds
    _judge: Judge = field(init=False)  # its own: the other has seen these seeds, and takes none for new again
    _evidence: dict[Tolerance, tuple[ReplicaWatch, RareTest]] = field(default_factory=dict)
    _queue: asyncio.Queue[Answer] = field(default_factory=lambda: asyncio.Queue(_MAX_QUEUE))
    _shapes: set[_Shape] = field(default_factory=set)  # that were checked, or are about to be
    _wanted: Answer | None = None  # the one with the most new shapes since a shape was last checked
    _able: bool = True  # to replay, at its last check; if it lacks the weights, a share of the answers tries again
    _rests_until: float = -math.inf  # by the clock; before it, no shape is due
    _unsupported: str = ""  # the last reason, logged once

    def __post_init__(self) -> None:
        self._judge = Judge(self.tolerances)

    def offer(self, answer: Answer) -> None:
        """Queue a verified answer if it is among those to be checked; returns at once."""
        if chosen(f"independent {answer.request.request_id}", self.rate):
            if answer.num_tokens > _LENGTHS[0] or self._queue.full():
                self.ended("skipped")
            else:
                self._put(answer)
        if self.rate > 0 and self._able:
            known = [answer] if self._wanted is None else [answer, self._wanted]
            wanted = self._wanted = max(known, key=self._news)
            if self._queue.empty() and self.clock() >= self._rests_until and self._news(wanted) > (0, 0, 0):
                self._wanted = None
                self._put(wanted)

    def _put(self, answer: Answer) -> None:
        self._shapes |= _shapes_of(answer)
        self._queue.put_nowait(answer)

    def _news(self, answer: Answer) -> tuple[int, int, int]:
        """Count the shapes of an answer that were not checked yet: lengths, borders of blocks, and the others."""
        kinds = [kind for _, kind, _, _ in _shapes_of(answer) - self._shapes]
        return kinds.count("length"), kinds.count("border"), kinds.count("rows")

    async def run(self) -> None:
        """Work through the queue until cancelled."""
        while True:
            answer, began = await self._queue.get(), self.clock()
            result = await self._check(answer)
            ended = self.clock()
            self._rests_until = ended + _REST * (ended - began)
            self._able = result not in ("unsupported", "failed")
            if result not in ("agrees", "disagrees"):
                self._shapes -= _shapes_of(answer)
            self.ended(result)

    async def _check(self, answer: Answer) -> IndependentResult:
        """The result of one check."""
        try:
            replayed = await self.replay(answer.scored(f"independent-{uuid.uuid4().hex}"))
            answer = dataclasses.replace(answer, prompt_logprobs=())  # the prompt's are not computed
            if (own := comparable(answer, replayed)) is None:
                return "outdated"
            answer, replayed = own
            judgement = self._judge.judge(answer, replayed)
        except ConfigError as error:
            if str(error) != self._unsupported:
                _logger.warning("answers cannot be checked independently: %s", error)
                self._unsupported = str(error)
            return "unsupported"
        except Exception as error:  # its process died: the check is lost, the others are not
            _logger.warning("%s could not be checked independently: %s", answer.request.request_id, error)
            return "failed"
        reason = self._wrong(answer, replayed, judgement)
        if not reason:
            return "agrees"
        reason = f"{replayed.replica} disagrees: {reason}"
        checked = dataclasses.replace(judgement.checked, verdict=Verdict.SUSPECT, reason=reason)
        self.book.report(Case(answer, replayed, checked))
        self.book.incidents.note("independent", "disagrees", answer.replica)
        return "disagrees"

    def _wrong(self, answer: Answer, replayed: Replayed, judgement: Judgement) -> str:
        """Say what an answer shows, by itself or with those before it; "" = nothing is wrong."""
        tolerance = self.tolerances.between(answer.numerics, replayed.numerics)
        fresh = ReplicaWatch(tolerance), RareTest(_DRIFT_RATE, _DELTA)
        watch, drift_test = self._evidence.setdefault(tolerance, fresh)
        found = watch.see(
            judgement.tokens,
            greedy=answer.request.params.greedy,
            drift_tolerance=judgement.drift_tolerance,
            at=answer.began_at,
        )
        limit_nats = 2 * tolerance.edge_nats
        drift_test.add((drift.nats > limit_nats for drift in drifts_of(judgement.tokens)), answer.began_at)
        if drift_test.alarm:
            del self._evidence[tolerance]
            return f"drift: too many logprobs are off by more than {limit_nats:g} nats"
        if judgement.checked.verdict is Verdict.SUSPECT:
            return judgement.checked.reason
        return f"{found[0].name} in stratum {found[0].stratum}, over many answers" if found else ""


def _shapes_of(answer: Answer) -> set[_Shape]:
    """Return the lengths and borders of blocks that an answer came behind, and how many rows were computed of its
    prompt, as kernels see them; weights of another version change none of it."""
    engine, num_prompt = answer.numerics, len(answer.request.prompt_token_ids)
    num_rows = max(1, num_prompt - answer.num_cached)
    behind = range(max(1, -(-(num_prompt - _BEHIND) // _BLOCK)), -(-answer.num_tokens // _BLOCK))
    return {
        *((engine, "rows", 1000 * period + num_rows % period, num_rows.bit_length()) for period in _PERIODS),
        *((engine, "border", block, 0) for block in behind),
        *((engine, "length", length, 0) for length in _LENGTHS if answer.num_tokens > length),
    }
