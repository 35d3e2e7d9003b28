"""The time that the proxy adds to a request: the same requests straight and through it, in turns, in one run."""

import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from multiprocessing.context import SpawnProcess
from pathlib import Path

import aiohttp
import click
from aiohttp import web

from deploy.cli.console import a_file, err, say
from deploy.exchange.exchanges import CHAT
from deploy.options import check_writable, write_json
from deploy.reports.progress import View
from deploy.watch.proxy import ProxyOptions, running_proxy
from tools.console import ToolCommand

_TOKENS = 16
_TOKEN_S = 0.001
_WARM_UP = 50
_STARTS_WITHIN_S = 60.0
_MS = 1000.0

Figures = dict[str, dict[str, float]]


def added_latency(requests: int = 500, *, kinds: tuple[str, ...] = ("unwatched", "watched")) -> Figures:
    """Measure with so many requests of each kind, straight and through the proxy.

    The server answers at once or streams a token each millisecond, and each of server, proxy and client has a process
    of its own. Gives, by `KIND.whole`, `KIND.first_event` and `KIND.stream` (until its end), the medians in ms:
    `straight`, `proxy`, `added` (of the differences of neighbours), and `added_p90`.
    """
    return asyncio.run(_measured(requests, kinds))


async def _measured(requests: int, kinds: tuple[str, ...]) -> Figures:
    figures: Figures = {}
    async with _process(_serve_upstream) as server:
        for kind in kinds:
            share = 1.0 if kind == "watched" else 0.0
            async with _process(_serve_proxy, server, share) as proxy:
                for streamed in (False, True):
                    pairs = await _pairs(server, proxy, requests, streamed=streamed)
                    for name, of in (("first_event", 0), ("stream" if streamed else "whole", 1)):
                        if streamed or name == "whole":
                            figures[f"{kind}.{name}"] = _figures([(one[of], other[of]) for one, other in pairs])
    return figures


def _figures(pairs: list[tuple[float, float]]) -> dict[str, float]:
    added = sorted(through - straight for straight, through in pairs)
    return {
        "straight": _MS * statistics.median(straight for straight, _ in pairs),
        "proxy": _MS * statistics.median(through for _, through in pairs),
        "added": _MS * statistics.median(added),
        "added_p90": _MS * added[9 * len(added) // 10],
    }


Times = tuple[float, float]
"""Seconds until the first event, and until the end."""


async def _pairs(server: str, proxy: str, requests: int, *, streamed: bool) -> list[tuple[Times, Times]]:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "stream": streamed}
    data = json.dumps(body).encode()
    pairs = []
    async with aiohttp.ClientSession() as session:
        for turn in range(_WARM_UP + requests):
            order = (server, proxy) if turn % 2 else (proxy, server)
            times = {url: await _timed(session, f"{url}{CHAT}", data) for url in order}
            if turn >= _WARM_UP:
                pairs.append((times[server], times[proxy]))
    return pairs


async def _timed(session: aiohttp.ClientSession, url: str, data: bytes) -> Times:
    began = time.perf_counter()
    async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as reply:
        await reply.content.readany()
        first = time.perf_counter()
        await reply.content.read()
    return first - began, time.perf_counter() - began


@asynccontextmanager
async def _process(target: object, *arguments: object) -> AsyncIterator[str]:
    """The URL of a server in a process of its own, which ends with the block."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=target, args=(port, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    try:
        await asyncio.to_thread(_wait_until_open, port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join(10)


def _wait_until_open(port: int, process: SpawnProcess) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < deadline and process.is_alive():
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"A server for the measurement did not start on port {port}; its error is above. Run it again.")


def _serve_proxy(port: int, server: str, share: float) -> None:
    async def serve() -> None:
        async with running_proxy(ProxyOptions(server, port=port, share=share, dialect="vllm")):
            await asyncio.Event().wait()

    asyncio.run(serve())


def _serve_upstream(port: int) -> None:
    app = web.Application()
    app.router.add_post(CHAT, _answer)
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


async def _answer(request: web.Request) -> web.StreamResponse:
    """Answer like vLLM: with a reply at once, or a stream of 16 tokens, one each millisecond."""
    asked = json.loads(await request.read())
    ids = [17] if asked.get("return_token_ids") else None
    entry = {"token": " a", "logprob": -0.5, "bytes": [32, 97], "top_logprobs": []}
    if not asked["stream"]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": " a" * _TOKENS},
            "logprobs": {"content": [entry] * _TOKENS} if asked.get("logprobs") else None,
            "finish_reason": "length",
            "token_ids": None if ids is None else ids * _TOKENS,
        }
        return web.json_response({"id": "x", "choices": [choice], "prompt_token_ids": ids})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    logprobs = {"content": [entry]} if asked.get("logprobs") else None
    began = asyncio.get_running_loop().time()
    for number in range(_TOKENS):
        choice = {"index": 0, "delta": {"content": " a"}, "logprobs": logprobs, "finish_reason": None, "token_ids": ids}
        await response.write(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n")
        due = began + (number + 1) * _TOKEN_S  # a schedule of its own, as an engine has: a late token makes none later
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
    await response.write(b"data: [DONE]\n\n")
    return response


@click.command(cls=ToolCommand)
@click.option(
    "--requests",
    type=click.IntRange(min=10),
    default=500,
    show_default=True,
    help="Send this many of each kind each way.",
)
@click.option("--json", "json_file", type=a_file, help="Write the figures to this file.")
def main(requests: int, json_file: Path | None) -> None:
    """Measure what the proxy of `truespec watch` adds to a request's time, watched and unwatched."""
    check_writable(json_file, "--json")
    with View(err) as view:
        view.stage(f"sending {requests} requests of each kind straight and through the proxy")
        found = added_latency(requests)
    for name, way in found.items():
        added = f"{way['added']:+.2f} ms by the proxy, {way['added_p90']:+.2f} at the 90th percentile"
        say(f"{name}: {way['straight']:.2f} ms straight, {added}")
    write_json(json_file, found, indent=1)


if __name__ == "__main__":
    main()
