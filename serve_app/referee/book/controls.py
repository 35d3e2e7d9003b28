"""Answers made wrong on purpose, by which the referee shows that it still finds what is wrong."""

import asyncio
import dataclasses
import logging
import math
import uuid
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, get_args

from serve_app.referee.book.replay_checker import Replay, comparable, impossible
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judging
from serve_app.referee.judge.verdicts import Checked, Distribution, Verdict

_logger = logging.getLogger("truespec.referee")

ControlChange = Literal["logprobs", "token", "seed", "alternatives", "limit"]
ControlResult = Literal["found", "missed", "failed"]

CONTROL_CHANGES: tuple[ControlChange, ...] = get_args(ControlChange)
CONTROL_RESULTS: tuple[ControlResult, ...] = get_args(ControlResult)

_EVERY = 50  # verified answers
_LEAST_TOKENS = 16
_SHIFT_NATS = 1.0
_CERTAIN_NATS = -0.02  # the logprob of a token whose place no other can take
_NUM_CHANGED = 3  # tokens: that a random number comes to lie at an edge of each has no chance
_LEAST_SURPRISAL_NATS = 40.0  # of an answer: other random numbers do not give it again
_FAR_NATS = 20.0  # beyond what rounding moves in any precision
_LEAST_PLACES = 4  # of numbers beside the tokens' own: a replay may know nothing of some of them
_LEAST_TEMPERATURE = 0.7  # below it an answer is more likely than its logprobs say


@dataclass(slots=True)
class Controls:
    """Has verified answers judged again with a change that no sound referee overlooks, each kind of change in turn.

    - `logprobs`: each is a nat too high.
    - `token`: the surest ones are replaced by others, and served without logprobs.
    - `seed`: it is another, and no logprobs were served.
    - `alternatives`: the numbers beside the tokens' own are 20 nats too low.
    - `limit`: `max_tokens` is one less than it has.

    `token` and `seed` are found only by what the replay says of each token's distribution. Where rules change the
    logits, some engines do not say it; so these controls are answers without rules, and begin when replays do say it of
    such answers, greedy ones and others for themselves. Nothing of a control is counted as a client's answer.
    """

    replay: Replay  # recomputes a request
    judge: Judging  # the referee's own
    _: KW_ONLY
    every: int = _EVERY  # how many verified answers there are to a control
    ended: Callable[[ControlChange, ControlResult], None] = lambda change, result: None  # whether each was found
    dump: Callable[[str, Callable[[], dict[str, Any]]], None] = lambda reason, content: None  # of one that was missed
    _since: float = math.inf  # verified answers; so that the first becomes a control
    _turn: int = 0
    # whether those answers are greedy of which replays give distributions
    _with_rows: set[bool] = field(default_factory=set)
    _next: asyncio.Queue[tuple[ControlChange, Answer]] = field(default_factory=lambda: asyncio.Queue(1))

    def offer(self, answer: Answer, checked: Checked) -> None:
        """Take a verified answer as a control if one is due; returns at once."""
        if checked.distribution is not Distribution.UNTESTED and _is_plain(answer):
            self._with_rows.add(answer.request.params.greedy)
        self._since += 1
        if self._since < self.every or self._next.full():
            return
        for turn in range(self._turn, self._turn + len(CONTROL_CHANGES)):
            change = CONTROL_CHANGES[turn % len(CONTROL_CHANGES)]
            spoiled = self._spoiled(answer, checked, change)
            if spoiled is not None:
                self._since, self._turn = 0, turn + 1
                self._next.put_nowait((change, spoiled))
                return

    async def run(self) -> None:
        """Have one control after another judged, until cancelled."""
        while True:
            change, spoiled = await self._next.get()
            result = await self._result(change, spoiled)
            if result is not None:
                self.ended(change, result)

    async def _result(self, change: ControlChange, spoiled: Answer) -> ControlResult | None:
        """None where the weights have changed since."""
        if change == "limit":
            return "found" if impossible(spoiled) else self._missed(change, spoiled, Verdict.VERIFIED, "no replay")
        try:
            replayed = await self.replay(spoiled.scored(f"control-{uuid.uuid4().hex}"), ())
            if (own := comparable(spoiled, replayed)) is None:
                return None
            verdict = self.judge(*own).checked.verdict
        except Exception as error:  # a replica died, or was too busy: that says nothing of the judge
            _logger.info("a control could not be replayed: %s", error)
            return "failed"
        return "found" if verdict is Verdict.SUSPECT else self._missed(change, spoiled, verdict, replayed.replica)

    def _missed(self, change: ControlChange, spoiled: Answer, verdict: Verdict, replayed_by: str) -> ControlResult:
        _logger.error(
            "the referee missed the change (%s) made to %s, replayed by %s: its verdict was %s",
            *(change, spoiled.request.request_id, replayed_by, verdict.value),
        )
        self.dump(f"control {change}", lambda: dataclasses.asdict(spoiled))
        return "missed"

    def _spoiled(self, answer: Answer, checked: Checked, change: ControlChange) -> Answer | None:
        """The answer with a change that cannot be overlooked; None where this one has no place for it."""
        if "logprobs" not in checked.checks:
            return None
        if len(answer.token_ids) < _LEAST_TOKENS or not answer.logprobs or None in answer.logprobs:
            return None
        if len(answer.weight_versions) > 1:  # what was changed might lie before the update
            return None
        logprobs = [logprob for logprob in answer.logprobs if logprob is not None]
        if change == "logprobs":
            return _as_control(answer, logprobs=tuple(logprob + _SHIFT_NATS for logprob in logprobs))
        params = answer.request.params
        if change == "limit":
            if not answer.kinds:  # of a server that is watched, which may read limits in another way
                return None
            params = dataclasses.replace(params, max_tokens=len(answer.token_ids) - 1, min_tokens=0)
            return _as_control(dataclasses.replace(answer, request=dataclasses.replace(answer.request, params=params)))
        if change == "alternatives":
            if "alternatives" not in checked.checks:
                return None
            places = [
                one._replace(
                    top=tuple((token, value - _FAR_NATS) for token, value in one.top),
                    scored=tuple((token, value - _FAR_NATS) for token, value in one.scored),
                )
                for one in answer.alternatives
                if one.place >= len(answer.request.prompt_token_ids) and one.top  # a control's prompt is not replayed
            ]
            return _as_control(answer, alternatives=tuple(places)) if len(places) >= _LEAST_PLACES else None
        if params.greedy not in self._with_rows or not _is_plain(answer):
            return None
        has_rounds = answer.replayable_rounds is not None
        if change == "token":
            surest = sorted(range(len(logprobs)), key=lambda index: -logprobs[index])[:_NUM_CHANGED]
            if not (params.greedy or has_rounds) or any(logprobs[index] < _CERTAIN_NATS for index in surest):
                return None
            known, token_ids = (*answer.request.prompt_token_ids, *answer.token_ids), list(answer.token_ids)
            for index in surest:
                other = next((token for token in known if token != token_ids[index]), None)
                if other is None:
                    return None
                token_ids[index] = other
            return _as_control(answer, token_ids=tuple(token_ids), logprobs=())
        can_differ = has_rounds and not params.filtered and params.temperature >= _LEAST_TEMPERATURE
        if not can_differ or -sum(logprobs) < _LEAST_SURPRISAL_NATS:
            return None
        request = dataclasses.replace(answer.request, seed=answer.request.seed ^ 1)
        return _as_control(dataclasses.replace(answer, request=request), logprobs=())


def _is_plain(answer: Answer) -> bool:
    """Return whether no rule of its request changes the logits."""
    params = answer.request.params
    return not (params.ruled or params.structure or answer.request.adapter or answer.untested)


def _as_control(answer: Answer, **changes: object) -> Answer:
    """One that teaches the referee neither a seed nor the noise of rounding."""
    request = dataclasses.replace(answer.request, canary=True)
    own = {"request": request, "num_drafted": max(1, answer.num_drafted), "prompt_logprobs": (), "alternatives": ()}
    return dataclasses.replace(answer, **(own | changes))  # type: ignore[arg-type]
