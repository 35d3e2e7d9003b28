"""The referee over HTTP: exchanges come in, and what was found goes out."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from deploy.run.replayers import ReplayerOptions, make_replayer
from deploy.watch.app import referee_app
from deploy.watch.referee import RefereeOptions
from deploy.watch.run import running_referee
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.wire.exchange import COMPLETIONS, Exchange, ExchangeBatch
from speculative.request import Request

PROMPT, ANSWER = [5, 6, 7, 8], [20, 21, 22]
SECRET = "the-clients-own-words"


@pytest_asyncio.fixture
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    options = RefereeOptions(served="tiny", tolerance=Tolerance.against_float32("float32"))
    async with running_referee(options, ReplayerOptions(folder, threads=1)) as referee:
        transport = httpx.ASGITransport(referee_app(referee))
        async with httpx.AsyncClient(transport=transport, base_url="http://referee") as http:
            yield http


async def logprobs(folder: Path) -> list[float]:
    """Of the answer, by another engine."""
    other = make_replayer(ReplayerOptions(folder, engine="transformers", threads=1))
    await other.start()
    replayed = await other.replay(Request("r", (*PROMPT, *ANSWER), score_from=len(PROMPT)))
    await other.stop()
    return list(replayed.logprobs)


def batch(reply_id: str, given: list[float], **counts: int) -> bytes:
    request = {"prompt": PROMPT, "user": SECRET}
    choice = {"index": 0, "token_ids": ANSWER, "logprobs": {"token_logprobs": given}, "finish_reason": "length"}
    reply = json.dumps({"id": reply_id, "choices": [choice]}).encode()
    exchange = Exchange(COMPLETIONS, json.dumps(request).encode(), reply, False, 1e9, 1e9 + 1, "pod-7")
    return ExchangeBatch((exchange,), counts).to_wire()


async def verdict(client: httpx.AsyncClient, reply_id: str) -> dict[str, Any]:
    for _ in range(200):
        if (reply := await client.get(f"/v1/verdicts/{reply_id}")).status_code == 200:
            found: dict[str, Any] = reply.json()
            return found
        await asyncio.sleep(0.05)
    raise AssertionError("there is no verdict")


async def test_answers_are_judged_and_what_was_found_is_shown(client: httpx.AsyncClient, folder: Path) -> None:
    right = await logprobs(folder)
    assert (await client.post("/v1/exchanges", content=batch("right", right, captured=1))).status_code == 204
    forged = [right[0], right[1] - 6.0, right[2]]
    assert (await client.post("/v1/exchanges", content=batch("forged", forged, captured=1, dropped=4))).is_success
    assert (await verdict(client, "right"))["verdict"] == "verified"
    assert (await verdict(client, "forged"))["verdict"] == "suspect"

    metrics = (await client.get("/metrics")).text
    assert 'truespec_watched_requests_total{model_name="tiny",pool="watched",result="dropped"} 4.0' in metrics
    assert 'truespec_watched_requests_total{model_name="tiny",pool="watched",result="captured"} 2.0' in metrics
    assert 'truespec_verdicts_total{model_name="tiny",pool="watched",verdict="suspect"} 1.0' in metrics

    report = (await client.get("/report.json")).json()
    assert report["all"]["tokens"] == 6
    assert report["all"]["max_nats"] == pytest.approx(6.0, abs=0.01)
    (suspect,) = report["suspect"]
    assert (suspect["id"], suspect["replica"], suspect["worst"][0]["index"]) == ("forged-0", "pod-7", 1)
    assert report["replicas"]["pod-7"]["tokens"] == 6
    assert "forged-0" in (await client.get("/report")).text
    page = (await client.get("/")).text
    assert "forged-0" in page and "Verdicts" in page and "By stratum" in page and "By time" in page
    assert not [words for words in ("Replicas", "none has reported", "textarea") if words in page]
    for page in ("/", "/report", "/report.json", "/metrics", "/v1/verdicts/forged"):
        text = (await client.get(page)).text
        assert SECRET not in text and str(PROMPT) not in text, "nothing of a client is shown unless asked"
    unwatched = await client.get("/v1/verdicts/other")
    assert unwatched.status_code == 404 and "not watched" in unwatched.json()["error"]["message"]


async def test_what_is_no_batch_is_refused(client: httpx.AsyncClient) -> None:
    sent = batch("x", [-1.0, -1.0, -1.0])
    bodies = [b"", b"{", b"[]", b'{"exchanges": [{}], "counts": {}}', b'{"exchanges": []}']
    bodies += [sent.replace(b"1000000000.0", at) for at in (b"NaN", b"1e999", b'"x"')]
    for body in (*bodies, b'{"exchanges": [], "counts": {"captured": -1}}'):
        reply = await client.post("/v1/exchanges", content=body)
        assert (reply.status_code, "not a batch of exchanges" in reply.text) == (400, True), body
    assert (await client.get("/health")).is_success


WRONG = [
    b'{"id": "w", "choices": [{"index": "x", "token_ids": [20], "finish_reason": "length"}]}',
    b'{"id": "w", "choices": [{"token_ids": [20], "logprobs": {"token_logprobs": [NaN]}, "finish_reason": "length"}]}',
    b'{"choices": [{"token_ids": [20], "finish_reason": "length", "logprobs": {"token_logprobs": [-1e999]}}]}',
    b'{"id": "w", "choices": [{"token_ids": [-1], "finish_reason": "length"}]}',
]


async def test_whatever_a_server_says_the_referee_goes_on(client: httpx.AsyncClient, folder: Path) -> None:
    """A batch that is refused with 500 would be sent again for ever."""
    request = json.dumps({"prompt": PROMPT}).encode()
    wrong = tuple(Exchange(COMPLETIONS, request, reply, False, 1e9, 1e9, "pod-\udc80") for reply in WRONG)
    assert (await client.post("/v1/exchanges", content=ExchangeBatch(wrong, {"new": 1}).to_wire())).status_code == 204
    assert (await client.post("/v1/exchanges", content=batch("a/b", await logprobs(folder)))).status_code == 204
    assert (await verdict(client, "a/b"))["verdict"] == "verified"
    for page in ("/", "/report", "/report.json", "/metrics"):
        assert (await client.get(page)).is_success, page
