"""Requests of a replica's own, on which speculation is tried out before clients get it back.

They are client requests of late, with fresh seeds: what the replica had to do when it was found wrong. Each is served
like a client's, handoff included, and then replayed. Every other one is greedy: it drafts more, and a single token that
is not the likeliest proves a fault.
"""

import contextlib
import dataclasses
import itertools
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from serve_app.backends.base import TokenSource, is_taken_in
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.records.records import Records
from speculative.errors import EngineFault, InvalidRequest, TruespecError
from speculative.request import FinishReason, Request, SamplingParams

_logger = logging.getLogger("truespec.canary")

_LONGEST_PROMPT = 2048  # tokens
_MAX_TOKENS = 48
_MOST_ROUNDS = 4
_REPEATING = tuple(3 + index % 7 for index in range(42))  # a prompt for a replica that has served nobody

_UNJUDGED = Checked(Verdict.VERIFIED, "served")

Judge = Callable[[Answer], Awaitable[Checked]]
"""Has a request replayed."""


@dataclass(slots=True)
class Canary:
    """Tries speculation out on one replica."""

    source: TokenSource  # what serves the replica's requests
    records: Records  # what is served
    judge: Judge | None  # None where logprobs cannot be compared, and only the engine's own checks watch
    num_requests: int = 4  # of a trial
    min_drafted: int = 1  # draft tokens; a trial with fewer, even after four times the requests, has shown nothing
    _recent: deque[Request] = field(init=False)  # of clients

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.num_requests)

    def remember(self, request: Request) -> None:
        """A client's request that may be tried again."""
        if request.params.speculate and len(request.prompt_token_ids) <= _LONGEST_PROMPT:
            self._recent.append(request)

    def prompts(self) -> list[tuple[int, ...]]:
        """Clients' prompts of late, and a made-up one."""
        return [*(one.prompt_token_ids for one in self._recent), _REPEATING]

    async def ask(self, request: Request) -> tuple[Answer, Checked]:
        """Serve a request of the replica's own, and have it judged."""
        record = self.records.begin(request)
        try:
            async with contextlib.aclosing(self.source.stream([request])) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is FinishReason.ERROR:
                        raise EngineFault(delta.error or "the engine gave no reason")
                    if not is_taken_in(delta):
                        record.take(delta)
        finally:
            self.records.end(request.request_id)
        answer = record.answer()
        if answer is None:
            raise TruespecError("nothing was said")
        return answer, await self.judge(answer) if self.judge is not None else _UNJUDGED

    async def try_out(self) -> bool | None:
        """Return whether speculation is right now; None where the trial has shown nothing."""
        num_drafted = 0
        for number, request in enumerate(list(self._requests())):
            if number >= self.num_requests and num_drafted >= self.min_drafted:
                break
            try:
                answer, checked = await self.ask(request)
            except InvalidRequest:  # its own rules left no token to say: it shows nothing
                continue
            except EngineFault as error:
                _logger.warning("a canary failed: %s", error)
                return False
            except (TruespecError, ConnectionError) as error:
                _logger.warning("a canary could not be served: %s", error)
                return None
            num_drafted += answer.num_drafted
            if not checked.verdict.agrees:
                _logger.warning("a canary is %s: %s", checked.verdict, checked.reason)
                return False if checked.verdict is Verdict.SUSPECT else None
        return True if num_drafted >= self.min_drafted else None

    def _requests(self) -> Iterator[Request]:
        made_up = Request("canary", _REPEATING, SamplingParams(ignore_eos=True))
        known = (*self._recent, made_up)
        most = _MOST_ROUNDS * self.num_requests
        for number, request in enumerate(itertools.islice(itertools.cycle(known), most)):
            params = dataclasses.replace(
                request.params,
                temperature=0.0 if number % 2 == 0 else request.params.temperature,
                max_tokens=_MAX_TOKENS,
                min_tokens=min(request.params.min_tokens, _MAX_TOKENS),
                logprobs=0,
                logprob_token_ids=(),
                prompt_logprobs=None,
            )
            name = f"canary-{uuid.uuid4().hex}-0"
            prompt, adapter, salt = request.prompt_token_ids, request.adapter, request.cache_salt
            yield Request(name, prompt, params, canary=True, adapter=adapter, cache_salt=salt)
