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
from collections.abc import Callable
from typing import Literal

from serve_app.backends.base import Numerics, Replayed
from serve_app.referee.answer import Answer
from serve_app.referee.detectors import ReplicaWatch, drifts_of
from serve_app.referee.evidence import DriftTest
from serve_app.referee.judgement import Judge, Judgement
from serve_app.referee.replay_checker import comparable
from serve_app.referee.replay_selection import chosen
from serve_app.referee.replayer import Replayer
from serve_app.referee.replica_book import Case, ReplicaBook
from serve_app.referee.tolerance import Tolerance, Tolerances
from serve_app.referee.verdicts import Verdict
from speculative.errors import ConfigError

_logger = logging.getLogger("truespec.referee")

_MAX_QUEUE = 4
_DRIFT_RATE = 1e-3  # share of the logprobs that rounding moves by more than twice what it moves a logit
_MAX_TOKENS = 4096  # of prompt and answer: on one core, longer ones take minutes
_REST = 9.0  # times as long as the last check took: shapes take a tenth of the referee's time at most
_PERIODS = (128, 12)  # rows: tiles of the kernels have 4 to 128, and each of these numbers divides 128 or 12

IndependentResult = Literal["agrees", "disagrees", "skipped", "outdated", "unsupported", "failed"]


class IndependentChecks:
    """Checks a share of the answers that the engine's own replay has verified, one after another.

    A fault of the model code is every replica's, and speculation is not its cause: it makes answers suspect, and is
    counted for the alert, but trips no breaker. Evidence is gathered over all replicas.

    Args:
        replayer: independent of the engine; it raises ConfigError where it lacks the weights.
        tolerances: between the engine and the referee.
        book: is given the answers that were found wrong.
        rate: the share of answers. Unless it is 0, an answer of a shape that was not checked yet is checked as well,
            as long as no other waits, in a tenth of the time.
        ended: called at the end of each check.
        clock: seconds.
    """

    def __init__(
        self,
        replayer: Replayer,
        tolerances: Tolerances,
        book: ReplicaBook,
        *,
        rate: float,
        ended: Callable[[IndependentResult], None] = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replayer = replayer
        self._judge = Judge(tolerances)
        self._tolerances = tolerances
        self._evidence: dict[Tolerance, _Evidence] = {}
        self._book = book
        self._rate = rate
        self._ended = ended
        self._clock = clock
        self._queue: asyncio.Queue[Answer] = asyncio.Queue(_MAX_QUEUE)
        self._shapes: set[_Shape] = set()  # that were checked, or are about to be
        self._able = True  # to replay, at its last check; if it lacks the weights, a share of the answers tries again
        self._rests_until = -math.inf  # by the clock; before it, no shape is due
        self._unsupported = ""  # the last reason, logged once

    def offer(self, answer: Answer) -> None:
        """Queue a verified answer if it is among those to be checked; returns at once."""
        picked = chosen(f"independent {answer.request.request_id}", self._rate)
        shapes = _shapes_of(answer)
        due = self._rate > 0 and self._able and self._queue.empty() and not shapes <= self._shapes
        due = due and self._clock() >= self._rests_until
        if answer.num_tokens > _MAX_TOKENS or self._queue.full():
            if picked:
                self._ended("skipped")
        elif picked or due:
            self._shapes |= shapes
            self._queue.put_nowait(answer)

    async def run(self) -> None:
        """Work through the queue until cancelled."""
        while True:
            answer, began = await self._queue.get(), self._clock()
            result = await self._check(answer)
            ended = self._clock()
            self._rests_until = ended + _REST * (ended - began)
            self._able = result not in ("unsupported", "failed")
            if result not in ("agrees", "disagrees"):
                self._shapes -= _shapes_of(answer)
            self._ended(result)

    async def _check(self, answer: Answer) -> IndependentResult:
        """The result of one check."""
        try:
            replayed = await self._replayer.replay(answer.scored(f"independent-{uuid.uuid4().hex}"))
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
        self._book.report(Case(answer, replayed, checked))
        self._book.incidents.note("independent", "disagrees", answer.replica)
        return "disagrees"

    def _wrong(self, answer: Answer, replayed: Replayed, judgement: Judgement) -> str:
        """Say what an answer shows, by itself or with those before it; "" = nothing is wrong."""
        tolerance = self._tolerances.between(answer.numerics, replayed.numerics)
        evidence = self._evidence_of(tolerance)
        found = evidence.watch.see(
            judgement.tokens,
            greedy=answer.request.params.greedy,
            drift_tolerance=judgement.drift_tolerance,
            at=answer.began_at,
        )
        evidence.drift.add((drift.nats for drift in drifts_of(judgement.tokens)), answer.began_at)
        if evidence.drift.alarm:
            del self._evidence[tolerance]
            return f"drift: too many logprobs are off by more than {evidence.drift.limit_nats:g} nats"
        if judgement.checked.verdict is Verdict.SUSPECT:
            return judgement.checked.reason
        return f"{found[0].name} in stratum {found[0].stratum}, over many answers" if found else ""

    def _evidence_of(self, tolerance: Tolerance) -> "_Evidence":
        if tolerance not in self._evidence:
            self._evidence[tolerance] = _Evidence(tolerance)
        return self._evidence[tolerance]


_Shape = tuple[Numerics, int, int, int]
"""Shape of a prefill: its engine, a period, the remainder of its rows by it, and their number of binary digits."""


def _shapes_of(answer: Answer) -> set[_Shape]:
    """Return how many rows were computed of its prompt, as kernels see them; weights of another version change none of
    it."""
    num_rows = max(1, len(answer.request.prompt_token_ids) - answer.num_cached)
    return {(answer.numerics, period, num_rows % period, num_rows.bit_length()) for period in _PERIODS}


class _Evidence:
    """The evidence of answers that were judged with one tolerance."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.watch = ReplicaWatch(tolerance)
        self.drift = DriftTest(2 * tolerance.edge_nats, _DRIFT_RATE)
