"""What goes to the referee, and that nobody waits for it."""

import asyncio
import time

import aiohttp
import pytest

from deploy.watch import sender as sender_module
from deploy.watch.proxy import ProxyOptions, running_proxy
from deploy.watch.sender import Sender
from serve_app.referee.wire.exchange import CHAT, Exchange, ExchangeBatch
from tests.deploy.watch.conftest import Referee
from tests.deploy.watch.test_proxy import asked
from tests.support.raw_upstream import RawRequest, RawUpstream
from tests.support.waiting import until
from tests.support.watched_server import plain_reply


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(sender_module, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(sender_module, "_LAST_WORD_WITHIN_S", 0.5)


def exchange(number: int, size: int = 10) -> Exchange:
    return Exchange(CHAT, str(number).encode(), b"x" * size, False, 1.0, 2.0)


async def arrive(referee: Referee, number: int) -> list[int]:
    await until(lambda: len(referee.exchanges) >= number)
    return [int(one.request) for one in referee.exchanges]


async def test_exchanges_arrive_in_order_with_what_was_counted(referee: Referee) -> None:
    async with Sender(referee.server.url, 1000, 10**6).running() as sender:
        for number in range(100):
            sender.offer(exchange(number))
        sender.count("passed", 7)
        assert await arrive(referee, 100) == list(range(100))
    assert referee.counts == {"captured": 100, "passed": 7}
    assert len(referee.server.requests) > 1, "in more than one batch"


async def test_counts_arrive_without_exchanges(referee: Referee, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "_COUNTS_EVERY_S", 0.02)
    async with Sender(referee.server.url, 10, 1000).running() as sender:
        sender.count("passed")
        await until(lambda: referee.counts)
    assert referee.counts == {"passed": 1}


@pytest.mark.parametrize(("most", "most_bytes", "kept"), [(3, 10**6, 3), (1000, 45, 4)])
async def test_a_full_queue_drops_and_counts(most: int, most_bytes: int, kept: int, referee: Referee) -> None:
    async with Sender(referee.server.url, most, most_bytes).running() as sender:
        for number in range(9):
            sender.offer(exchange(number))
        assert await arrive(referee, kept) == list(range(kept))
        sender.offer(exchange(9))
        assert (await arrive(referee, kept + 1))[-1] == 9, "what was sent makes room"
    assert referee.counts == {"captured": kept + 1, "dropped": 9 - kept}


async def test_a_referee_that_comes_back_gets_what_waited(referee: Referee) -> None:
    referee.status = "503 Later"
    async with Sender(referee.server.url, 10, 1000).running() as sender:
        for number in range(3):
            sender.offer(exchange(number))
        await asyncio.sleep(0.2)
        assert len(referee.server.requests) > 1, "tried again"
        referee.status = "200 OK"
        assert await arrive(referee, 3) == [0, 1, 2]
    assert referee.counts == {"captured": 3}


@pytest.mark.parametrize("refused", [True, False])
async def test_no_exchange_is_sent_twice(refused: bool, referee: Referee) -> None:
    """Neither if the referee refused it, nor if it took it and its answer was lost."""

    async def takes_and_dies(request: RawRequest, writer: asyncio.StreamWriter) -> bool:
        return False

    take, referee.status = referee.server.answer, "400 No"
    referee.server.answer = take if refused else takes_and_dies
    async with Sender(referee.server.url, 10, 1000).running() as sender:
        sender.offer(exchange(1))
        await until(lambda: sender.totals["failed"])
        referee.server.answer, referee.status = take, "200 OK"
        sender.offer(exchange(2))
        assert await arrive(referee, 1) == [2]
    assert referee.counts["failed"] == 1
    bodies = [ExchangeBatch.from_wire(request.body) for request in referee.server.requests]
    assert sum(len(batch.exchanges) for batch in bodies) == 2


async def test_no_exchange_meets_a_connection_that_the_referee_closes(referee: Referee) -> None:
    """A batch that crossed the closing of an idle connection would be lost: the referee may have taken it."""
    known: list[asyncio.StreamWriter] = []
    take = referee.server.answer

    async def closes_what_was_idle(request: RawRequest, writer: asyncio.StreamWriter) -> bool | None:
        if writer in known:
            return False
        known.append(writer)
        return await take(request, writer)

    referee.server.answer = closes_what_was_idle
    async with Sender(referee.server.url, 10, 1000).running() as sender:
        for number in range(3):
            sender.offer(exchange(number))
            assert await arrive(referee, number + 1) == list(range(number + 1))
    assert sender.totals == {"captured": 3}


@pytest.mark.parametrize("state", ["gone", "slow"])
async def test_requests_pass_while_the_referee_does_not_answer(
    state: str, referee: Referee, server: RawUpstream, client: aiohttp.ClientSession
) -> None:
    referee.waits_s = 60.0 if state == "slow" else 0.0
    url = referee.server.url if state == "slow" else "http://127.0.0.1:9"
    async with running_proxy(ProxyOptions(server.url, referee=url, max_queued=5, as_sent=0.0)) as (address, proxy):
        began = time.monotonic()
        for _ in range(50):
            assert await asked(client, address) == (200, plain_reply(CHAT))
        took_s = time.monotonic() - began
        assert proxy.counts == {"captured": 5, "dropped": 45}
    assert took_s < 5
    assert time.monotonic() - began < 10, "nor does the end wait"
