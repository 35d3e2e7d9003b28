"""Streams of completions from a server, all at once. Standard library only, and little work: it shares the cores."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from serve_app.referee.wire.reply import EventReader
from tools.bench.workers.channel import BatchOfPrompts, Meter


class ServerFailed(Exception):
    """The server refused, or broke off."""


@dataclass(frozen=True)
class ServerLoad:
    """The address of an OpenAI-compatible server."""

    host: str
    port: int
    model: str

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """One stream a prompt, started together. Raises ServerFailed: a stream did not end well."""
        return asyncio.run(self._run(ask))

    async def _run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        meter = Meter(len(ask.prompts))
        await asyncio.gather(*(self._stream(ask, stream, meter) for stream in range(len(ask.prompts))))
        return meter.sample()

    async def _stream(self, ask: BatchOfPrompts, stream: int, meter: Meter) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(self._request(ask.prompts[stream], ask))
            await writer.drain()
            await _read_head(reader)
            events = EventReader()
            while chunk := await _read_chunk(reader):
                for event in events.push(chunk):
                    if event.get("error") is not None:
                        raise ServerFailed(str(event["error"]))
                    for choice in event.get("choices") or ():
                        meter.emit(stream, choice.get("token_ids") or ())
        finally:
            writer.close()

    def _request(self, prompt: list[int], ask: BatchOfPrompts) -> bytes:
        """Without a seed: our service makes sampled requests with one reproducible, which costs acceptance."""
        body = json.dumps(
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": ask.max_tokens,
                "temperature": ask.temperature,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def _read_head(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *fields = head.split("\r\n")
    if status.split()[1] != "200":
        raise ServerFailed(f"{status}: {(await reader.read(2000)).decode(errors='replace')}")
    if not any(field.lower().replace(" ", "") == "transfer-encoding:chunked" for field in fields):
        raise ServerFailed(f"the answer is not a stream: {head}")


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of a chunked body; empty at its end."""
    size = int((await reader.readline()).split(b";")[0], 16)
    data = await reader.readexactly(size + 2)
    return data[:size]
