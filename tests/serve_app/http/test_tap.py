"""The tap: what is read is what went over the wire, and nothing of it stays."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.http.routes import Operations
from serve_app.openai.asked import Limits
from serve_app.openai.responses.kept_responses import ResponseStore
from serve_app.referee.judge.answer import Answer
from serve_app.referee.records.records import Record
from serve_app.referee.records.tapped_reply import TappedBytes
from serve_app.referee.wire.exchange import Exchange
from serve_app.streams.observed import SourceLimits
from serve_app.text.tokenizer import Tokenizer
from tests.support.referees import traces_of
from tests.support.tapped import BODIES, CHAT, GENERATE, RESPONSES, TappedService, chunks_in

STREAMED = {"stream": True}
WAYS = [(path, fields) for path in BODIES for fields in ({}, STREAMED) if (path, fields) != (GENERATE, STREAMED)]
DONE = b"data: [DONE]\n\n"


class Shouting:
    """A layer that changes what goes out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def shout(message: Message) -> None:
            await send(message | {"body": message["body"].replace(b"two", b"TWO")} if "body" in message else message)

        await self._app(scope, receive, shout)


@pytest.mark.parametrize(("path", "fields"), WAYS)
async def test_what_is_read_is_what_came_in_and_went_out(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any]
) -> None:
    service = TappedService(tokenizer)
    service.app.add_middleware(Shouting)
    service.script.say("one two")
    response = await service.post(path, **fields)
    assert response.status_code == 200 and (b"TWO" in response.content) is (path != GENERATE)
    (exchange,), (records,) = service.exchanges, service.records
    assert (exchange.path, exchange.request, exchange.reply) == (path, response.request.content, response.content)
    assert exchange.streamed is bool(fields) and exchange.began_at <= exchange.ended_at
    assert [len(one.token_ids) for one in records] == [len(one.token_ids) for one in service.submitted] != [0]
    assert service.counted == ["unread"]


async def test_nothing_is_kept_of_what_is_not_chosen_or_fails(tokenizer: Tokenizer) -> None:
    service = TappedService(tokenizer, chosen=False)
    assert (await service.post()).status_code == (await service.post(stream=True)).status_code == 200
    assert (await service.post(temperature=-1)).status_code == 400
    assert service.counted == [] and service.submitted == []
    service = TappedService(tokenizer)
    service.script.fail_at = 0
    assert (await service.post()).status_code == 500
    service.script.fail_at = 5
    for fields in ({}, STREAMED, {"stream": True, "n": 3}):
        response = await service.post(**fields)
        assert (response.status_code == 200) is bool(fields) and "error" in response.text
    failed = await service.post(RESPONSES, stream=True)
    assert failed.status_code == 200 and "response.failed" in failed.text
    assert service.exchanges == [] and service.counted == ["ended_early"] * 2, "what failed has nothing to check"


@pytest.mark.parametrize("how", ["leaves", "takes nothing"])
@pytest.mark.parametrize("verify", [False, True])
async def test_a_client_that_leaves_in_the_middle_has_its_tokens_checked_alone(
    tokenizer: Tokenizer, how: str, verify: bool
) -> None:
    service = TappedService(tokenizer, step_s=0.005)
    body = json.dumps(BODIES[CHAT] | {"stream": True, "max_tokens": 60, "verify": verify}).encode()
    left, sent = asyncio.Event(), list[Message]()
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "root_path": ""}
    waiting = [
        {"type": "http.request", "body": body[:20], "more_body": True},
        {"type": "http.request", "body": body[20:]},
    ]

    async def receive() -> Message:
        if waiting:
            return waiting.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 4:
            left.set()
            if how == "takes nothing":
                raise OSError("broken pipe")

    await service.app(scope | {"app": service.app}, receive, send)
    await service.settle()
    assert service.exchanges == [] and service.counted == ["ended_early"]
    (answer,) = service.submitted
    assert 0 < len(answer.token_ids) < 60 and not service.backend.num_live


async def test_comments_are_part_of_a_stream(tokenizer: Tokenizer) -> None:
    service = TappedService(tokenizer, step_s=0.05, limits=Limits(keep_alive_s=0.01))
    response = await service.post(stream=True)
    assert b": keep-alive" in response.content and service.exchanges[0].reply == response.content


@pytest.mark.parametrize("bounds", [TappedBytes(most=800), TappedBytes(most_of_all=800), TappedBytes(most=40)])
async def test_what_there_is_no_room_for_is_dropped_and_counted(tokenizer: Tokenizer, bounds: TappedBytes) -> None:
    service = TappedService(tokenizer)
    service.tap.held = bounds
    response = await service.post(stream=True, max_tokens=50)
    assert response.status_code == 200 and response.content.endswith(DONE)
    assert service.exchanges == [] and service.counted == ["too_large"] and len(service.submitted) == 1
    assert (await service.post(verify=True, max_tokens=50)).json()["verdict"] == "verified", "by its tokens"


async def test_a_thousand_replies_at_once_leave_nothing(tokenizer: Tokenizer) -> None:
    service = TappedService(tokenizer, max_num_seqs=2000)
    kinds: list[dict[str, Any]] = [{}, STREAMED, {"verify": True}, {"stream": True, "verify": True}, {"stop": "x"}]
    service.front_end._source.limits = SourceLimits(2000, 300.0)  # type: ignore[attr-defined]
    bodies = [BODIES[CHAT] | kinds[number % 5] | {"seed": number} for number in range(1000)]
    transport = httpx.ASGITransport(app=service.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=120) as client:
        replies = await asyncio.gather(*[client.post(CHAT, json=body) for body in bodies])
    await service.settle()
    assert {reply.status_code for reply in replies} == {200} and service.counted == ["unread"] * 600
    assert {one.reply for one in service.exchanges} >= {reply.content for reply in replies}
    assert len(service.submitted) == 600 and len(service.checked) == 400
    assert {one.broken_limit for one in (*service.submitted, *service.checked)} == {""}


@pytest.mark.parametrize(("path", "fields"), WAYS[:-1])  # tokens alone come without a verdict
async def test_what_is_judged_for_a_verdict_is_the_reply_without_it(
    tokenizer: Tokenizer, path: str, fields: dict[str, Any]
) -> None:
    kept = ResponseStore(2**20, 60.0)
    service = TappedService(tokenizer, chosen=False, operations=Operations(kept=kept))
    response = await service.post(path, verify=True, **fields)
    draft, sent = service.exchanges
    assert sent.reply == response.content and draft.request == sent.request and draft.streamed == sent.streamed
    if not fields:
        reply = response.json()
        told = {name: reply.pop(name) for name in ("verdict", "verdicts", "checked")}
        assert told["verdict"] == "verified" and json.loads(draft.reply) == reply
    elif path == RESPONSES:
        before, after = draft.reply.split(b"\n\n"), sent.reply.split(b"\n\n")
        assert before[:-2] == after[:-2] and b"verdict" in after[-2]
        assert [one["sequence_number"] for one in chunks_in(response)] == [*range(len(after) - 1)]
        final = chunks_in(response)[-1]["response"]
        assert json.loads(before[-2].partition(b"data: ")[2])["response"] | final == final
        record = await kept.get(final["id"], "")
        assert record is not None and json.loads(record)["response"]["verdict"] == "verified"
    else:
        assert draft.reply.endswith(DONE) and sent.reply.startswith(draft.reply.removesuffix(DONE))
    assert len(service.checked) == 1 and service.submitted == []


async def test_a_reply_that_changes_behind_its_verdict_is_suspect_afterwards(tokenizer: Tokenizer) -> None:
    def read(exchange: Exchange, records: Sequence[Record]) -> list[Answer]:
        broken = "wire: it shouts" if b"TWO" in exchange.reply else ""
        return [dataclasses.replace(one, broken_limit=broken) for one in traces_of(exchange, records)]

    service = TappedService(tokenizer, chosen=False, read=read)
    service.app.add_middleware(Shouting)
    service.script.say("one two")
    for fields in ({}, STREAMED):
        service.checked.clear()
        assert '"verdict":"verified"' in (await service.post(verify=True, **fields)).text
        assert [one.broken_limit for one in service.checked] == ["", "wire: it shouts"]
