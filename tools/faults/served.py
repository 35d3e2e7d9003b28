"""Our own server with a fault in its engine, in this process and over HTTP, for testing the audit itself."""

import asyncio
import contextlib
import copy
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import uvicorn
from torch import Tensor

from serve_app.backends.base import ModelInfo
from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.http.routes import Operations, build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.draft_sampler import DraftRound
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.engine import EngineCore
from speculative.selfcheck.invariants import ROW_KINDS

Install = Callable[[EngineCore], None]

_START_S = 120.0
_DISTRIBUTION, _Q_ZERO = (1 + ROW_KINDS.index(kind) for kind in ("law", "q_zero"))


@dataclass(frozen=True, slots=True)
class FaultyServer:
    """A server with a fault: a model folder, an engine's settings, the fault in its decoding engine."""

    folder: Path
    install: Install = lambda engine: None
    config: EngineConfig = field(default_factory=EngineConfig)
    guarded: bool = True  # whether the engine's own rules, which fail requests that break them, stay on
    handoffs: bool = False  # prompts are computed by a second engine, without the fault

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serve until the block ends; yields the address."""
        started: list[str] = []
        failed: list[BaseException] = []
        stop = threading.Event()

        def run() -> None:
            try:
                asyncio.run(self._serve(started, stop))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="truespec-audited", daemon=True)
        thread.start()
        deadline = time.monotonic() + _START_S
        while not started:
            if failed or time.monotonic() > deadline:
                raise RuntimeError(f"The server to be audited did not start within {_START_S:g} s.") from next(
                    iter(failed), None
                )
            time.sleep(0.01)
        try:
            yield started[0]
        finally:
            stop.set()
            thread.join(60)

    async def _serve(self, started: list[str], stop: threading.Event) -> None:
        async with contextlib.AsyncExitStack() as stack:
            backend, info = await stack.enter_async_context(self._backend(self._faulty))
            prefill = None
            if self.handoffs:
                prefill, _ = await stack.enter_async_context(self._backend(load_engine))
            sink = PrometheusSink(source="audited")
            metrics = Metrics(sink, model_name="audited", pool="decode")

            async def remote(request: Any, first_token: bool) -> Any:
                assert prefill is not None
                return await prefill.prefill(request, first_token=first_token)

            async def page() -> tuple[bytes, str]:
                for one in (backend, prefill):
                    if one is not None:
                        metrics.record_steps(one.take_stats(), one.usage())
                return sink.exposition()

            source = PooledTokenSource(backend, metrics, remote if prefill is not None else None)
            front_end = FrontEnd(source, Tokenizer.from_folder(self.folder), info)
            app = build_ingress(front_end, operations=Operations(page, None))
            await stack.enter_async_context(serving(app, started))
            await asyncio.to_thread(stop.wait)

    @contextlib.asynccontextmanager
    async def _backend(
        self, make: Callable[[Path, EngineConfig], EngineCore]
    ) -> AsyncIterator[tuple[TorchBackend, ModelInfo]]:
        backend = TorchBackend(str(self.folder), "audited", self.config, make)
        info = await backend.start()
        try:
            yield backend, info
        finally:
            await backend.stop()

    def _faulty(self, folder: Path, config: EngineConfig) -> EngineCore:
        engine = load_engine(folder, config)
        if not self.guarded:
            unguard(engine)
        self.install(engine)
        return engine


@contextlib.asynccontextmanager
async def serving(app: Any, started: list[str]) -> AsyncIterator[None]:
    """Serve the app on a free port, and append its address to `started` once it is up."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    started.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield
    finally:
        server.should_exit = True
        await task


def unguard(engine: EngineCore) -> None:
    """Switch the engine's own rules off, so that faulty output is served as by an engine without rules.

    Two stay on: verification is meaningless for a draft that is impossible under q.
    """
    engine.scheduler._contract = None
    engine.scheduler._breach = lambda sequence, delta, length: None  # type: ignore[method-assign]
    engine.parts.checked_sampler.check_on_host = lambda step_input, results, masks: results  # type: ignore[method-assign]
    engine.parts.checked_sampler.check_rounds = (  # type: ignore[method-assign]
        lambda step_input, rows, verdicts, results, terms, counted: (replace(terms, rows=None), results)
    )
    ops: Any = copy.copy(engine.parts.sampler.ops)
    original = ops.broken_rows

    def only_of_q(*args: Any) -> Any:
        broken = original(*args)
        return torch.where((broken == _DISTRIBUTION) | (broken == _Q_ZERO), broken, 0)

    ops.broken_rows = only_of_q
    engine.parts.sampler.ops = ops


NGRAM = DrafterConfig.of(kind="ngram", num_draft_tokens=3, ngram_max=3, ngram_min=1)
TINY = EngineConfig(
    dtype="float32",
    device="cpu",
    max_model_len=448,
    max_num_seqs=8,
    max_batched_tokens=64,
    kv_cache_tokens=8192,
    block_size=8,
    drafter=NGRAM,
)
"""An engine in which chunks, shared blocks and the length limit are reached quickly."""


def _q_before_filters(engine: EngineCore) -> None:
    """Drafts are sampled after the request's filters; the verifier gets the distribution before them."""
    sampler = cast(ModelDrafter, engine.drafter).sampler
    draw = sampler.draw

    def drawing_and_reporting(logits: Tensor, draft_round: DraftRound, offset: int) -> tuple[Tensor, Tensor]:
        (columns, probs), rows = draw(logits, draft_round, offset), draft_round.rows
        return columns, torch.where(rows.greedy[:, None], probs, (logits / rows.temperature).softmax(-1))

    sampler.draw = drawing_and_reporting  # type: ignore[method-assign]


def _drafter_of_other_weights(engine: EngineCore) -> None:
    """The draft model's logits belong to other tokens."""
    model: Any = cast(ModelDrafter, engine.drafter).model
    logits = model.logits
    model.logits = lambda hidden: logits(hidden).roll(100, -1)


FOR_MODELS: dict[str, Install] = {
    "F7 q before the filters, drafts sampled after them": _q_before_filters,
    "F20 a drafter of other weights than its target was updated to": _drafter_of_other_weights,
}
"""Draft-model versions of faults whose mutants are written for a table drafter."""
