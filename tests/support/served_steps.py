"""The time that HTTP takes of an engine's process, beside a *recorded engine*: its steps give each request the next
token of a text, and release the interpreter for 7 ms. `python -m tests.support.served_steps PAGE` measures and writes
it.
"""

import asyncio
import gc
import json
import resource
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvicorn

from deploy.reports.model import ReportTable
from serve_app.backends.base import Pace
from serve_app.backends.torch_backend import TorchBackend
from serve_app.http.routes import build_ingress
from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.streams.observed import SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.config import EngineConfig
from speculative.engine import EngineCore
from speculative.model.loading import resolve_model
from speculative.request import FinishReason, Request, Round, TokenDelta, TokenKind
from tests.support.engines import load_engine
from tests.support.front_ends import observed
from tools import markdown
from tools.faults.tiny import write_tiny_pair
from tools.provenance import describe, provenance

_STEP_S, _NUM_STEPS, _INTERVAL_S = 0.007, 300, 0.05
_CLIENTS = """
import asyncio, sys
async def stream(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\ncontent-length: "
    writer.write(f"{head}{len(body)}\\r\\n\\r\\n{body}".encode())
    assert b"[DONE]" in await reader.read()
async def streams(port, count, body):
    await asyncio.gather(*(stream(int(port), body) for _ in range(int(count))))
asyncio.run(streams(*sys.argv[1:]))
"""


class RecordedEngine:
    """Stands for an engine on a GPU: its steps take the interpreter only for what they return."""

    def __init__(self, engine: EngineCore, tokens: list[int]) -> None:
        self._engine, self._tokens = engine, tokens
        self.running: dict[str, tuple[Request, int]] = {}
        self.num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, request: Request, **_: Any) -> None:
        self.running[request.request_id] = request, 0

    def abort(self, request_id: str) -> bool:
        return self.running.pop(request_id, None) is not None

    def step(self) -> list[TokenDelta]:
        time.sleep(_STEP_S)
        self.num_steps += 1
        deltas = []
        for name, (request, place) in [*self.running.items()]:
            reason = FinishReason.LENGTH if place + 1 == request.params.max_tokens else None
            token, rounds = self._tokens[place % len(self._tokens)], (Round("token_wise", 1),)
            deltas.append(TokenDelta(name, (token,), (TokenKind.BONUS,), rounds=rounds, finish_reason=reason))
            self.running[name] = request, place + 1
            if reason is not None:
                del self.running[name]
        return deltas


def _used_s() -> tuple[float, float, float]:
    """CPU time of this thread outside of the kernel, which writes to sockets without the interpreter, that of the
    process, and the time."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_utime, time.process_time(), time.monotonic()


async def measure(folder: Path, num_streams: int) -> list[float]:
    """Microseconds a step while all streams run: HTTP holds the interpreter, CPU of the process, and in all."""
    tokenizer, made = Tokenizer.from_folder(folder), list[RecordedEngine]()
    tokens = tokenizer.encode_continuation(Path(__file__).read_text(encoding="utf-8"))

    def make(at: Path, config: EngineConfig) -> Any:
        made.append(RecordedEngine(load_engine(at, config), tokens))
        return made[0]

    with TemporaryDirectory() as scratch:
        backend = TorchBackend(str(write_tiny_pair(Path(scratch))[0]), "m", EngineConfig(), make, Pace(_INTERVAL_S))
        info, engine = replace(await backend.start(), max_model_len=10_000), made[0]
    metrics = Metrics(BufferSink(), model_name="m", pool="p")
    source = observed(PooledTokenSource(backend, metrics), metrics, SourceLimits(num_streams, 600.0))
    app = build_ingress(FrontEnd(source, tokenizer, info, Limits(pace=Pace(_INTERVAL_S), keep_alive_s=10.0)))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    body = json.dumps({"model": "m", "prompt": [1], "max_tokens": 2 * _NUM_STEPS, "stream": True})
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        asked = str(listening.getsockname()[1]), str(num_streams), body
        clients = subprocess.Popen([sys.executable, "-c", _CLIENTS, *asked])
        while len(engine.running) < num_streams:
            await asyncio.sleep(0.05)
        gc.collect()
        gc.freeze()  # as a replica does
        begun, before = engine.num_steps, _used_s()
        while (num_steps := engine.num_steps - begun) < _NUM_STEPS:
            await asyncio.sleep(0.05)
        after = _used_s()
        assert len(engine.running) == num_streams, "streams ended before they were measured"
        assert await asyncio.to_thread(clients.wait) == 0
        server.should_exit = True
        await serving
    await backend.stop()
    return [1e6 * (late - early) / num_steps for early, late in zip(before, after, strict=True)]


def main(page: str) -> None:
    """Measure 64 and 256 streams, and write the page's section."""
    found, folder, counts = provenance(), resolve_model("smollm2-135m"), (64, 256)
    rows = [[str(one), *(f"{us:,.0f}" for us in asyncio.run(measure(folder, one)))] for one in counts]
    columns = ("streams", "interpreter held by HTTP, µs a step", "CPU of the process, µs", "the step, µs")
    table = markdown.table(ReportTable("", columns, rows, numbers=range(4)))
    body = f"## HTTP beside the engine\n\n`{found['command']}`\n\n{describe(found)}\n\n{table}\n"
    markdown.write_section(Path(page), "served-steps", "http", body, head="")


if __name__ == "__main__":
    main(*sys.argv[1:])
