"""A stream of events by itself: what goes out together, what goes at once, and how it ends."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from serve_app.http.event_stream import EventStream, Pace
from tests.support.waiting import until

FOR_EVER = 1000.0  # seconds: what waits for this does not come


class Client:
    """Takes a stream; `messages` are the bodies it was sent, and it leaves when asked to."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.leaves = asyncio.Event()
        self.complete = False

    async def take(self, stream: EventStream) -> None:
        async with asyncio.timeout(20):
            await stream({"type": "http", "path": "/"}, self._receive, self._send)

    async def until(self, text: bytes) -> None:
        await until(lambda: text in b"".join(self.messages))

    async def _receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if message["body"]:
                self.messages.append(message["body"])
            self.complete = not message["more_body"]


async def five_events() -> AsyncGenerator[bytes, None]:
    for number in range(5):
        yield b"%d;" % number
        await asyncio.sleep(0.001)


async def stream_of(events: AsyncGenerator[bytes, None], **settings: Any) -> EventStream:
    return EventStream(await anext(events), events, **settings)


@pytest.mark.parametrize(
    ("settings", "messages"),
    [({}, [b"0;", b"1;", b"2;", b"3;", b"4;"]), ({"pace": Pace(FOR_EVER)}, [b"0;", b"1;2;3;4;"])],
)
async def test_events_of_one_interval_go_together_and_the_end_waits_for_none(
    settings: dict[str, Any], messages: list[bytes]
) -> None:
    client = Client()
    await client.take(await stream_of(five_events(), **settings))
    assert client.messages == messages and client.complete


class Stepped:
    """A client whose stream gets its events, and its time, from the test."""

    def __init__(self, pace: Pace, monkeypatch: pytest.MonkeyPatch, keep_alive_s: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        self._now, self._settings = loop.time(), {"pace": pace, "keep_alive_s": keep_alive_s}
        self._client, self._feed = Client(), asyncio.Queue[bytes]()
        monkeypatch.setattr(loop, "time", lambda: self._now)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        while True:
            yield await self._feed.get()

    async def begin(self, first: bytes = b"a;") -> None:
        self._feed.put_nowait(first)
        self._taking = asyncio.create_task(self._client.take(await stream_of(self._events(), **self._settings)))

    async def later(self, seconds: float, *arriving: bytes) -> list[bytes]:
        self._now += seconds
        for event in arriving:
            self._feed.put_nowait(event)
        for _ in range(20):
            await asyncio.sleep(0)
        return self._client.messages

    async def leave(self) -> None:
        self._client.leaves.set()
        await self._taking


async def test_a_message_goes_with_the_first_event_after_its_interval_or_in_silence_after_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stepped = Stepped(Pace(1.0), monkeypatch)
    later = stepped.later
    await stepped.begin()
    assert await later(0.0) == [b"a;"]
    assert await later(0.8, b"b;") == [b"a;"]
    assert await later(0.5) == [b"a;"], "an event is about to come"
    assert await later(0.1, b"c;") == [b"a;", b"b;c;"]
    assert await later(0.5, b"d;") == [b"a;", b"b;c;"]
    assert await later(1.4) == [b"a;", b"b;c;"]
    assert await later(0.2) == [b"a;", b"b;c;", b"d;"]
    assert await later(5.0, b"e;") == [b"a;", b"b;c;", b"d;", b"e;"], "nothing was sent for a while"
    await stepped.leave()


@pytest.mark.parametrize(
    ("interval_s", "num_streams", "expected_s"),
    [(0.05, 1, 0.05), (0.05, 4, 0.05), (0.05, 8, 0.1), (0.05, 500, 0.2), (0.0, 500, 0.0), (1.0, 500, 1.0)],
)
def test_the_interval_grows_with_the_streams(interval_s: float, num_streams: int, expected_s: float) -> None:
    for few, times in ((4, 1), (16, 4)):
        pace = Pace(interval_s, few)
        pace.num_streams = times * num_streams
        assert pace.interval_s == pytest.approx(expected_s)


@pytest.mark.parametrize("interval_s", [0.0, 0.05])
async def test_a_comment_ends_each_long_silence(monkeypatch: pytest.MonkeyPatch, interval_s: float) -> None:
    stepped, comment = Stepped(Pace(interval_s), monkeypatch, keep_alive_s=3.0), b": keep-alive\n\n"
    later = stepped.later
    await stepped.begin(b"")
    assert await later(0.0) == await later(2.9) == []
    assert await later(0.2) == [comment]
    assert await later(2.0, b"a;") == [comment, b"a;"], "an event is a sign of life"
    assert await later(2.0) == [comment, b"a;"]
    assert await later(1.1) == [comment, b"a;", comment]
    assert await later(3.1) == [comment, b"a;", comment, comment]
    await stepped.leave()


async def test_a_stream_follows_the_pace_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(0.05)
    stepped = Stepped(pace, monkeypatch)
    later = stepped.later
    await stepped.begin()
    assert await later(0.0, b"b;") == [b"a;"]
    pace.num_streams += 7
    assert await later(0.06, b"c;") == [b"a;", b"b;c;"]
    assert await later(0.06, b"d;") == [b"a;", b"b;c;"], "eight streams share the pace"
    pace.num_streams -= 7
    assert await later(0.06, b"e;") == [b"a;", b"b;c;", b"d;e;"]
    assert await later(0.06, b"f;") == [b"a;", b"b;c;", b"d;e;", b"f;"], "it is alone again"
    await stepped.leave()


@pytest.mark.parametrize("interval_s", [0.0, 0.01, FOR_EVER])
async def test_a_source_that_fails_has_its_events_sent_and_its_error_raised(interval_s: float) -> None:
    ended = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"a;"
        yield b"b;"
        raise ValueError("broken")

    client = Client()
    with pytest.raises(ValueError, match="broken"):
        await client.take(await stream_of(events(), pace=Pace(interval_s), closed=lambda: ended.append("lease")))
    assert b"".join(client.messages) == b"a;b;"
    assert not client.complete
    assert ended == ["lease"]


@pytest.mark.parametrize("interval_s", [0.0, 0.01, FOR_EVER])
async def test_a_client_that_leaves_ends_the_source(interval_s: float) -> None:
    ended = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a;"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # to end may take a while
            ended.append("source")

    client = Client()
    stream = await stream_of(events(), pace=Pace(interval_s), closed=lambda: ended.append("lease"))
    taking = asyncio.create_task(client.take(stream))
    await client.until(b"a;")
    client.leaves.set()
    await taking
    assert ended == ["source", "lease"]
