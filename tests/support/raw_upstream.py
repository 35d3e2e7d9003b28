"""A server of which a test says every byte, and which keeps every byte that it was sent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class RawRequest:
    """A request as it came. lines: its first line and its headers; body: without the framing of chunks; reader: what
    comes after it.
    """

    lines: list[bytes]
    body: bytes
    reader: asyncio.StreamReader

    @property
    def target(self) -> str:
        return self.lines[0].split(b" ")[1].decode()

    def values(self, name: str) -> list[str]:
        """The values of a header, in order."""
        pairs = (line.decode("utf-8").split(": ", 1) for line in self.lines[1:])
        return [value for key, value in pairs if key.lower() == name.lower()]


Answer = Callable[[RawRequest, asyncio.StreamWriter], Awaitable[bool | None]]
"""Writes a reply; False = close the connection after it, or without one."""


class RawUpstream:
    """What came, and how it is answered."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[RawRequest] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["RawUpstream"]:
        """Serve until the block ends."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=4096, limit=2**20)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tasks: set[asyncio.Task[None]] = set()
        self._tasks = tasks
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                if await self.answer(request, writer) is False:
                    break
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        except asyncio.CancelledError:
            pass  # the test ends
        finally:
            self._tasks.discard(task)
            writer.close()


async def _read(reader: asyncio.StreamReader) -> RawRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head[:-4].split(b"\r\n")
    framing = {line.split(b":")[0].lower(): line.split(b":", 1)[1].strip() for line in lines[1:]}
    if b"content-length" in framing:
        return RawRequest(lines, await reader.readexactly(int(framing[b"content-length"])), reader)
    body = b""
    if framing.get(b"transfer-encoding") == b"chunked":
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return RawRequest(lines, body, reader)


def reply(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """A reply with a length."""
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def stream_head(*headers: str) -> bytes:
    """The head of a stream of events."""
    own = ("content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked")
    return "\r\n".join(["HTTP/1.1 200 OK", *headers, *own, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    """In the framing of a chunked body; of no data, its end."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
