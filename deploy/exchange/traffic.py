"""Ordinary requests to a server, of many kinds at once, until somebody has seen enough."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.exchange.client import AsyncClient, Attempt
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS

SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
)
"""Sampling parameters of the requests, in turn."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests that are sent; every other one is streamed."""

    model: str  # its served name
    prompts: Sequence[Mapping[str, Any]]  # of completions (`prompt`) and chats (`messages`)
    settings: Sequence[Mapping[str, Any]] = SETTINGS  # fields of the requests, one after the other
    max_tokens: Sequence[int] = (24, 64, 128)
    at_once: int = 16  # requests in flight

    def bodies(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Paths and bodies without end; each kind of prompt meets each setting, streamed and not."""
        for number in itertools.count():
            prompt = self.prompts[number % len(self.prompts)]
            setting = self.settings[(number // 2) % len(self.settings)]
            body = {"model": self.model, **prompt, **setting}
            body["max_tokens"] = self.max_tokens[(number // 3) % len(self.max_tokens)]
            if number % 2:
                body["stream"] = True
            yield CHAT if "messages" in prompt else COMPLETIONS, body


async def drive(
    url: str,
    traffic: Traffic,
    enough: Callable[[], bool],
    api_key: str | None = None,
    seen: Callable[[Attempt], None] = lambda _: None,
) -> Counter[str]:
    """Send requests until it is enough; `seen` gets the result of each. Returns how many were answered, by `ok`, a
    status, or `no reply`."""
    counts: Counter[str] = Counter()
    bodies = traffic.bodies()
    async with AsyncClient(url, api_key) as client:

        async def work() -> None:
            while not enough():
                path, body = next(bodies)
                attempt = await client.ask(body, path)
                seen(attempt)
                counts["ok" if attempt.ok else str(attempt.status or "no reply")] += 1

        await asyncio.gather(*(work() for _ in range(traffic.at_once)))
    return counts
