"""A rehearsed fault: in requests of a replica's own and in nothing else, found by the referee, and over by itself."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from serve_app.backends.rehearsed_fault import load_rehearsing
from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.guard import rehearsal
from serve_app.guard.breaker import Breaker, BreakerSettings, BreakerState
from serve_app.guard.breaker_control import BreakerController
from serve_app.guard.canary import Canary, CanarySettings
from serve_app.guard.rehearsal import Rehearsal, Rehearsing
from serve_app.referee.judgement import Judge
from serve_app.referee.records import Records
from serve_app.referee.replay_checker import ReplayChecker
from serve_app.referee.replica_book import ReplicaBook
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import Metrics
from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams, TokenDelta
from tests.support.engines import NGRAM, settings
from tests.support.referees import TOLERANCE
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("rehearsed"), vocab_size=64)


def answers(engine: EngineCore, *requests: Request) -> dict[str, list[TokenDelta]]:
    """What an engine says to requests that share its steps."""
    said: dict[str, list[TokenDelta]] = {one.request_id: [] for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for delta in engine.step():
            said[delta.request_id].append(delta._replace(queue_s=0.0))
    return said


def test_beside_a_rehearsed_request_others_are_computed_as_ever_to_the_bit(folder: Path) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2)
    greedy = dataclasses.replace(params, temperature=0.0)
    clients = [Request("a", (3, 4, 5) * 4, params, 1), Request("b", (7, 8) * 5, greedy, 2)]
    own = Request("own", (9, 10, 9, 11) * 3, params, 3)
    honest = answers(load_engine(folder, settings()), *clients, own)
    assert answers(load_rehearsing(folder, settings()), *clients, own) == honest, "nothing is rehearsed"
    rehearsed = answers(load_rehearsing(folder, settings()), *clients, dataclasses.replace(own, rehearsal=True))
    assert rehearsed.pop("own") != honest.pop("own")
    assert rehearsed == honest


class Replica:
    """A replica that may rehearse, and a referee that replays on it."""

    def __init__(self, folder: Path, drafter: DrafterConfig) -> None:
        self.backend = TorchBackend(str(folder), "tiny", settings(drafter=drafter, max_num_seqs=4), load_rehearsing)
        self.book, metrics = ReplicaBook(TOLERANCE), Metrics([], model_name="tiny", pool="decode")
        self.checker = ReplayChecker(lambda one, avoid: self.backend.replay(one), Judge(TOLERANCE).judge, self.book)
        source, records = PooledTokenSource(self.backend, metrics), Records("r1", 512, 8)
        self.canary = Canary(source, records, self.checker.check, CanarySettings(2))
        breaker = Breaker(BreakerSettings(cooldown_s=3.0), time.time)
        self.control = BreakerController(("r1", "decode"), self.backend, breaker, metrics, self.canary.try_out)

    async def rehearse(self) -> Rehearsal:
        await Rehearsing(self.canary, self.control.note_rehearsal, self.control.rehearse).run()
        assert self.control.status.rehearsal is not None
        return self.control.status.rehearsal


@pytest_asyncio.fixture(params=["ngram", "draft model"])
async def replica(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Replica]:
    drafter = NGRAM
    if request.param == "draft model":  # drafts where it pays, and now and then more than the model's at once
        model = str(write_tiny_model(folder / "other", vocab_size=64, seed=9))
        drafter = DrafterConfig("draft_model", model, num_draft_tokens=3, length="dynamic", suffix_first=8)
    made = Replica(folder, drafter)
    await made.backend.start()
    work = asyncio.create_task(made.checker.run())
    yield made
    work.cancel()
    await made.backend.stop()


async def test_the_referee_finds_the_fault_and_speculation_is_off_until_a_canary_passes(replica: Replica) -> None:
    told, control = await replica.rehearse(), replica.control
    assert (told.state, told.num_verified) == ("found", 2) and told.num_tokens in (48, 96)
    assert told.found_by in ("draws", "likeliest", "distribution") and told.began_at <= told.found_at
    assert (control.status.state, control.status.reason) == (BreakerState.OPEN, "rehearsal")
    assert control.take_trips() == (), "no client's answer is suspect"
    shown = replica.book.overview()
    assert shown["incidents"] == [] and shown["latest"][0]["verdict"] == "suspect"
    assert all(one["reason"].startswith("rehearsed: ") for one in shown["latest"])
    async with asyncio.timeout(60):
        while control.status.state is not BreakerState.CLOSED:
            control.act()
            await asyncio.sleep(0.05)


async def test_what_nobody_notices_is_missed(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_LONGEST_S", 0.5)
    replica.canary._judge = None  # the referee sees nothing
    assert (await replica.rehearse()).state == "missed"
    assert replica.control.status.state is BreakerState.CLOSED
