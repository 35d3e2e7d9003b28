"""Which weights made an answer: named in every reply and chunk, and kept apart by the referee."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.replies import ChoiceDelta, join, metadata_of
from serve_app.referee.judge.verdicts import Verdict
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.request import FinishReason, TokenDelta
from tests.support.fake_serving import Served, make_backend
from tests.support.front_ends import DeltaSource, chat, completion, front_end
from tests.support.referees import Court, served

BODY = {"model": "fake", "prompt": "hello", "max_tokens": 8, "temperature": 0}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)])
def test_every_reply_and_every_chunk_says_the_version(server: Served, path: str, body: dict[str, Any]) -> None:
    server.backend.weight_version = "step-7"
    try:
        whole = server.post(path, **body, n=2).json()
        assert whole["metadata"] == {"weight_version": "step-7"}
        assert all("weight_versions" not in choice for choice in whole["choices"])
        lines = server.post(path, **body, stream=True).text.splitlines()
    finally:
        server.backend.weight_version = "default"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    speaking = [chunk for chunk in chunks if chunk["choices"][0].get("delta", {}).get("role") is None]
    assert len(speaking) >= 2
    assert all(chunk["metadata"] == {"weight_version": "step-7"} for chunk in speaking)


def test_a_change_in_the_middle_of_an_answer_is_reported_with_its_place() -> None:
    pieces = [
        ChoiceDelta(0, "a", weight_versions=(("v1", 3),)),
        ChoiceDelta(0, "b", weight_versions=(("v1", 2),)),
        ChoiceDelta(0, "", weight_versions=(("v2", 0),)),
        ChoiceDelta(0, "c", weight_versions=(("v2", 4),)),
        ChoiceDelta(0, "", finish_reason="stop", weight_versions=(("v3", 0),)),
    ]
    whole = join(pieces)
    assert whole.version_fields() == {
        "weight_versions": [{"version": "v1", "tokens": 5}, {"version": "v2", "tokens": 4}]
    }
    assert metadata_of(name for name, _ in whole.weight_versions) == {
        "metadata": {"weight_version": "v2", "weight_versions": ["v1", "v2"]}
    }
    assert join(pieces[:2]).version_fields() == {}


@pytest.mark.parametrize("run_length", [1, 3, 40])
@pytest.mark.parametrize("extra", [{}, {"stop": ["zz"]}, {"return_token_ids": True}])
async def test_tokens_that_are_held_back_count_for_the_version_that_made_them(
    tokenizer: Tokenizer, run_length: int, extra: dict[str, Any]
) -> None:
    ids = tokenizer.encode("hello 🙂🙂z")  # halves of characters, and what may begin a stop string
    half = len(ids) // 2
    runs = [
        TokenDelta("", tuple(part[start : start + run_length]), weight_version=name)
        for name, part in (("v1", ids[:half]), ("v2", ids[half:]))
        for start in range(0, len(part), run_length)
    ]
    source = DeltaSource(*runs[:-1], runs[-1]._replace(finish_reason=FinishReason.LENGTH))
    front = front_end(source, tokenizer)
    job = await front.prepare(completion(**extra))
    made = [{"version": "v1", "tokens": half}, {"version": "v2", "tokens": len(ids) - half}]
    assert (await front.collect(job))["choices"][0]["weight_versions"] == made
    chunks = [json.loads(event[6:]) async for event in front.events(job) if b"DONE" not in event]
    reported = [chunk["choices"][0].get("weight_versions", ()) for chunk in chunks]
    assert all(len({run["version"] for run in runs}) == len(runs) for runs in reported), "neighbours are put together"
    assert source.aborted == []
    named = [chunk["metadata"]["weight_version"] for chunk in chunks]
    assert named == sorted(named) and named[-1] == "v2"


@pytest.mark.parametrize("versions", [("v1",), ("default", "v1")])
async def test_other_weights_accuse_nobody(tmp_path: Path, versions: tuple[str, ...]) -> None:
    court = Court(tmp_path)
    court.replayer.drift = 3.0  # as other weights would give
    checked = await court.checker._check(served(weight_versions=versions))
    assert checked.verdict is Verdict.UNVERIFIED and checked.reason == "the weights that made it are no longer served"
    assert court.value("truespec_replays_total", result="outdated") == 1
    assert court.value("truespec_replay_tokens_total", stratum="all") == 0
    assert court.on_heartbeat("r1").findings == ()
    wrong = await court.checker._check(served(1))
    assert wrong.verdict is Verdict.SUSPECT, "the same drift with the same weights is a fault"


async def test_a_reply_reports_the_weights_that_are_served_when_it_is_made(tokenizer: Tokenizer) -> None:
    """A stream router learns of new weights from the first token that they made: after the request has come."""
    backend, script = make_backend(tokenizer, run_length=1)
    script.say("abcd")
    info = await backend.start()
    metrics = Metrics(BufferSink("r"), model_name="fake", pool="router")
    front = FrontEnd(PooledTokenSource(backend, metrics), tokenizer, info, Limits())
    for make in (completion, chat):
        job = await front.prepare(make(model="fake", max_tokens=8, temperature=0))
        front.weights_switched(replace(info, fingerprint="new" * 8))
        assert (await front.collect(job))["system_fingerprint"] == "fp_newnewnewnew"
        front.weights_switched(info)
        events = front.events(job)
        front.weights_switched(replace(info, fingerprint="old" * 8))
        reported = [await anext(events) or await anext(events)]  # the first only says that it was taken in
        front.weights_switched(replace(info, fingerprint="new" * 8))
        reported += [event async for event in events]
        assert b"fp_oldoldoldold" in reported[0] and b"fp_newnewnewnew" not in reported[0]
        assert b"fp_newnewnewnew" in reported[1] and not any(b"fp_oldoldoldold" in event for event in reported[1:])
