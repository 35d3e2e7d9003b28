"""The proxy, between sockets: what passes is the same, watched or not."""

import asyncio
import gzip
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from deploy.watch.proxy import Proxy, ProxyOptions, running_proxy
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS
from tests.deploy.watch.conftest import Referee
from tests.support.raw_upstream import RawRequest, RawUpstream, chunk, reply, stream_head
from tests.support.watched_server import JSON_TYPE, answer, plain_events, plain_reply

KEY = "Bearer secret-of-the-client"


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def raw(url: str, data: bytes, *, until: bytes | None = None) -> bytes:
    """Send bytes, and read all that comes, until the connection ends or something came."""
    reader, writer = await connected(url)
    writer.write(data)
    got = await (reader.read() if until is None else reader.readuntil(until))
    writer.close()
    return got


async def asked(client: aiohttp.ClientSession, url: str, path: str = CHAT, **fields: Any) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json", "Authorization": KEY}
    async with client.post(url + path, data=json.dumps(fields), headers=headers) as got:
        return got.status, await got.read()


@pytest.fixture
async def proxied(server: RawUpstream) -> AsyncIterator[tuple[str, Proxy]]:
    """The URL of a proxy that knows what the server is, and the proxy."""
    async with running_proxy(ProxyOptions(server.url, dialect="vllm", as_sent=0.0)) as running:
        yield running


REQUEST = (
    b"POST /v1/%C3%A9//x/../y%2Fz?a=%20b+c&a=1&empty=&q=%7e HTTP/1.1\r\n"
    b"Host: client.example\r\nx-Odd-CASE: 1\r\nX-Two: b\r\nX-Two: a\r\nCookie: a=1; b=2\r\nAuthorization: Bearer k\r\n"
    b"Connection: close, x-hop\r\nX-Hop: gone\r\nKeep-Alive: timeout=3\r\nX-Long: " + b"v" * 20_000 + b"\r\n"
)


async def test_a_request_reaches_the_server_as_it_was_sent(server: RawUpstream, proxied: tuple[str, Proxy]) -> None:
    async def plain(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b"ok"))

    server.answer, url = plain, proxied[0]
    body, packed = bytes(range(256)) * 100, gzip.compress(b"{}")
    await raw(url, REQUEST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + chunk(body) + chunk(b"tail") + chunk(b"")
    await raw(url, REQUEST + chunked)
    await raw(url, b"GET /x HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
    await raw(url, head.encode() + packed, until=b"ok")
    hops = (b"Host", b"Connection", b"X-Hop", b"Keep")
    sent = [line for line in REQUEST.split(b"\r\n")[1:-1] if not line.startswith(hops)]
    first, second, third, fourth = server.requests
    for request, more in (
        (first, [b"Content-Length: %d" % len(body)]),
        (second, [b"Transfer-Encoding: chunked", b"Connection: close"]),
    ):
        assert request.lines[0] == REQUEST.split(b"\r\n")[0]
        assert request.lines[1:] == [b"Host: " + server.url.removeprefix("http://").encode(), *sent, *more]
    assert (first.body, second.body, fourth.body) == (body, body + b"tail", packed)
    assert third.lines == [b"GET /x HTTP/1.1", b"Host: " + server.url.removeprefix("http://").encode()]


REPLIES = {
    "repeated and odd headers": reply(b"\x00\xffbody", "X-Two: b", "x-two: a", "Set-Cookie: a=1", "Set-Cookie: b=2"),
    "its own date and server": reply(b"x", "Server: mine", "Date: never", "content-type: text/odd"),
    "an odd reason": reply(b"x", status="299 Odd Reason"),
    "gzip stays packed": reply(gzip.compress(b"hello" * 100), "content-encoding: gzip", "content-type: text/plain"),
    "no content": b"HTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n",
    "a redirect": reply(b"", "Location: /elsewhere", status="307 Temporary Redirect"),
    "an error": reply(b'{"detail":"no"}', JSON_TYPE, status="422 Unprocessable Entity"),
    "empty": reply(b""),
    "the length of what HEAD asks about": b"HTTP/1.1 200 OK\r\ncontent-length: 77\r\n\r\n",
}


@pytest.mark.parametrize("path", ["/metrics", CHAT])
async def test_a_reply_comes_back_as_it_was_sent(path: str, server: RawUpstream, proxied: tuple[str, Proxy]) -> None:
    async def given(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(expected)

    server.answer = given
    for name, expected in REPLIES.items():
        for _ in range(2):
            method = "HEAD" if "HEAD" in name else "POST"
            head = f"{method} {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
            got = await raw(proxied[0], head.encode())
            assert got.replace(b"Connection: close\r\n", b"") == expected, name


async def test_who_waits_for_a_go_ahead_gets_it(server: RawUpstream, proxied: tuple[str, Proxy]) -> None:
    reader, writer = await connected(proxied[0])
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"{}")
    await reader.readuntil(plain_reply(CHAT))
    writer.close()
    assert server.requests[0].values("Expect") == []


async def test_old_clients_get_streams_without_chunks(proxied: tuple[str, Proxy]) -> None:
    body = b'{"stream": true}'
    head = f"POST {CHAT} HTTP/1.0\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for _ in range(2):
        got = await raw(proxied[0], head + body)
        assert got.partition(b"\r\n\r\n")[2] == b"".join(plain_events())


async def test_a_stream_is_passed_on_event_by_event(
    server: RawUpstream, proxied: tuple[str, Proxy], client: aiohttp.ClientSession
) -> None:
    """The server sends an event only after the client has the one before."""
    got_it, (url, proxy) = asyncio.Event(), proxied
    expected = [event for event in plain_events() if b'"delta":{},' not in event]
    with_ids = [e for e in plain_events(logprobs=True, return_token_ids=True) if b'{},"logp' not in e]

    async def step_by_step(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head())
        for event in with_ids if b"return_token_ids" in request.body else expected:
            got_it.clear()
            writer.write(chunk(event))
            await asyncio.wait_for(got_it.wait(), 5)
        writer.write(chunk(b""))

    server.answer = step_by_step
    for _ in range(2):
        got = []
        async with client.post(url + CHAT, data=b'{"stream": true}') as stream:
            async for piece in stream.content.iter_any():
                got.append(piece)
                got_it.set()
        assert got == expected
    assert proxy.counts == {"captured": 2}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_watched_reply_is_the_plain_one_and_the_referee_gets_more(
    path: str, server: RawUpstream, client: aiohttp.ClientSession, referee: Referee
) -> None:
    options = ProxyOptions(server.url, referee=referee.server.url, replica_header="X-Replica", as_sent=0.0)
    async with running_proxy(options) as (url, _):
        for _ in range(3):
            assert await asked(client, url, path, model="m") == (200, plain_reply(path))
        if path == CHAT:
            for _ in range(3):
                assert await asked(client, url, path, stream=True) == (200, b"".join(plain_events()))
    assert referee.counts["captured"] == len(referee.exchanges) == (6 if path == CHAT else 3)
    one = referee.exchanges[0]
    assert (one.path, one.request, one.replica, one.streamed) == (path, b'{"model": "m"}', "r1", False)
    assert one.reply == plain_reply(path, logprobs=True, return_token_ids=True)
    assert one.began_at <= one.ended_at
    of_replies = [request for request in server.requests if request.target == path]
    assert [request.values("Accept-Encoding") for request in of_replies] == [[]] * len(of_replies), "in text"
    if path == CHAT:
        assert referee.exchanges[-1].reply == b"".join(plain_events(logprobs=True, return_token_ids=True))
        assert referee.exchanges[-1].streamed


async def test_keys_never_leave_and_prompts_are_never_logged(
    server: RawUpstream, client: aiohttp.ClientSession, referee: Referee, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_proxy(ProxyOptions(server.url, referee=referee.server.url, as_sent=0.0)) as (url, _):
        for _ in range(2):
            await asked(client, url, CHAT + "?key=secret-of-the-client", messages=["a private prompt"])
        malformed = await raw(url, b"POST /v1/completions HTTP/1.1\r\nAuthorization " + KEY.encode() + b"\r\n\r\n")
    assert b" 400 " in malformed.splitlines()[0]
    assert referee.exchanges
    assert b"secret-of-the-client" not in referee.raw
    assert "secret-of-the-client" not in caplog.text
    assert "private prompt" not in caplog.text
    assert {value for request in server.requests[1:] for value in request.values("Authorization")} == {KEY}


@pytest.mark.parametrize(
    ("refused", "status"),
    [(["return_token_ids"], "422 No"), (["return_token_ids"], "200 OK"), (["return_token_ids", "logprobs"], "422 No")],
)
async def test_a_server_that_refuses_what_is_added_is_asked_for_less(
    refused: list[str], status: str, server: RawUpstream, client: aiohttp.ClientSession, referee: Referee
) -> None:
    async def picky(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        if any(name.encode() in request.body for name in refused):
            writer.write(reply(b'{"error": {"message": "unexpected field"}}', JSON_TYPE, status=status))
        else:
            await answer(request, writer)

    server.answer = picky
    options = ProxyOptions(server.url, dialect="vllm", referee=referee.server.url, as_sent=0.0)
    async with running_proxy(options) as (url, proxy):
        for _ in range(5):
            assert await asked(client, url) == (200, plain_reply(CHAT))
        assert proxy.counts == {"refused": len(refused), "captured": 5 - len(refused)}
    left = {} if "logprobs" in refused else {"logprobs": True}
    assert {one.reply for one in referee.exchanges} == {plain_reply(CHAT, **left)}


@pytest.mark.parametrize("there", [False, True])
async def test_a_server_that_says_nothing_is_a_502_in_openais_form_and_the_proxys_own_health_goes_on(
    client: aiohttp.ClientSession, server: RawUpstream, there: bool
) -> None:
    async def gone(request: RawRequest, writer: asyncio.StreamWriter) -> bool:
        return False

    server.answer, address = gone, server.url if there else "http://127.0.0.1:9"
    async with running_proxy(ProxyOptions(address, dialect="vllm", as_sent=0.0)) as (url, proxy):
        async with client.get(url + "/.truespec/health") as got:
            assert (got.status, await got.text()) == (200, "ok\n")
        assert not proxy.counts
        status, body = await asked(client, url)
        assert proxy.counts["unreachable"] == 1
    error = json.loads(body)["error"]
    assert status == 502
    assert error.keys() == {"message", "type", "param", "code"}
    assert f"{address} " in error["message"]
    assert (error["type"], error["code"]) == ("server_error", "server_unreachable")


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_connections_that_the_server_closes_cost_no_request(
    share: float, server: RawUpstream, client: aiohttp.ClientSession
) -> None:
    """As llama.cpp does it after a stream: the next request may be on its way already."""

    served: set[asyncio.StreamWriter] = set()

    async def closing(request: RawRequest, writer: asyncio.StreamWriter) -> bool | None:
        if writer in served:
            return False
        served.add(writer)
        return await answer(request, writer)

    server.answer = closing
    async with running_proxy(ProxyOptions(server.url, share=share, dialect="vllm", as_sent=0.0)) as (url, proxy):
        for _ in range(4):
            assert await asked(client, url) == (200, plain_reply(CHAT))
        assert proxy.counts["unreachable"] == 0
    assert len(server.requests) > 4


async def test_long_bodies_are_passed_on_as_they_come(server: RawUpstream) -> None:
    """The server has the first part before the client sends the second."""
    got_first = asyncio.Event()

    async def reading(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"first")
        got_first.set()
        await reader.readuntil(b"last")
        writer.write(reply(b"ok"))
        await writer.drain()
        writer.close()

    upstream = await asyncio.start_server(reading, "127.0.0.1", 0, limit=2**21)
    address = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
    async with running_proxy(ProxyOptions(address, dialect="vllm", as_sent=0.0)) as (url, _):
        answers, writer = await connected(url)
        writer.write(b"POST /v1/files HTTP/1.1\r\nHost: h\r\nContent-Length: 1000009\r\n\r\nfirst")
        await asyncio.wait_for(got_first.wait(), 5)
        writer.write(b"x" * 1_000_000 + b"last")
        await asyncio.wait_for(answers.readuntil(b"ok"), 5)
        writer.close()
    upstream.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_reply_that_breaks_off_breaks_off_for_the_client_too(
    share: float, server: RawUpstream, client: aiohttp.ClientSession
) -> None:
    async def dying(request: RawRequest, writer: asyncio.StreamWriter) -> bool:
        writer.write(stream_head() + chunk(plain_events()[0]))
        await writer.drain()
        await asyncio.sleep(0.05)
        return False

    async with running_proxy(ProxyOptions(server.url, share=share, dialect="vllm", as_sent=0.0)) as (url, proxy):
        await asked(client, url, stream=True)
        server.answer = dying
        async with client.post(url + CHAT, data=b'{"stream": true}') as stream:
            assert await stream.content.readany() == plain_events()[0]
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.content.read()
        assert proxy.counts["broken_off"] == 1
        assert proxy.counts["captured"] == share, "of the first request"


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_client_that_leaves_takes_its_request_along(
    share: float, server: RawUpstream, client: aiohttp.ClientSession
) -> None:
    left = asyncio.Event()

    async def slow(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(stream_head() + chunk(plain_events()[0]))
        assert await request.reader.read(1) == b""
        left.set()

    async with running_proxy(ProxyOptions(server.url, share=share, dialect="vllm", as_sent=0.0)) as (url, proxy):
        await asked(client, url, stream=True)
        server.answer = slow
        stream = await client.post(url + CHAT, data=b'{"stream": true}')
        await stream.content.readany()
        stream.close()
        await asyncio.wait_for(left.wait(), 4)
        assert proxy.counts["left"] == share


async def test_upgrades_are_refused_in_openais_form_and_offers_of_another_protocol_passed_over(
    server: RawUpstream, proxied: tuple[str, Proxy], client: aiohttp.ClientSession
) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
    async with client.get(proxied[0] + "/v1/realtime", headers=headers) as got:
        assert got.status == 501
        assert (await got.json())["error"]["code"] == "upgrade"
    # As Java's client sends with its first request.
    offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\nContent-Length: 2\r\n\r\n{}"
    taken = await raw(proxied[0], f"POST {CHAT} HTTP/1.1\r\nHost: h\r\n{offer}".encode(), until=b"\r\n\r\n")
    assert taken.startswith(b"HTTP/1.1 200 OK")
    assert not any(server.requests[-1].values(name) for name in ("Upgrade", "Connection", "HTTP2-Settings"))


async def test_what_is_too_large_passes_uncaptured(
    server: RawUpstream, client: aiohttp.ClientSession, referee: Referee
) -> None:
    most = len(plain_reply(CHAT))
    options = ProxyOptions(server.url, referee=referee.server.url, max_exchange_bytes=most, as_sent=0.0)
    async with running_proxy(options) as (url, proxy):
        for _ in range(2):
            assert await asked(client, url) == (200, plain_reply(CHAT))
        assert await asked(client, url, user="x" * 1000) == (200, plain_reply(CHAT))
        assert proxy.counts["too_large"] == 3
    assert not referee.exchanges


@pytest.mark.parametrize(("owner", "field"), [("vllm", b"return_token_ids"), ("llamacpp", b"top_logprobs")])
async def test_the_dialect_is_found_even_behind_keys(owner: str, field: bytes, client: aiohttp.ClientSession) -> None:
    async def locked(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        if request.values("Authorization") != [KEY]:
            writer.write(reply(b"", status="401 Unauthorized"))
        elif request.target == "/v1/models":
            writer.write(reply(json.dumps({"data": [{"owned_by": owner}]}).encode(), JSON_TYPE))
        else:
            await answer(request, writer)

    running = RawUpstream(locked).running()
    async with running as server, running_proxy(ProxyOptions(server.url, as_sent=0.0)) as (url, _):
        for _ in range(2):
            assert await asked(client, url) == (200, plain_reply(CHAT))
        assert field in server.requests[-1].body


async def test_a_thousand_streams_at_once_lose_no_byte(server: RawUpstream, client: aiohttp.ClientSession) -> None:
    number, open_now = 1000, asyncio.Semaphore(0)
    all_open = asyncio.Event()

    async def together(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        open_now.release()
        await all_open.wait()
        await answer(request, writer)

    server.answer = together
    async with running_proxy(ProxyOptions(server.url, share=0.5, dialect="vllm", max_queued=2000)) as (url, proxy):
        streams = [asyncio.create_task(asked(client, url, stream=True, model="m", user=str(n))) for n in range(number)]
        for _ in range(number):
            await asyncio.wait_for(open_now.acquire(), 60)
        all_open.set()
        got = await asyncio.gather(*streams)
        counts = proxy.counts
    assert set(got) == {(200, b"".join(plain_events()))}
    assert counts["captured"] > 300
    assert counts["passed"] > 300
    assert counts["captured"] + counts["passed"] == number


@pytest.mark.parametrize(
    ("status", "num_failures", "shown"),
    [("500 Internal Server Error", 1, (200, plain_reply(CHAT))), ("400 Bad Request", 2, (400, b"oh"))],
    ids=["by chance", "the client's own"],
)
async def test_a_failure_that_has_another_cause_is_no_refusal_of_what_is_added(
    status: str,
    num_failures: int,
    shown: tuple[int, bytes],
    server: RawUpstream,
    proxied: tuple[str, Proxy],
    client: aiohttp.ClientSession,
) -> None:
    fails, (url, proxy) = Counter[str](), proxied

    async def shaky(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        if fails["next"]:
            fails["next"] -= 1
            writer.write(reply(b"oh", status=status))
        else:
            await answer(request, writer)

    server.answer = shaky
    await asked(client, url)
    for _ in range(4):
        fails["next"] = num_failures
        assert await asked(client, url) == shown
        assert await asked(client, url) == (200, plain_reply(CHAT))
        assert b"return_token_ids" in server.requests[-1].body
    assert proxy.counts["captured"] == 5


async def test_a_server_that_still_loads_is_asked_later_what_it_is(
    server: RawUpstream, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp does; taken for vLLM, its defaults would be judged as faults.

    No key is needed for that, and a server that says nothing holds nothing up.
    """
    monkeypatch.setattr("deploy.watch.proxy._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("deploy.watch.proxy._LOOK_WITHIN_S", 0.2)
    states = ["loads"]

    async def loading(request: RawRequest, writer: asyncio.StreamWriter) -> None:
        if states[-1] == "loads":
            writer.write(reply(b'{"error": {"code": 503}}', JSON_TYPE, status="503 Service Unavailable"))
        elif request.target != "/v1/models":
            await answer(request, writer)
        elif states[-1] == "hangs":
            await asyncio.sleep(60)
        else:
            writer.write(reply(b'{"data": [{"owned_by": "llamacpp"}]}', JSON_TYPE))

    server.answer = loading
    async with asyncio.timeout(10), running_proxy(ProxyOptions(server.url, as_sent=0.0)) as (url, proxy):
        assert (await asked(client, url))[0] == 503
        for state in ("hangs", "serves", "serves"):
            states.append(state)
            async with client.post(url + CHAT, data=b"{}") as got:
                assert await got.read() == plain_reply(CHAT)
        assert b"top_logprobs" in server.requests[-1].body
        assert proxy.counts == {"unwatchable": 2, "captured": 2}


async def test_forms_without_end_neither_fill_the_memory_nor_end_the_watch(
    server: RawUpstream, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.watch.proxy._MOST_FORMS", 4)
    async with running_proxy(ProxyOptions(server.url, dialect="vllm", as_sent=0.0)) as (url, proxy):
        for number in range(10):
            await asked(client, url, **{f"field-{number}": "x"})
        await asked(client, url, **{"x" * 100_000: "x"})
        for _ in range(2):
            await asked(client, url, model="m")
        assert proxy.counts == {"captured": 12, "unwatchable": 1}
        assert len(proxy._forms) == 4
