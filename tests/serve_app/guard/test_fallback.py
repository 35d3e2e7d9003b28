"""The whole loop without Ray: a faulty engine, a referee that replays on another, a breaker, canaries, a way back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from serve_app.backends.base import Replayed
from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.guard.breaker import Breaker, BreakerSettings, BreakerState
from serve_app.guard.breaker_control import BreakerController
from serve_app.guard.canary import Canary, CanarySettings
from serve_app.guard.heartbeat import Report
from serve_app.guard.referee_counts import RefereeCounts
from serve_app.guard.replica_registry import ReplicaRegistry
from serve_app.referee.answer import Answer
from serve_app.referee.records import Record, Records
from serve_app.referee.replay_selection import Selection
from serve_app.referee.replica_book import ReplicaBook
from serve_app.referee.strata import SERVED_STRATA
from serve_app.referee.verdicts import Finished
from serve_app.streams.observed import ObservedSource, SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from speculative.config import EngineConfig
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from tests.support.engines import settings
from tests.support.faulty_services import Fault, accept_every_draft, misplace_rounds_with_drafts
from tests.support.referees import TOLERANCE, counted_checker
from tests.support.tiny_models import write_tiny_model

PROMPT = tuple([5, 9, 17, 33] * 5)


class Service:
    """One replica and its referee; another engine computes the replays."""

    def __init__(self, folder: Path, fault: Fault, flag: Path) -> None:
        def make(path: Path, config: EngineConfig) -> EngineCore:
            engine = load_engine(path, config)
            fault(engine, flag)
            return engine

        config = settings(block_size=16, kv_cache_tokens=2048, max_num_seqs=4)
        self.backend = TorchBackend(str(folder), "tiny", config, make)
        self.other = TorchBackend(str(folder), "tiny", config)
        self.now = 1000.0
        self.finished: list[Finished] = []
        self.buffer = BufferSink("r1")
        metrics = Metrics([self.buffer], model_name="tiny", pool="monolith")
        counts = RefereeCounts(metrics, SERVED_STRATA)
        self.book = ReplicaBook(TOLERANCE, alarmed=counts.alarmed, clock=self.clock)
        self.registry = ReplicaRegistry(self.book, counts, clock=self.clock)
        self.checker = counted_checker(self._replay, self.book, counts)
        records = Records("r1", 512, clock=self.clock)
        pooled = PooledTokenSource(self.backend, metrics)
        self.source = ObservedSource(
            pooled,
            metrics,
            records,
            select=lambda _: Selection.WITH_LOGPROBS,
            ended=self._ended,
            limits=SourceLimits(8, 60),
        )
        self.canary = Canary(pooled, records, self.checker.check, CanarySettings(3, min_drafted=32))
        self.breaker = Breaker(BreakerSettings(cooldown_s=10, window_s=1000, suspect_s=60), self.clock)
        self.breaker_controller = BreakerController(
            ("r1", "monolith"), self.backend, self.breaker, metrics, self.canary.try_out, self.clock
        )
        self._number = 0

    def clock(self) -> float:
        return self.now

    async def _replay(self, request: Request, _: object) -> Replayed:
        return await self.other.replay(request)

    def _ended(self, record: Record, answer: Answer | None) -> None:
        self.canary.remember(record.request)
        self.finished.append(Finished(record.request.request_id, record.began_at, self.now))
        assert answer is not None
        self.checker.submit(answer)

    async def ask(self, *, temperature: float = 1.0) -> tuple[str, list[int], int]:
        """An answer: its id, tokens, and how many drafts were made for it."""
        self._number += 1
        name = f"cmpl-{self._number}"
        params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
        deltas = [delta async for delta in self.source.stream([Request(f"{name}-0", PROMPT, params, self._number)])]
        assert deltas[-1].error is None
        return name, [t for delta in deltas for t in delta.token_ids], sum(delta.num_drafted for delta in deltas)

    async def second(self) -> None:
        """What a replica does once a second."""
        await asyncio.sleep(0.02)
        self.now += 1
        self.breaker_controller.inspect(self.backend.take_stats())
        trips, finished = self.breaker_controller.take_trips(), tuple(self.finished)
        self.finished.clear()
        orders = self.registry.on_heartbeat(
            Report(self.breaker_controller.status, self.buffer.drain(), finished, trips)
        )
        self.breaker_controller.apply(orders)
        self.breaker_controller.act()

    async def verdict_of(self, name: str) -> str:
        """The verdict on an answer, once it was checked."""
        while (reported := self.book.verdicts.reply(name)) is None or reported["verdict"] == "unverified":
            await asyncio.sleep(0.01)
        return str(reported["verdict"])

    async def canary_began(self) -> None:
        """Let time pass until a canary begins."""
        while self.breaker.state is BreakerState.OPEN:
            await self.second()

    async def canary_result(self) -> BreakerState:
        """Let time pass until a canary begins, then wait for its end; where the breaker stands then."""
        await self.canary_began()
        while self.breaker.state is BreakerState.CANARY:
            await asyncio.sleep(0.01)
        return self.breaker.state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("fallback"), vocab_size=64)


@pytest.fixture
async def service(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    made = Service(folder, request.param, tmp_path / "fault")
    await made.backend.start()
    await made.other.start()
    work = asyncio.create_task(made.checker.run())
    yield made
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    await made.backend.stop()
    await made.other.stop()


async def plain_answer(service: Service, number: int, temperature: float) -> list[int]:
    """What an engine without the fault says, with nothing drafted."""
    params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True, speculate=False)
    deltas = [delta async for delta in service.other.generate(Request(f"plain-{number}", PROMPT, params, number))]
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize(
    ("service", "reasons"),
    [(accept_every_draft, {"selfcheck", "law"}), (misplace_rounds_with_drafts, {"drift", "law"})],
    indirect=["service"],
    ids=["accepts everything", "misplaces rounds"],
)
async def test_a_faulty_replica_falls_back_and_comes_back(service: Service, tmp_path: Path, reasons: set[str]) -> None:
    flag = tmp_path / "fault"
    for _ in range(3):
        await service.ask()
        await service.second()
    assert service.breaker.state is BreakerState.CLOSED
    flag.touch()
    asked = 0
    while service.breaker.state is BreakerState.CLOSED and asked < 40:
        name, _, _ = await service.ask()
        asked += 1
        await service.second()
    assert service.breaker.state is BreakerState.OPEN
    assert service.breaker.reason in reasons
    await service.second()
    assert (service.book.verdicts.reply(name) or {})["verdict"] == "suspect"
    # Plainly, and rightly, while the fault is still there.
    for temperature in (0.0, 1.0):
        name, tokens, num_drafted = await service.ask(temperature=temperature)
        assert tokens == await plain_answer(service, service._number, temperature)
        assert num_drafted == 0
    assert await service.verdict_of(name) == "verified"
    # A canary fails as long as it is, and harms nobody who is served beside it.
    await service.canary_began()
    canary = asyncio.create_task(service.canary_result())
    while not canary.done():
        for temperature in (0.0, 1.0):
            _, tokens, num_drafted = await service.ask(temperature=temperature)
            assert tokens == await plain_answer(service, service._number, temperature)
            assert num_drafted == 0
    assert canary.result() is BreakerState.OPEN
    flag.unlink()
    assert await service.canary_result() is BreakerState.CLOSED
    name, _, num_drafted = await service.ask()
    assert num_drafted > 0
    assert await service.verdict_of(name) == "verified"
    assert service.breaker.state is BreakerState.CLOSED
