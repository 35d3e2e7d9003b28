"""The selection of finished requests to be checked, and the answers that wait for it."""

import asyncio
import contextlib
import enum
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

from serve_app.referee.answer import Answer
from serve_app.referee.verdicts import Checked
from speculative.request import Request

_AS_SENT_SHARE = 0.25

Submit = Callable[[Answer], None]
"""Hands an answer to the referee; must not block."""

Check = Callable[[Answer], Awaitable[Checked]]
"""Hands an answer to the referee; what comes of it may be waited for."""


def chosen(request_id: str, share: float) -> bool:
    """Return whether a request is in the replayed share: a function of its id alone, so that every replica agrees."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


class Selection(enum.Enum):
    """The choice whether a request is checked, and how it is computed then."""

    NOT_CHECKED = enum.auto()
    AS_SENT = enum.auto()  # without logprobs if its client asked for none: a fault may exist only there
    WITH_LOGPROBS = enum.auto()


class Checks:
    """The checks of one replica's requests.

    Args:
        chosen: whether a request, by its id, is checked in any case.
        shows_distribution: whether a replay of a request gives more than logprobs.
        submit: for answers that nobody waits for.
        check: for those that somebody does.
        timeout_s: the longest an answer waits.
    """

    def __init__(
        self,
        chosen: Callable[[str], bool],
        shows_distribution: Callable[[Request], bool],
        submit: Submit,
        check: Check,
        timeout_s: float,
    ) -> None:
        self._chosen = chosen
        self._shows_distribution = shows_distribution
        self._submit = submit
        self._check = check
        self._timeout_s = timeout_s
        self._awaited: dict[str, asyncio.Future[Checked] | None] = {}  # None until the request has ended

    @contextlib.contextmanager
    def expecting(self, request_ids: Sequence[str]) -> Iterator[None]:
        """Within it, these requests are checked and their verdicts kept for `verdicts`."""
        self._awaited |= dict.fromkeys(request_ids)
        try:
            yield
        finally:
            for request_id in request_ids:
                del self._awaited[request_id]  # a check goes on: the answer is evidence, whoever waits for its verdict

    def select(self, request: Request) -> Selection:
        """Return whether a request is to be checked; with its logprobs, if its client waits for the verdict."""
        request_id = request.request_id
        if request_id in self._awaited:
            return Selection.WITH_LOGPROBS
        if not self._chosen(request_id):
            return Selection.NOT_CHECKED
        as_sent = self._shows_distribution(request) and chosen(f"as sent {request_id}", _AS_SENT_SHARE)
        return Selection.AS_SENT if as_sent else Selection.WITH_LOGPROBS

    def ended(self, answer: Answer) -> None:
        """A request that was chosen has ended."""
        request_id = answer.request.request_id
        if request_id in self._awaited:
            self._awaited[request_id] = check = asyncio.ensure_future(self._check(answer))
            check.add_done_callback(_error)  # which is nobody's where nobody waits
        else:
            self._submit(answer)

    async def verdicts(self, request_ids: Sequence[str]) -> list[Checked]:
        """Return what is known of requests that were expected, once their checks are over or have taken too long."""
        checks = [check for request_id in request_ids if (check := self._awaited[request_id]) is not None]
        if checks:
            await asyncio.wait(checks, timeout=self._timeout_s)
        return [_result(self._awaited[request_id]) for request_id in request_ids]


def _result(check: asyncio.Future[Checked] | None) -> Checked:
    if check is None:
        return Checked(reason="it ended before there was anything to compare")
    if not check.done():
        return Checked(reason="the replay took too long")
    return check.result() if _error(check) is None else Checked(reason="the referee did not answer")


def _error(check: asyncio.Future[Checked]) -> BaseException | None:
    return asyncio.CancelledError() if check.cancelled() else check.exception()
