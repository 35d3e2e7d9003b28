"""Clients that stream completions, and what each of them received."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from deploy.exchange.client import AsyncClient, Attempt
from serve_app.referee.wire.reply import Choice, Json

_WORDS = ("one", "two", "three", "red", "green", "blue", "sea", "storm", "lamp", "tower", "keeper", "rope", "salt")
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences that a disturbance made to one answer."""

    identical: bool
    duplicated_tokens: int
    missing_tokens: int


def plan(model: str, count: int, seed: int, max_tokens: int) -> list[Json]:
    """Completions whose answers are functions of seed and prompt: greedy and sampled, with logprobs, stops and filters.

    Their prompts have from a few to some hundred words, some of them in common.
    """
    rng = random.Random(seed)
    kinds: tuple[Json, ...] = (
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
    base_url: str, bodies: Sequence[Json], concurrency: int, done: Callable[[int], None] = lambda number: None
) -> list[Attempt]:
    """Send all of them, a few at once; `done` gets the number that have ended. A refused one is retried."""
    attempts: dict[int, Attempt] = {}
    waiting = iter(enumerate(bodies))
    async with AsyncClient(base_url) as client:

        async def work() -> None:
            for number, body in waiting:
                attempts[number] = await until_admitted(client, body)
                done(len(attempts))

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return [attempts[number] for number in range(len(bodies))]


async def until_admitted(client: AsyncClient, body: Json) -> Attempt:
    """Stream one completion to its end; a refused one is retried a second later."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        attempt = await client.ask(body)
        if attempt.status not in (429, 503) or time.monotonic() > deadline:
            return attempt
        await asyncio.sleep(1.0)


def complete(attempt: Attempt) -> bool:
    """Return whether an answer finished by itself."""
    return attempt.ok and attempt.reply.first.finish_reason in ("stop", "length")


def differences(undisturbed: Attempt, disturbed: Attempt) -> Differences:
    """Compare two answers to the same request.

    Tokens that only the disturbed one has are reported as duplicated, those that only the other has as missing; if one
    run of tokens replaces another, the difference of their lengths counts."""
    one, other = undisturbed.reply.first, disturbed.reply.first
    same = _compared(one) == _compared(other)
    duplicated = missing = 0
    matcher = SequenceMatcher(None, one.token_ids or (), other.token_ids or (), autojunk=False)
    for _, from_a, to_a, from_b, to_b in () if same else matcher.get_opcodes():
        duplicated += max(0, (to_b - from_b) - (to_a - from_a))
        missing += max(0, (to_a - from_a) - (to_b - from_b))
    return Differences(same, duplicated, missing)


def _compared(choice: Choice) -> tuple[object, ...]:
    return choice.token_ids or [], choice.text, len(choice.logprobs or ()), choice.finish_reason
