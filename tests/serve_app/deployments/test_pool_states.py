"""Looking at the pools goes on whatever Ray Serve reports, and the log says once when it reports nothing."""

import asyncio
import logging
from collections.abc import Mapping

import pytest

from serve_app.cluster.replica_counts import PoolState
from serve_app.config.files import parse_args
from serve_app.deployments import pool_states
from serve_app.telemetry.metrics import PrometheusSink


async def test_what_is_not_reported_is_said_once_and_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = {"decode": PoolState(2, frozenset("ab"))}
    looks = iter([RuntimeError("no controller"), KeyError("truespec"), there, RuntimeError("gone again"), there])
    seen = asyncio.Event()

    def look(app_name: str) -> Mapping[str, PoolState]:
        found = next(looks, None)
        if found is None:
            seen.set()
            return there
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(pool_states, "pool_states", look)
    monkeypatch.setattr(pool_states, "_EVERY_S", 0.0)
    sink = PrometheusSink(source="c")
    config = parse_args({"version": 1, "model": {"source": "tiny"}})
    with caplog.at_level(logging.WARNING, "truespec.serve"):
        watch = asyncio.create_task(pool_states.watch_pools("truespec", config, sink, lambda name: 0))
        await asyncio.wait_for(seen.wait(), 10)
        watch.cancel()
    assert [one.getMessage().rpartition(": ")[2] for one in caplog.records] == [
        "RuntimeError('no controller')",
        "RuntimeError('gone again')",
    ]
    running = [sample.value for sample in sink.samples() if sample.name == "truespec_replicas_running"]
    assert running == [2]
