"""Replays finished requests, without speculation and on fresh KV: the queue, its workers, and the replay itself."""

import asyncio
import dataclasses
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from contextvars import Context, copy_context
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from serve_app.backends.base import Replayed, ReplayFailed
from serve_app.referee.book.replica_book import Case, ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judging
from serve_app.referee.judge.verdicts import REHEARSED, Checked, Verdict
from serve_app.referee.wire.demands import broken_limit
from speculative.errors import InvalidRequest, SequenceTooLong
from speculative.request import Request

_logger = logging.getLogger("truespec.referee")

Replay = Callable[[Request, Collection[str]], Awaitable[Replayed]]
"""Computes a teacher-forced request on a replica, on one of those given only where there is no other."""

ReplayResult = Literal["ok", "skipped", "outdated", "failed", "refused"]

_Queued = tuple[Answer, asyncio.Future[Checked], Context]
"""An answer, the future it settles, and its context, which identifies the client's request and trace."""


@dataclass(slots=True)
class ReplayChecker:
    """Replays answers from a bounded queue, a few at a time; an answer that finds it full is skipped."""

    replay: Replay  # recomputes a request
    judge: Judging  # compares an answer with its replay
    book: ReplicaBook  # is given the verdicts on what clients were served
    _: KW_ONLY
    max_queue: int = 64  # answers that wait; as many more may wait that somebody waits for
    max_running: int = 2  # replays at once
    # at the end of each replay, with its result and what is known of the answer now
    ended: Callable[[Answer, ReplayResult, Checked], None] = lambda answer, result, checked: None
    # of each answer of a client that was found correct
    verified: Callable[[Answer, Checked], None] = lambda answer, checked: None
    # takes note of each answer, and gives it with what is known of its engine for what that says of itself
    handed_in: Callable[[Answer], Answer] = lambda answer: answer
    _urgent: deque[_Queued] = field(default_factory=deque)
    _queue: deque[_Queued] = field(default_factory=deque)
    # by the loop's clock; what is settled is not here
    _queued_at: dict[asyncio.Future[Checked], float] = field(default_factory=dict)
    _wake: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))  # a permit for each that waits

    def submit(self, answer: Answer) -> None:
        """Queue an answer for replay when there is time; returns at once."""
        self._enqueue(self._queue, answer)

    async def check(self, answer: Answer) -> Checked:
        """Replay an answer before those that nobody waits for, and return the result."""
        return await self._enqueue(self._urgent, answer)

    @property
    def num_waiting(self) -> int:
        """Answers in the queue."""
        return len(self._urgent) + len(self._queue)

    @property
    def lag_s(self) -> float:
        """Return how long the oldest answer has waited, seconds."""
        now = asyncio.get_running_loop().time()
        return now - next(iter(self._queued_at.values()), now)

    def _enqueue(self, queue: deque[_Queued], answer: Answer) -> asyncio.Future[Checked]:
        answer = self.handed_in(answer)
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[Checked] = loop.create_future()
        if len(queue) >= self.max_queue:
            checked = Checked(reason="skipped: too many answers wait for their replay")
            self.ended(answer, "skipped", checked)
            settled.set_result(checked)
            return settled
        queue.append((answer, settled, copy_context()))
        self._queued_at[settled] = loop.time()
        self._wake.release()
        return settled

    async def run(self) -> None:
        """Work through the queue until cancelled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self.max_running):
                workers.create_task(self._work())

    async def _work(self) -> None:
        while True:
            await self._wake.acquire()
            answer, settled, context = (self._urgent or self._queue).popleft()
            try:
                checked = await asyncio.get_running_loop().create_task(self._check(answer), context=context)
            finally:
                del self._queued_at[settled]
            if not settled.done():
                settled.set_result(checked)

    async def _check(self, answer: Answer) -> Checked:
        result, checked = await self._result(answer)
        self.ended(answer, result, checked)
        return checked

    async def _result(self, answer: Answer) -> tuple[ReplayResult, Checked]:
        if limit := impossible(answer):
            return "refused", self._refused(answer, limit)
        try:
            replayed = await self._replayed(answer)
            if (own := comparable(answer, replayed)) is None:
                made, now = ", ".join(answer.weight_versions), replayed.weight_version
                _logger.info(
                    "%s was made with weights %s, and was replayed with %s", answer.request.request_id, made, now
                )
                return "outdated", Checked(reason="the weights that made it are no longer served")
            judgement = self.judge(*own)
            checked = judgement.checked
            if len(answer.weight_versions) > 1:
                since = f"from token {answer.num_before_update} on, since when these weights made it"
                checked = dataclasses.replace(checked, reason=f"{checked.reason} ({since})")
            if answer.request.rehearsal:  # it is shown, and is no evidence
                rehearsed = dataclasses.replace(checked, reason=f"{REHEARSED}{checked.reason}")
                checked = self.book.report(Case(*own, rehearsed))
            elif answer.request.canary:  # its own replica judges by it; clients never saw it
                self.book.dump_suspect(Case(*own, checked))
            else:
                checked = self.book.add(Case(*own, checked), judgement.tokens, judgement.drift_tolerance)
                if checked.verdict.agrees:
                    self.verified(answer, checked)
            _logger.debug("%s is %s: %s", answer.request.request_id, checked.verdict.value, checked.reason)
            return "ok", checked
        except Exception as error:  # a replica died, or was too busy: the check is lost, the referee is not
            if _is_impossible(answer, error):
                return "refused", self._refused(answer, str(_cause(error)))
            _logger.warning("replay of %s failed: %s", answer.request.request_id, error)
            return "failed", Checked(reason="the replay failed")

    async def _replayed(self, answer: Answer) -> Replayed:
        """The replay of what was served; one that failed for no fault of the answer's is tried again, elsewhere."""
        try:
            return await self._attempt(answer)
        except Exception as error:
            if _is_impossible(answer, error):
                raise
            avoid = (error.replica,) if isinstance(error, ReplayFailed) else ()
            _logger.info("replay of %s failed and will be retried: %s", answer.request.request_id, error)
        return await self._attempt(answer, avoid)

    async def _attempt(self, answer: Answer, avoid: Collection[str] = ()) -> Replayed:
        """The replay of what was served, including the prompt if its logprobs were returned."""
        name = f"replay-{uuid.uuid4().hex}"
        replayed = await self.replay(answer.scored(name), avoid)
        if not answer.prompt_logprobs:
            return replayed
        return replayed.after(await self.replay(answer.scored_prompt(f"{name}-prompt"), avoid))

    def _refused(self, answer: Answer, reason: str) -> Checked:
        """No engine can have made the answer: whoever did is wrong."""
        differs = answer.wire == "differs"
        checked = Checked(
            verdict=Verdict.SUSPECT, reason=reason if differs else f"impossible: {reason}", checks=("wire",) * differs
        )
        return self.book.add_impossible(Case(answer, None, checked))


def impossible(answer: Answer) -> str:
    """The limit of its request that an answer breaks, in words; "" = none.

    The replica that served it has looked already; here its word is not taken for it. Of a server that is watched only
    what was read off its request counts, since servers read limits in different ways.
    """
    if answer.broken_limit or not answer.kinds:
        return answer.broken_limit
    return broken_limit(answer.request.params, answer.token_ids)


def comparable(answer: Answer, replayed: Replayed) -> tuple[Answer, Replayed] | None:
    """Return what the weights of a replay made of an answer, beside what they give again; None = nothing.

    Where the weights were updated while the answer was made, that is what came after the last update: the engine
    computed all tokens before it again, as the replay does.
    """
    own = answer.since_update()
    if not own.token_ids or own.weight_versions != (replayed.weight_version,):
        return None
    return own, replayed if own is answer else replayed.last(len(own.token_ids))


def _cause(error: Exception) -> Exception:
    return error.why if isinstance(error, ReplayFailed) else error


def _is_impossible(answer: Answer, error: Exception) -> bool:
    """Return whether a replay was refused because of the answer: it is too long, or its ids are no tokens of the model.

    An engine with a shorter limit than the one that answered may refuse a correct answer; and a replica that is busy,
    gone, or cannot do what the request asks for has not checked the answer.
    """
    cause = _cause(error)
    if not isinstance(cause, InvalidRequest) or cause.field not in ("prompt", "scored_ids"):
        return False
    return not isinstance(cause, SequenceTooLong) or answer.num_tokens > answer.max_model_len
