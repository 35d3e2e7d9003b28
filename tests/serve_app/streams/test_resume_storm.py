"""Many streams at once over replicas that keep dying: prefill and decode, real engines, all in one process.

A replica that dies sends nothing more; another life of it begins at once. What is said must be what one
engine says alone.
"""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest_asyncio

from serve_app.backends.base import Prefilled
from serve_app.backends.torch_backend import TorchBackend
from serve_app.referee.records import Records
from serve_app.streams.pooled import PooledTokenSource
from serve_app.streams.resuming import ReplicaLost, ResumingSource, Streamed
from serve_app.telemetry.metrics import BufferSink, Metrics
from speculative.request import Request, SamplingParams, TokenDelta
from tests.support.engines import settings
from tests.support.fake_serving import until_idle
from tests.support.tiny_models import write_tiny_model

NUM_REQUESTS = 60
AT_ONCE = 16
DEATH_EVERY = 25  # deltas


class Deaths:
    """Kills the replica that is at work, each time so many messages were sent."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lives: dict[str, int] = {}
        self._until = DEATH_EVERY
        self.count = 0

    def life(self, name: str) -> int:
        return self._lives.setdefault(name, 0)

    def reported(self, name: str) -> None:
        self._until -= 1
        if self._until == 0:
            self._until = self._rng.randint(1, 2 * DEATH_EVERY)
            self._lives[name] = self.life(name) + 1
            self.count += 1


class Decoders:
    """Decode replicas; each stream goes to the next one in turn."""

    def __init__(self, sources: Sequence[PooledTokenSource], deaths: Deaths) -> None:
        self._sources = sources
        self._deaths = deaths
        self._turn = 0

    async def stream(
        self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Streamed, None]:
        self._turn = (self._turn + 1) % len(self._sources)
        name, source = f"decode-{self._turn}", self._sources[self._turn]
        life = self._deaths.life(name)
        tokens = source.go_on(requests, emitted) if emitted else source.stream(requests)
        async with contextlib.aclosing(tokens) as deltas:
            async for delta in deltas:
                if self._deaths.life(name) != life:
                    raise ReplicaLost("killed")
                yield Streamed(delta, name)
                self._deaths.reported(name)

    async def abort(self, request_id: str) -> None:
        for source in self._sources:
            await source.abort(request_id)


class Prefills:
    """Prefill replicas, one after the other; each third prefill dies with its replica."""

    def __init__(self, engines: Sequence[TorchBackend]) -> None:
        self._engines = engines
        self._count = 0

    async def ask(self, request: Request, first_token: bool) -> Prefilled:
        self._count += 1
        number = self._count
        prefilled = await self._engines[number % len(self._engines)].prefill(request, first_token=first_token)
        if number % 3 == 0:
            raise ConnectionError("killed")
        return dataclasses.replace(prefilled, replica=f"prefill-{number % len(self._engines)}")


@pytest_asyncio.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[TorchBackend]]:
    folder = write_tiny_model(tmp_path / "stormy")
    started = [TorchBackend(str(folder), "tiny", settings(kv_cache_tokens=2048)) for _ in range(4)]
    for engine in started:
        await engine.start()
    yield started
    for engine in started:
        await engine.stop()


def asked(number: int) -> list[Request]:
    rng = random.Random(number)
    params = SamplingParams(
        max_tokens=rng.randint(4, 40),
        temperature=rng.choice((0.0, 0.8, 1.3)),
        top_k=rng.choice((0, 20)),
        logprobs=rng.choice((None, 1)),
        ignore_eos=True,
        reproducible=True,
    )
    prompt = tuple(rng.choices(range(3, 40), k=rng.choice((1, 6, 50))))
    return [
        Request(f"r{number}-{choice}", prompt, params, seed=100 * number + choice, resume=True)
        for choice in range(rng.choice((1, 1, 3)))
    ]


def answers(deltas: Sequence[TokenDelta]) -> dict[str, tuple[list[int], list[int], list[str]]]:
    """Tokens, tokens that have logprobs, and reasons, by request."""
    reported: dict[str, tuple[list[int], list[int], list[str]]] = {}
    for delta in deltas:
        tokens, logged, reasons = reported.setdefault(delta.request_id, ([], [], []))
        tokens += delta.token_ids
        logged += [entry.token_id for entry in delta.logprobs or ()]
        reasons += [] if delta.finish_reason is None else [str(delta.finish_reason)]
    return reported


async def test_a_storm_changes_no_answer_and_leaks_nothing(engines: list[TorchBackend]) -> None:
    sink = BufferSink("router")
    metrics = Metrics([sink], model_name="tiny", pool="router")
    prefills, deaths = Prefills(engines[:2]), Deaths(seed=5)
    sources = [PooledTokenSource(engine, metrics, prefills.ask) for engine in engines[2:]]
    records = Records("router", 512)
    source = ResumingSource(Decoders(sources, deaths), metrics, records, most_resumes=10_000, pause_s=0)
    alone = PooledTokenSource(engines[0], metrics)
    undisturbed = {
        name: reported
        for number in range(NUM_REQUESTS)
        for name, reported in answers([delta async for delta in alone.stream(asked(number))]).items()
    }
    sink.drain()
    waiting = iter(range(NUM_REQUESTS))
    stormy: dict[str, tuple[list[int], list[int], list[str]]] = {}

    async def client() -> None:
        for number in waiting:
            stormy.update(answers([delta async for delta in source.stream(asked(number))]))

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    assert stormy == undisturbed
    counters = sink.drain().counters
    counted = {(name, labels[-1]): value for (name, labels), value in counters.items()}
    assert deaths.count > 20
    assert counted["truespec_resumes_total", "resumed"] > deaths.count
    assert counted["truespec_prefill_failures_total", "died"] > NUM_REQUESTS // 4
    assert ("truespec_resumes_total", "failed") not in counted
    await until_idle(engines)
