"""Answers that carry their verdict, and verdicts asked for afterwards."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve_app.http.routes import PastReplies
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.answer import Answer
from serve_app.referee.records import Record
from serve_app.referee.replay_selection import Checks
from serve_app.referee.verdicts import Checked, Verdict
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest
from tests.support.fake_serving import BackendSource, ServeFake, make_backend
from tests.support.front_ends import chat, chunks_of, completion, info, observed, reply_to

Judge = Callable[[Answer], Verdict]


class Verifying:
    """A front end over a fake engine whose answers are judged as a test says."""

    def __init__(self, tokenizer: Tokenizer, judge: Judge, delay_s: float = 0.0) -> None:
        self.answers: list[Answer] = []
        backend, self.script = make_backend(tokenizer)
        metrics = Metrics([BufferSink("r1")], model_name="m", pool="decode")

        async def check(answer: Answer) -> Checked:
            self.answers.append(answer)
            await asyncio.sleep(delay_s)
            return Checked(judge(answer), checks=("logprobs", "support"))

        def unasked(_: Answer) -> None:
            raise AssertionError("nobody's share is replayed here")

        checks = Checks(lambda _: False, lambda _: True, unasked, check, timeout_s=0.5)

        def ended(_: Record, answer: Answer | None) -> None:
            if answer is not None:
                checks.ended(answer)

        source = observed(BackendSource(backend), metrics, select=checks.select, ended=ended)
        self.front_end = FrontEnd(source, tokenizer, info(tokenizer), checks=checks)

    async def reply(self, wire: Any) -> dict[str, Any]:
        return await reply_to(self.front_end, wire)

    async def chunks(self, wire: Any) -> list[Any]:
        return await chunks_of(self.front_end, wire)


def right(_: Answer) -> Verdict:
    return Verdict.VERIFIED


@pytest.mark.parametrize("wire", [completion, chat])
async def test_a_whole_answer_carries_its_verdict(tokenizer: Tokenizer, wire: Any) -> None:
    verifying = Verifying(tokenizer, right)
    reply = await verifying.reply(wire(verify=True))
    assert (reply["verdict"], reply["verdicts"], reply["checked"]) == (
        "verified",
        ["verified"],
        ["logprobs", "support"],
    )
    (answer,) = verifying.answers
    assert answer.request.request_id == f"{reply['id']}-0"
    assert len(answer.token_ids) == len(answer.logprobs) == reply["usage"]["completion_tokens"]
    assert reply["choices"][0]["logprobs"] is None, "they were gathered for the check, and nobody asked for them"


async def test_each_choice_has_its_verdict_and_the_reply_the_worst(tokenizer: Tokenizer) -> None:
    reported = {0: Verdict.VERIFIED, 1: Verdict.UNVERIFIED, 2: Verdict.SUSPECT, 3: Verdict.VERIFIED}
    verifying = Verifying(tokenizer, lambda answer: reported[int(answer.request.request_id[-1])])
    reply = await verifying.reply(completion(verify=True, n=2, prompt=["one", "two"]))
    assert reply["verdicts"] == ["verified", "unverified", "suspect", "verified"]
    assert reply["verdict"] == "suspect"


@pytest.mark.parametrize("wire", [completion, chat])
@pytest.mark.parametrize("with_usage", [False, True])
async def test_the_last_chunk_of_a_stream_carries_it(tokenizer: Tokenizer, wire: Any, with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = await Verifying(tokenizer, right, delay_s=0.01).chunks(wire(verify=True, stream=True, n=2, **options))
    *before, last = chunks
    assert (last["verdict"], last["verdicts"], last["choices"]) == ("verified", ["verified"] * 2, [])
    assert last["object"] == before[0]["object"]
    assert ("usage" in last) == with_usage
    assert not any("verdict" in chunk for chunk in before)
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in before) == 2


async def test_who_does_not_ask_is_neither_checked_nor_reported(tokenizer: Tokenizer) -> None:
    verifying = Verifying(tokenizer, right)
    for verify in ({}, {"verify": False}, {"verify": None}):
        assert "verdict" not in await verifying.reply(completion(**verify))
        assert not any("verdict" in chunk for chunk in await verifying.chunks(completion(stream=True, **verify)))
    assert verifying.answers == []


async def test_a_stop_string_ends_what_is_checked_too(tokenizer: Tokenizer) -> None:
    verifying = Verifying(tokenizer, right)
    verifying.script.say("hello STOP and on and on")
    reply = await verifying.reply(completion(verify=True, stop=" STOP", max_tokens=60))
    assert (reply["choices"][0]["text"], reply["verdict"]) == ("hello", "verified")


async def test_a_server_that_cannot_check_refuses_to(tokenizer: Tokenizer) -> None:
    backend, _ = make_backend(tokenizer)
    front_end = FrontEnd(BackendSource(backend), tokenizer, info(tokenizer))
    with pytest.raises(InvalidRequest, match="raw_logprobs") as caught:
        await front_end.prepare(completion(verify=True))
    assert caught.value.field == "verify"
    with pytest.raises(InvalidRequest, match="verify"):
        completion(verify="yes")


# ---- over HTTP


async def known(reply_id: str) -> dict[str, Any] | None:
    return {"id": reply_id, "verdict": "verified"} if reply_id == "cmpl-known" else None


def test_a_verdict_is_reported_afterwards_or_missing_by_name(serve_fake: ServeFake) -> None:
    server = serve_fake(replies=PastReplies(known))
    assert httpx.get(f"{server.url}/v1/verdicts/cmpl-known").json() == {"id": "cmpl-known", "verdict": "verified"}
    missing = httpx.get(f"{server.url}/v1/verdicts/cmpl-other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "verdict_not_found"
    assert "cmpl-other" in missing.json()["error"]["message"]
