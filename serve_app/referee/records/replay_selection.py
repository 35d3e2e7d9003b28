"""The selection of replies to be checked, and what is kept of them until they went out."""

import asyncio
import enum
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace

from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Checked, split_id
from serve_app.referee.records.records import Record
from serve_app.referee.wire.exchange import Exchange
from speculative.request import Request

_logger = logging.getLogger("truespec.referee")

_AS_SENT_SHARE = 0.25
_CHANGED = "wire: what was sent is not what was judged before"

Read = Callable[[Exchange, Sequence[Record]], list[Answer]]
"""Reads the answers in an exchange, one for each record of its choices."""

Submit = Callable[[Answer, str], None]
"""Hands an answer to the referee, and what became of its bytes, as `REPLY_BYTES` of the metrics names it; must not
block."""

Check = Callable[[Answer], Awaitable[Checked]]
"""Hands an answer to the referee; what comes of it may be waited for."""


def chosen(reply_id: str, share: float) -> bool:
    """Return whether a reply is in the replayed share: a function of its id alone, so that every replica agrees."""
    digest = hashlib.blake2b(reply_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


class Selection(enum.Enum):
    """The choice whether a request is checked, and how it is computed then."""

    NOT_CHECKED = enum.auto()
    AS_SENT = enum.auto()  # without logprobs if its client asked for none: a fault may exist only there
    WITH_LOGPROBS = enum.auto()


@dataclass(slots=True)
class _Expected:
    """A reply that is checked, from the choice of it until its bytes have gone out."""

    awaited: bool  # whether its client waits for the verdict
    context: Context  # of its request, which says whose it is
    records: list[Record] = field(default_factory=list)
    judged: list[Answer] | None = None  # what was judged of it before it went out; None = nothing


@dataclass(slots=True)
class Checks:
    """The checks of one replica's replies. A reply is checked with all of its choices, as its client got it."""

    chosen: Callable[[str], bool]  # whether a reply, by its id, is checked in any case
    shows_distribution: Callable[[Request], bool]  # whether a replay of a request gives more than logprobs
    read: Read  # the answers in the bytes of a reply, beside their records
    submit: Submit  # for answers that nobody waits for
    check: Check  # for those that somebody does
    timeout_s: float  # the longest an answer waits
    longest_s: float = 600.0  # that a client may take after a choice has ended; then the tokens are checked alone
    _replies: dict[str, _Expected] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    _says_unread: bool = True

    def expect(self, reply_id: str, *, awaited: bool) -> bool:
        """Return whether a reply is checked. If it is, `sent` or `lost` must follow. awaited: whether its client asks
        for the verdict."""
        checked = awaited or self.chosen(reply_id)
        if checked:
            self._replies[reply_id] = _Expected(awaited, copy_context())
        return checked

    def select(self, request: Request) -> Selection:
        """Return whether a request is to be checked; with its logprobs, if its client waits for the verdict."""
        reply_id, _ = split_id(request.request_id)
        reply = self._replies.get(reply_id)
        if reply is not None and reply.awaited:
            return Selection.WITH_LOGPROBS
        if not self.chosen(reply_id):
            return Selection.NOT_CHECKED
        as_sent = self.shows_distribution(request) and chosen(f"as sent {reply_id}", _AS_SENT_SHARE)
        return Selection.AS_SENT if as_sent else Selection.WITH_LOGPROBS

    def ended(self, record: Record) -> None:
        """A request that is checked has ended."""
        reply_id, _ = split_id(record.request.request_id)
        reply = self._replies.get(reply_id)
        if reply is None:  # it broke a limit, or its bytes do not pass the tap
            self._submit_all(_traces([record]), "not_kept")
            return
        if not reply.records:
            asyncio.get_running_loop().call_later(self.longest_s, self.lost, reply_id, "ended_early")
            # If it was sent by then, `lost` finds it gone and does nothing.
        reply.records.append(record)

    async def verdicts(self, request_ids: Sequence[str], preview: Exchange | None) -> list[Checked]:
        """Return the verdicts on the choices of a reply that is about to go out, as far as they come in time.

        Args:
            request_ids: of its choices.
            preview: the reply as it would go out without them; None = nobody kept it.
        """
        reply = self._replies.get(split_id(request_ids[0])[0])
        checks: dict[str, asyncio.Future[Checked]] = {}
        if reply is not None:
            reply.judged, _ = await self._answers(preview, reply.records)
            checks = {one.request.request_id: self._judge(one) for one in reply.judged}
        if checks:
            await asyncio.wait(checks.values(), timeout=self.timeout_s)
        return [_result(checks.get(request_id)) for request_id in request_ids]

    def sent(self, reply_id: str, exchange: Exchange) -> asyncio.Task[None]:
        """A reply went out whole. Returns the reading of it, if it is not lost already."""
        reply = self._replies.pop(reply_id, None)
        context = None if reply is None else reply.context
        reading = asyncio.get_running_loop().create_task(self._judge_sent(reply, exchange), context=context)
        self._tasks.add(reading)
        reading.add_done_callback(self._tasks.discard)
        return reading

    def lost(self, reply_id: str, why: str) -> None:
        """A reply ended early, or nobody kept or took it: only its tokens are checked. why: as `Submit` has it."""
        reply = self._replies.pop(reply_id, None)
        if reply is not None and reply.judged is None:
            reply.context.run(self._submit_all, _traces(reply.records), why)

    async def settled(self) -> None:
        """Wait until all that went out has been read."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def _judge_sent(self, reply: _Expected | None, exchange: Exchange) -> None:
        if reply is None:
            return
        async with self._one_at_a_time:  # nobody waits for it, and serving needs the cores
            answers, how = await self._answers(exchange, reply.records)
        if reply.judged is None:
            self._submit_all(answers, how)
            return
        for answer in answers:
            if answer not in reply.judged:
                self._judge(replace(answer, wire="differs", broken_limit=answer.broken_limit or _CHANGED))

    async def _answers(self, exchange: Exchange | None, records: Sequence[Record]) -> tuple[list[Answer], str]:
        """The answers in an exchange, those of the records alone where there is none; and what became of its bytes."""
        by_choice = sorted(records, key=lambda one: split_id(one.request.request_id)[1])
        if exchange is None:
            return _traces(by_choice), "too_large"
        try:
            # "unread" holds for those answers alone that come back without `wire`: their request could not be read.
            return await asyncio.to_thread(self.read, exchange, by_choice), "unread"
        except Exception as error:
            if self._says_unread:
                self._says_unread = False
                _logger.error("A reply could not be read: %s. Others like it are not logged.", type(error).__name__)
            return _traces(by_choice), "unread"

    def _submit_all(self, answers: Sequence[Answer], how: str) -> None:
        for answer in answers:
            self.submit(answer, answer.wire or how)

    def _judge(self, answer: Answer) -> asyncio.Future[Checked]:
        """Begin a check that goes on whoever waits for it: the answer is evidence."""
        check = asyncio.ensure_future(self.check(answer))
        check.add_done_callback(_error)  # which is nobody's where nobody waits
        return check


def _traces(records: Sequence[Record]) -> list[Answer]:
    """The answers that records give by themselves."""
    return [answer for record in records if (answer := record.answer()) is not None]


def _result(check: asyncio.Future[Checked] | None) -> Checked:
    if check is None:
        return Checked(reason="it ended before there was anything to compare")
    if not check.done():
        return Checked(reason="the replay took too long")
    return check.result() if _error(check) is None else Checked(reason="the referee did not answer")


def _error(check: asyncio.Future[Checked]) -> BaseException | None:
    return asyncio.CancelledError() if check.cancelled() else check.exception()
