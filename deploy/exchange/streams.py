"""Clients that stream completions, and what each of them received."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import httpx

_WORDS = ("one", "two", "three", "red", "green", "blue", "sea", "storm", "lamp", "tower", "keeper", "rope", "salt")
_TIMEOUT_S = 600.0

Body = dict[str, Any]
"""The body of a POST to /v1/completions."""


@dataclass(slots=True)
class Reported:
    """The outcome of one streamed request."""

    status: int = 0  # of HTTP; 0 = no answer at all
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    finish_reason: str = ""
    error: str = ""
    first_token_s: float = 0.0
    whole_s: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether it finished by itself."""
        return self.finish_reason in ("stop", "length") and not self.error


@dataclass(frozen=True, slots=True)
class Differences:
    """What a disturbance changed in one answer."""

    identical: bool
    duplicated_tokens: int
    missing_tokens: int


def plan(model: str, count: int, seed: int, max_tokens: int) -> list[Body]:
    """Requests whose answers are functions of seed and prompt: greedy and sampled, with logprobs, stops and filters.

    Their prompts have from a few to some hundred words, some of them in common.
    """
    rng = random.Random(seed)
    kinds: tuple[Body, ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.2, "stop": ["zebra", "q u"], "presence_penalty": 0.5},
    )
    bodies = []
    for number in range(count):
        words = [rng.choice(_WORDS) for _ in range(rng.choice((4, 40, 160)))]
        body = {
            "model": model,
            "prompt": f"{number % 7} " + " ".join(words),
            "max_tokens": rng.randint(max_tokens // 4, max_tokens),
            "seed": rng.getrandbits(32),
            "reproducible": True,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        bodies.append(body | kinds[number % len(kinds)])
    return bodies


async def ask_all(
    base_url: str, bodies: Sequence[Body], concurrency: int, done: Callable[[int], None] = lambda number: None
) -> list[Reported]:
    """Send all of them, a few at once; `done` gets the number that have ended. A refused one is retried."""
    reported: list[Reported | None] = [None] * len(bodies)
    waiting = iter(enumerate(bodies))
    async with httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S) as http:

        async def client() -> None:
            for number, body in waiting:
                reported[number] = await until_admitted(http, body)
                done(sum(one is not None for one in reported))

        await asyncio.gather(*(client() for _ in range(concurrency)))
    return [one or Reported() for one in reported]


async def until_admitted(http: httpx.AsyncClient, body: Body) -> Reported:
    """Stream one completion to its end; a refused one is retried a second later."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        reported = await ask(http, body)
        if reported.status not in (429, 503) or time.monotonic() > deadline:
            return reported
        await asyncio.sleep(1.0)


async def ask(http: httpx.AsyncClient, body: Body) -> Reported:
    """Stream one completion to its end, whatever that is."""
    reported = Reported()
    began = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            reported.status = response.status_code
            if response.status_code == httpx.codes.OK:
                async for choice in _choices(response, reported):
                    _take(reported, choice, time.perf_counter() - began)
            else:
                reported.error = (await response.aread()).decode(errors="replace")[:500]
    except httpx.HTTPError as error:
        reported.error = repr(error)
    reported.whole_s = time.perf_counter() - began
    return reported


async def _choices(response: httpx.Response, reported: Reported) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            reported.error = reported.error or str(event.get("error", ""))
            for choice in event.get("choices", ()):
                yield choice


def _take(reported: Reported, choice: dict[str, Any], elapsed_s: float) -> None:
    reported.first_token_s = reported.first_token_s or elapsed_s
    reported.text += choice["text"]
    reported.token_ids += choice.get("token_ids") or ()
    reported.num_logprobs += len((choice.get("logprobs") or {}).get("token_logprobs") or ())
    reported.finish_reason = choice.get("finish_reason") or reported.finish_reason


def differences(undisturbed: Reported, disturbed: Reported) -> Differences:
    """Compare two answers to the same request.

    Tokens that only the disturbed one has are reported as duplicated, those that only the other has as missing; if one
    run of tokens replaces another, the difference of their lengths counts."""
    same = (undisturbed.token_ids, undisturbed.text, undisturbed.num_logprobs, undisturbed.finish_reason) == (
        disturbed.token_ids,
        disturbed.text,
        disturbed.num_logprobs,
        disturbed.finish_reason,
    )
    duplicated = missing = 0
    matcher = SequenceMatcher(None, undisturbed.token_ids, disturbed.token_ids, autojunk=False)
    for _, from_a, to_a, from_b, to_b in () if same else matcher.get_opcodes():
        duplicated += max(0, (to_b - from_b) - (to_a - from_a))
        missing += max(0, (to_a - from_a) - (to_b - from_b))
    return Differences(same, duplicated, missing)
