"""A rehearsal: one replica answers requests of its own with a known fault, so that operators see what finds it, how
fast, and what the breaker does then. Clients' requests are computed as ever."""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from serve_app.guard.canary import Canary
from serve_app.referee.judge.verdicts import REHEARSED, Verdict
from speculative.errors import EngineFault
from speculative.request import Request, SamplingParams

_logger = logging.getLogger("truespec.rehearsal")

_LONGEST_S = 30.0
_MAX_TOKENS = 48  # of each answer
_PLAIN_ANSWERS = 2  # that are computed again once speculation is off


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The course of a replica's latest rehearsal.

    state: `running`, then `found`, `missed` (nothing was found in time) or `failed` (the log says why).
    """

    began_at: float  # unix seconds
    state: str = "running"
    found_by: str = ""  # the check that found the fault, after `num_tokens` of answers with it
    found_at: float = 0.0
    num_tokens: int = 0
    num_verified: int = 0  # answers that were made after that, without speculation, and found right


@dataclass(slots=True)
class Rehearsing:
    """Runs the rehearsals of one replica."""

    canary: Canary  # serves requests of the replica's own and has them judged
    note: Callable[[Rehearsal], None]  # gets the state of the rehearsal after each step
    found: Callable[[], None]  # is called once the fault is found: opens the breaker
    _now: Rehearsal = field(default_factory=lambda: Rehearsal(0.0))

    async def run(self) -> None:
        """Answer with the fault until it is found, and then without speculation; the breaker tries that out again."""
        self._now = Rehearsal(time.time())
        self._note()
        try:
            async with asyncio.timeout(_LONGEST_S):
                await self._rehearse()
        except TimeoutError:
            if self._now.state == "running":
                self._note(state="missed" if self._now.num_tokens else "failed")
                _logger.warning("nothing was found in %.0f s, in %d tokens", _LONGEST_S, self._now.num_tokens)
        except Exception:
            _logger.warning("the rehearsal failed", exc_info=True)
            self._note(state="failed")

    async def _rehearse(self) -> None:
        prompts, number = self.canary.prompts(), 0
        while self._now.num_verified < _PLAIN_ANSWERS:
            params = SamplingParams(temperature=(number + 1) % 2, max_tokens=_MAX_TOKENS, logprobs=0, ignore_eos=True)
            name, prompt = f"rehearsal-{uuid.uuid4().hex}-0", prompts[number // 2 % len(prompts)]
            faulty = self._now.state == "running"
            answer, checked = await self.canary.ask(Request(name, prompt, params, canary=True, rehearsal=faulty))
            number += 1
            suspect = checked.verdict is Verdict.SUSPECT
            if not faulty:
                if suspect:
                    raise EngineFault(f"an answer without speculation is suspect, too: {checked.reason}")
                self._note(num_verified=self._now.num_verified + checked.verdict.agrees)
                continue
            self._note(num_tokens=self._now.num_tokens + len(answer.token_ids))
            if suspect:
                _logger.warning("found after %d tokens: %s", self._now.num_tokens, checked.reason)
                self.found()
                found_by = checked.reason.removeprefix(REHEARSED).partition(":")[0]
                self._note(state="found", found_by=found_by, found_at=time.time())

    def _note(self, **fields: Any) -> None:
        self._now = dataclasses.replace(self._now, **fields)
        self.note(self._now)
