"""Referees, replayers and answers that tests of several rooms share."""

import asyncio
import gc
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from serve_app.backends.base import Prefilled, Replayed, ReplayFailed
from serve_app.cluster.desired_state import CONFIGURED, DesiredState
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.deployments import runtime, stream_router
from serve_app.deployments.engine_host import EngineHost
from serve_app.deployments.stream_router import DecodeWorker
from serve_app.guard.breaker import BreakerState, Mode
from serve_app.guard.heartbeat import Orders, ReplicaStatus, Report
from serve_app.guard.referee_counts import RefereeCounts
from serve_app.guard.replica_registry import ReplicaRegistry
from serve_app.referee.book.dumps import DumpFolder
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.strata import SERVED_STRATA
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.records.records import Record
from serve_app.streams.pooled import PooledTokenSource
from serve_app.streams.resuming import Streamed
from serve_app.telemetry.metrics import MetricBatch, Metrics, PrometheusSink, Sink
from serve_app.telemetry.tracing import Carried, Tracing
from speculative.engine import EngineCore
from speculative.request import DEFAULT_VERSION, ReplayedToken, Request, SamplingParams, TokenKind, TokenLogprobs
from tests.support.fake_backend import FakeBackend, FakeConfig

NUM_TOKENS = 20
# Of a service in float32, but for jumps and shifts: what the fakes are moved by is to be neither.
TOLERANCE = Tolerance(max_tme=1.05, edge_nats=1e-3, distribution=0.01, jump_nats=1.0, shift_nats=1e-3)
RIGHT = ReplayedToken(0.5, 0.5, 0.7, 0.7, 0.0, 0.0)


class Replayer:
    """Gives served logprobs back, moved by `drift`, with distribution rows of a test's choosing; may stand still or
    fail."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.drift = 0.0
        self.beside = -1.0  # the logprob of every token that is looked up
        self.row: Callable[[int], ReplayedToken | None] = lambda _: RIGHT
        self.open = asyncio.Event()
        self.open.set()
        self.avoided: list[tuple[str, ...]] = []
        self.fails = 0  # times
        self.refuses: Exception | None = None

    async def __call__(self, request: Request, avoid: Collection[str]) -> Replayed:
        self.asked.append(request)
        self.avoided.append(tuple(avoid))
        await self.open.wait()
        if self.fails:
            self.fails -= 1
            raise ReplayFailed("p8", RuntimeError("the replica is gone"))
        if self.refuses is not None:
            raise ReplayFailed("p8", self.refuses)
        assert request.score_from is not None
        count = len(request.prompt_token_ids) - request.score_from
        rows = [self.row(index) for index in range(count)]
        distribution = tuple(row for row in rows if row is not None) or None
        entries = tuple(
            TokenLogprobs(-1, -1.0, 1, (), tuple((one, self.beside) for one in ids)) for ids in request.scored_ids
        )
        return Replayed((-1.0 + self.drift,) * count, distribution, "p9", entries=entries)


class EngineReplay:
    """An engine that replays."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    async def __call__(self, request: Request, _: object = ()) -> Replayed:
        self._engine.add(request)
        while self._engine.has_work:
            for delta in self._engine.step():
                assert delta.logprobs is not None, delta.error
                return Replayed.reported(delta, "p9")
        raise AssertionError


def serve(engine: EngineCore, request: Request) -> Answer:
    """What an engine answers."""
    record = Record(request, "r1", 10.0, engine.max_model_len)
    engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            record.take(delta)
    answer = record.answer()
    assert answer is not None
    return answer


class Court:
    """A checker with its book, and what surrounds them."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.replayer = Replayer()
        self.sink = PrometheusSink()
        self.now = 1000.0
        self.folder = tmp_path / "dumps"
        self.metrics = Metrics(self.sink, model_name="tiny", pool="prefill")
        self.counts = counts = RefereeCounts(self.metrics, SERVED_STRATA)
        dumps = DumpFolder(self.folder, 10, 10**7)
        self.book = ReplicaBook(TOLERANCE, dumps, alarmed=counts.alarmed, clock=lambda: self.now)
        self.registry = ReplicaRegistry(self.book, counts, clock=lambda: self.now)
        judge = counts.counting(Judge(TOLERANCE).judge)
        self.checker = ReplayChecker(self.replayer, judge, self.book, ended=counts.ended, **settings)

    def on_heartbeat(
        self, replica: str = "r1", *, since: float = 0.0, state: BreakerState = BreakerState.CLOSED, **changes: Any
    ) -> Orders:
        status = ReplicaStatus(replica, "decode", state, Mode.AUTO, since, "")
        return self.registry.on_heartbeat(Report(status, MetricBatch(replica), **changes))

    async def dump(self, pattern: str) -> Path:
        """The one dump of that name, which a thread writes; until it is whole it has another suffix."""
        async with asyncio.timeout(30):
            while not (found := list(self.folder.glob(f"{pattern}.json"))):
                await asyncio.sleep(0.01)
        (path,) = found
        return path

    def value(self, name: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.sink.exposition()[0].decode())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def served(number: int = 0, num_tokens: int = NUM_TOKENS, **changes: Any) -> Answer:
    fields: dict[str, Any] = {
        "token_ids": tuple(range(100 * number, 100 * number + num_tokens)), "logprobs": (-1.0,) * num_tokens,
        "kinds": (TokenKind.FIRST,) + (TokenKind.ACCEPTED,) * (num_tokens - 1),
        "rounds_since_handoff": (None, *range(num_tokens - 1)), "preempted": (False,) * num_tokens, "num_drafted": 30,
        "prefilled_by": "p1", "max_model_len": NUM_TOKENS + 6,
    }  # fmt: skip
    params = changes.pop("params", SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS))
    request = Request(f"cmpl-{number}-0", (1, 2, 3), params)
    return recorded(request.request_id, **({"request": request} | fields | changes))


CLIENT: ContextVar[str] = ContextVar("CLIENT", default="nobody")


class Method:
    """A method of a fake handle."""

    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


class RefereeHandle:
    """A referee that is some way off: a report comes at once, and is heard and answered when `far` lets it."""

    def __init__(self) -> None:
        counts = RefereeCounts(Metrics(Sink(), model_name="fake", pool="decode"), SERVED_STRATA)
        self.registry = ReplicaRegistry(ReplicaBook(TOLERANCE), counts)
        self.far = (asyncio.Event(), asyncio.Event())  # the way there, the way back
        for way in self.far:
            way.set()
        self.reports: list[Report] = []
        self.callers: list[str] = []
        self.request_ids: list[str] = []  # of the clients for whom answers came
        self.answers: list[Answer] = []
        self.call = Method(self._call)

    async def _call(self, name: str, reported: Carried, *args: Any) -> Any:
        answers = {
            "report": self._report,
            "check": partial(self._check, reported),
            "submit": partial(self._check, reported),
            "wanted_weights": self._wanted,
        }
        return await answers[name.rpartition(".")[2]](*args)

    def options(self, **_: Any) -> "RefereeHandle":
        return self

    async def _report(self, report: Report) -> Orders:
        self.callers.append(CLIENT.get())
        there, back = self.far
        await there.wait()
        self.reports.append(report)
        orders = self.registry.on_heartbeat(report)
        await back.wait()
        return orders

    async def _check(self, reported: Carried, answer: Answer) -> Checked:
        self.callers.append(CLIENT.get())
        self.request_ids.append(reported.request_id)
        await self.far[0].wait()
        self.answers.append(answer)
        return Checked(Verdict.VERIFIED)

    async def _wanted(self) -> DesiredState:
        return DesiredState(CONFIGURED)

    def counted(self, name: str) -> float:
        """The sum of a counter over all that was reported."""
        batches: list[MetricBatch] = [report.batch for report in self.reports]
        return sum(
            value for batch in batches for (metric, _), value in batch.counters.items() if metric == f"truespec_{name}"
        )


class Worker(DecodeWorker):
    """A decode replica with fake engines, one of them for prompts."""

    @staticmethod
    def make_backend(config: AppConfig, pool: PoolName) -> FakeBackend:
        return FakeBackend(FakeConfig())

    def token_source(self, host: EngineHost, prefill: Any) -> PooledTokenSource:
        return PooledTokenSource(host.backend, host.runtime.metrics, self._ask_prefill, self._handed_off)

    async def _ask_prefill(self, request: Request, first_token: bool) -> Prefilled:
        other = FakeBackend(FakeConfig())
        prefilled = await other.prefill(request, first_token=first_token)
        return Prefilled(prefilled.deltas, prefilled.handoff, "prefill-1")

    async def ask(self, request: Request) -> list[Streamed]:
        """What the router gets."""
        return [streamed async for streamed in self.stream([request], {}, None)]  # type: ignore[arg-type]


@pytest.fixture
def referee(monkeypatch: pytest.MonkeyPatch) -> RefereeHandle:
    handle = RefereeHandle()
    replica = SimpleNamespace(app_name="app", replica_tag="decode-1")
    monkeypatch.setattr(runtime.serve, "get_replica_context", lambda: replica)
    monkeypatch.setattr(runtime.serve, "get_deployment_handle", lambda *_: handle)
    here = SimpleNamespace(get_node_id=lambda: "node-1", get_accelerator_ids=lambda: {"GPU": []})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)  # Ray's own starts a cluster where there is none
    monkeypatch.setattr(ray, "nodes", list)
    monkeypatch.setattr(runtime, "observe", lambda *_: Tracing())
    monkeypatch.setattr(stream_router, "adopt", _no)
    monkeypatch.setattr(runtime, "REPORT_EVERY_S", 3600.0)
    monkeypatch.setattr(gc, "freeze", _no)
    return handle


def _no(*_: object) -> None:
    """In the place of what reaches further than a test may."""


def record_of(request_id: str, began_at: float = 10.0, replica: str = "r1", **changes: Any) -> Record:
    """The record of a replica that drafts at most four tokens in a round."""
    fields: dict[str, Any] = {
        "request": Request(request_id, (1, 2, 3)), "replica": replica, "prefilled_by": "", "began_at": began_at,
        "max_model_len": 64, "num_draft_tokens": 4, "token_ids": (4, 5), "logprobs": (-1.0, -2.0),
        "kinds": (TokenKind.FIRST, TokenKind.BONUS), "rounds_since_handoff": (None, None), "preempted": (False, False),
    }  # fmt: skip
    fields |= changes
    first = fields["prefilled_by"] or fields["replica"]  # the first token is what a prefill emits
    fields.setdefault("made_by", (first, *[fields["replica"]] * (len(fields["token_ids"]) - 1)))
    weight_versions = dict.fromkeys(fields.pop("weight_versions", (DEFAULT_VERSION,)))
    lists = {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    return Record(**(fields | lists), weight_versions=weight_versions)


def recorded(request_id: str, began_at: float = 10.0, replica: str = "r1", **changes: Any) -> Answer:
    """The answer that such a record gives by itself."""
    (made,) = traces_of(None, [record_of(request_id, began_at, replica, **changes)])
    return made


def traces_of(_: object, records: Sequence[Record]) -> list[Answer]:
    """A reader of exchanges that looks at the records only."""
    return [answer for record in records if (answer := record.answer()) is not None]
