"""A drill: a known fault in a running service, with its real controller and without Ray. What the status page and the
runbooks say of answers is compared with what was delivered."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashboards.build import ALERTS
from serve_app.config.files import parse_args
from serve_app.deployments import controller, engine_host
from serve_app.deployments.controller import Controller
from serve_app.deployments.pools import HttpServer
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.verdicts import Verdict
from serve_app.referee.records.records import Record
from serve_app.telemetry.tracing import Tracing
from tests.support.engines import NO_DRAFTS, tiny_engine
from tests.support.faulty_services import commit_first_drafts, with_fault
from tests.support.referees import TOLERANCE, EngineReplay, Method, RefereeHandle
from tests.support.services import ENGINE, OPERATOR, administered
from tests.support.tiny_models import write_tiny_model

FEW = [40, 41, 42, 43]


class Drill:
    """One replica that decodes and replays, its controller, and what its clients got."""

    def __init__(self, folder: Path, flag: Path, dumps: Path) -> None:
        self.folder, self.flag, self.dumps = folder, flag, dumps
        self.delivered: list[Record] = []

    async def start(self, handle: RefereeHandle) -> None:
        config = parse_args({
            "model": {"source": str(self.folder), "name": "m"}, "topology": "monolith",
            "engine": ENGINE, "drafter": {"kind": "ngram", "num_draft_tokens": 3},
            "replay": {"sample_rate": 0.5, "independent_rate": 0}, "dumps": {"folder": str(self.dumps)},
            "admin": administered(self.dumps.parent),
        })  # fmt: skip
        self.controller = object.__new__(Controller)
        handle.call = Method(self.controller.call)
        handle.replay = Method(lambda request, reported, avoid: self.replica.replay(request, reported))  # type: ignore[attr-defined]
        await self.controller.__init__(config)  # type: ignore[misc]
        replica = with_fault(HttpServer, commit_first_drafts, self.flag)
        replica._remember = lambda server, record: self.ended(server, record)  # noqa: PLW0108
        self.replica: HttpServer = object.__new__(replica)
        await self.replica.start(config, "monolith")
        app = self.replica.front.asgi_app(self.replica.check_health)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://drill", timeout=60)

    def ended(self, server: HttpServer, record: Record) -> None:
        self.delivered.append(record)
        HttpServer._remember(server, record)

    async def serve(self, first: int, num: int) -> None:
        """Short requests of few tokens, which are drafted often; some end in an error."""
        same = {"model": "m", "max_tokens": 6, "ignore_eos": True, "allowed_token_ids": FEW, "reproducible": False}
        for number in range(first, first + num):
            prompt = [FEW[(number // 4**place) % 4] for place in range(6)] + FEW
            body = same | {"prompt": prompt, "seed": number}
            await self.http.post("/v1/completions", json=body)

    async def status(self) -> dict[str, Any]:
        await self.replica.host.reporter.report()
        return (await self.http.get("/status")).json()  # type: ignore[no-any-return]

    async def wrong(self) -> dict[str, float]:
        """The delivered answers that are wrong by a judge and an engine of the test's own, and when they began."""
        replay = EngineReplay(tiny_engine(self.folder, drafter=NO_DRAFTS))
        checker = ReplayChecker(replay, Judge(TOLERANCE).judge, ReplicaBook(TOLERANCE))
        answers = [answer for one in self.delivered if (answer := one.answer()) is not None]
        checked = [(one, await checker._result(one)) for one in answers]
        assert all(result == "ok" for _, (result, _) in checked)
        suspect = [one for one, (_, found) in checked if found.verdict is Verdict.SUSPECT]
        return {one.request.request_id.rpartition("-")[0]: one.began_at for one in suspect}


@pytest.fixture
async def drill(referee: RefereeHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Drill]:
    async def nothing(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine_host, "REPORT_EVERY_S", 3600.0)  # the replica reports when a test asks for the status
    monkeypatch.setattr(controller, "watch_pools", nothing)
    monkeypatch.setattr(controller, "observe", lambda *_: Tracing())
    made = Drill(write_tiny_model(tmp_path / "m", tokenizer=True), tmp_path / "fault", tmp_path / "dumps")
    await made.start(referee)
    yield made
    tasks = [*made.replica.host.runtime.tasks, made.controller._work]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await made.replica.host.backend.stop()


async def test_what_is_said_of_answers_at_an_alarm_is_true_of_those_delivered(drill: Drill) -> None:
    await drill.serve(0, 40)
    drill.flag.touch()
    await drill.serve(40, 160)
    said = await drill.status()
    (replica,), incidents = said["replicas"], said["incidents"]
    await drill.serve(200, 10)
    wrong = await drill.wrong()
    assert wrong and max(wrong.values()) < replica["since"], "those since the breaker opened are right"
    alerts = {one["runbook"] for one in incidents}
    assert alerts >= {"TruespecRuleBroken", "TruespecBreakerOpen"} and replica["breaker"] == "open"
    assert {alert.wrong for alert in ALERTS if alert.name in alerts} <= {"yes", "perhaps"}
    found = {one["kind"]: one for one in incidents}
    assert "looks at 25% of the steps: wrong answers may have been sent" in found["invariant"]["unseen"]
    for one in incidents:
        assert one["doubtful_since"] > replica["started_at"], "answers before were verified"
        asked = {"replica": replica["replica"], "since": one["doubtful_since"]}
        listed = (await drill.http.get("/admin/verdicts", params=asked, headers=OPERATOR)).json()["verdicts"]
        assert wrong.keys() <= {reply["id"] for reply in listed if reply["verdict"] != "verified"}, one
        assert len(listed) < len(drill.delivered)
    async with asyncio.timeout(10):
        while not (dumps := list(drill.dumps.glob("*trip-invariant.json"))):
            await asyncio.sleep(0.01)
    evidence = json.loads(dumps[0].read_text())["trip"]["evidence"]
    assert len(evidence) == found["invariant"]["num"] and all(one["refused"] for one in evidence)
    assert not wrong.keys() & {one["request"]["request_id"].rpartition("-")[0] for one in evidence}, (
        "they were not delivered"
    )
