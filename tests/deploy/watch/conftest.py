"""A tiny model, a made-up server, and a referee that keeps what it gets."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import ray

from serve_app.referee.wire.exchange import Exchange, ExchangeBatch
from tests.support.raw_upstream import RawRequest, RawUpstream, reply
from tests.support.watched_server import answer
from tools.faults.tiny import write_tiny_pair


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model and its drafter."""
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def folder(folders: tuple[Path, Path]) -> Path:
    """The tiny model."""
    return folders[0]


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest.fixture
async def server() -> AsyncIterator[RawUpstream]:
    async with RawUpstream(answer).running() as running:
        yield running


class Referee:
    """Takes batches, and keeps the bytes."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self.counts: Counter[str] = Counter()
        self.raw = b""
        self.status = "200 OK"
        self.waits_s = 0.0
        self.server = RawUpstream(self._take)

    async def _take(self, request: RawRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.waits_s)
        self.raw += b"\n".join([*request.lines, request.body])
        if self.status.startswith("2"):
            batch = ExchangeBatch.from_wire(request.body)
            self.exchanges += batch.exchanges
            self.counts.update(batch.counts)
        writer.write(reply(b"{}", status=self.status))


@pytest.fixture
async def referee() -> AsyncIterator[Referee]:
    referee = Referee()
    async with referee.server.running():
        yield referee


@pytest.fixture
def ray_ended() -> Iterator[None]:
    """No cluster that a test started outlives it."""
    yield
    ray.shutdown()
