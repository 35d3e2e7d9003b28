"""Answers that carry their verdict, and verdicts asked for afterwards."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve_app.http.routes import Operations
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Verdict
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest
from tests.support.fake_serving import BackendSource, ServeFake, make_backend
from tests.support.front_ends import completion, info
from tests.support.tapped import CHAT, COMPLETIONS, TappedService, chunks_in, right


def verifying(tokenizer: Tokenizer, judge: Callable[[Answer], Verdict] = right, **more: Any) -> TappedService:
    """A service that checks nothing unasked."""
    return TappedService(tokenizer, chosen=False, judge=judge, **more)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_whole_answer_carries_its_verdict(tokenizer: Tokenizer, path: str) -> None:
    service = verifying(tokenizer)
    reply = (await service.post(path, verify=True)).json()
    assert (reply["verdict"], reply["verdicts"]) == ("verified", ["verified"])
    assert reply["checked"] == ["logprobs", "support"]
    (answer,) = service.checked
    assert answer.request.request_id == f"{reply['id']}-0"
    assert len(answer.token_ids) == len(answer.logprobs) == reply["usage"]["completion_tokens"]
    assert reply["choices"][0]["logprobs"] is None, "they were gathered for the check, and nobody asked for them"


async def test_each_choice_has_its_verdict_and_the_reply_the_worst(tokenizer: Tokenizer) -> None:
    reported = {0: Verdict.VERIFIED, 1: Verdict.UNVERIFIED, 2: Verdict.SUSPECT, 3: Verdict.VERIFIED}
    service = verifying(tokenizer, lambda answer: reported[int(answer.request.request_id[-1])])
    reply = (await service.post(verify=True, n=2, prompt=["one", "two"])).json()
    assert reply["verdicts"] == ["verified", "unverified", "suspect", "verified"]
    assert reply["verdict"] == "suspect"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("with_usage", [False, True])
async def test_the_last_chunk_of_a_stream_carries_it(tokenizer: Tokenizer, path: str, with_usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    response = await verifying(tokenizer, delay_s=0.01).post(path, verify=True, stream=True, n=2, **options)
    *before, last = chunks_in(response)
    assert (last["verdict"], last["verdicts"], last["choices"]) == ("verified", ["verified"] * 2, [])
    assert last["object"] == before[0]["object"]
    assert ("usage" in last) == with_usage
    assert not any("verdict" in chunk for chunk in before)
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in before) == 2


async def test_who_does_not_ask_is_neither_checked_nor_reported(tokenizer: Tokenizer) -> None:
    service = verifying(tokenizer)
    for verify in ({}, {"verify": False}, {"verify": None}):
        assert "verdict" not in (await service.post(**verify)).json()
        assert not any("verdict" in chunk for chunk in chunks_in(await service.post(stream=True, **verify)))
    assert service.checked == service.submitted == []


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
    server = serve_fake(operations=Operations(verdicts=known))
    assert httpx.get(f"{server.url}/v1/verdicts/cmpl-known").json() == {"id": "cmpl-known", "verdict": "verified"}
    missing = httpx.get(f"{server.url}/v1/verdicts/cmpl-other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "verdict_not_found"
    assert "cmpl-other" in missing.json()["error"]["message"]
