"""How many async generators one token passes on its way from an engine to the socket, in one process."""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import TracerProvider

import serve_app
from serve_app.backends.base import ModelInfo, Prefilled
from serve_app.backends.torch_backend import TorchBackend
from serve_app.http.routes import build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.prepared_request import Limits
from serve_app.referee.records import Records
from serve_app.referee.replay_selection import Selection
from serve_app.streams.observed import ObservedSource, SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.streams.resuming import ResumingSource, Streamed
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.telemetry.tracing import Tracing
from serve_app.text.tokenizer import Tokenizer
from speculative.request import Request
from tests.support.engines import settings
from tests.support.tiny_models import write_tiny_model

MOST = 5
PACKAGE = Path(serve_app.__file__).parent


@contextmanager
def begun() -> Iterator[list[str]]:
    """The server's own async generators that are iterated within it, by name."""
    outer, names = sys.get_asyncgen_hooks(), list[str]()

    def note(generator: AsyncGenerator[object, None]) -> None:
        if PACKAGE in Path(generator.ag_code.co_filename).parents:
            names.append(generator.ag_code.co_qualname)
        outer.firstiter(generator)  # type: ignore[misc]  # the event loop's

    sys.set_asyncgen_hooks(firstiter=note)
    try:
        yield names
    finally:
        sys.set_asyncgen_hooks(firstiter=outer.firstiter)


class Engines:
    """A prefill and a decode engine, in one process, with all spans recorded."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode = (TorchBackend(str(folder), "tiny", settings()) for _ in range(2))
        self.metrics = Metrics([BufferSink("r1")], model_name="tiny", pool="decode")
        self.tracing = Tracing(TracerProvider())

    async def start(self) -> "Engines":
        await self.prefill.start()
        self.info: ModelInfo = await self.decode.start()
        return self

    def source(self, *, disaggregated: bool) -> PooledTokenSource:
        ask = self._ask if disaggregated else None
        return PooledTokenSource(self.decode, self.metrics, ask, tracing=self.tracing)

    async def _ask(self, request: Request, first_token: bool) -> Prefilled:
        return await self.prefill.prefill(request, first_token=first_token)

    async def ask(self, source: PooledTokenSource | ResumingSource) -> str:
        """Stream one answer over HTTP, as a replica with this source does."""
        observed = ObservedSource(
            source,
            self.metrics,
            Records("r1", 512),
            select=lambda _: Selection.WITH_LOGPROBS,
            ended=lambda record, answer: None,
            limits=SourceLimits(8, 300.0, max_first_token_s=300.0),
        )
        tokenizer = Tokenizer.from_folder(self.info.folder)
        app = build_ingress(
            FrontEnd(observed, tokenizer, self.info, Limits(stream_interval_s=0.001)), tracing=self.tracing
        )
        body = {"model": "tiny", "prompt": "a b a b", "max_tokens": 12, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://app") as client:
            return (await client.post("/v1/completions", json=body)).text


class OneReplica:
    """A pool of one decode replica that another process holds: what is iterated there is not this process's."""

    def __init__(self, source: PooledTokenSource) -> None:
        self._source = source

    async def stream(
        self, requests: Sequence[Request], emitted: Mapping[str, tuple[int, ...]], avoid: Sequence[str] = ()
    ) -> AsyncGenerator[Streamed, None]:
        arrived = [delta async for delta in self._source.stream(requests)]
        for delta in arrived:
            await asyncio.sleep(0)
            yield Streamed(delta, "decode-1")

    async def abort(self, request_id: str) -> None:
        await self._source.abort(request_id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    made = await Engines(write_tiny_model(tmp_path_factory.mktemp("layers") / "m", tokenizer=True)).start()
    yield made
    await made.prefill.stop()
    await made.decode.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_passes_few_generators_in_a_replica_that_computes_prompts_too(engines: Engines) -> None:
    with begun() as names:
        assert "[DONE]" in await engines.ask(engines.source(disaggregated=False))
    assert 1 < len(names) <= MOST, names


@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_passes_few_generators_after_a_handoff(engines: Engines) -> None:
    with begun() as names:
        assert "[DONE]" in await engines.ask(engines.source(disaggregated=True))
    names.remove("TorchBackend._deltas")  # of the prefill, in a deployment in another process
    assert 1 < len(names) <= MOST, names


@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_passes_few_generators_in_the_stream_router(engines: Engines) -> None:
    """The fifth is the router's own, over Ray's calls."""
    replica = engines.source(disaggregated=False)
    source = ResumingSource(OneReplica(replica), engines.metrics, Records("r1", 512), most_resumes=1, silence_s=60.0)
    with begun() as names:
        assert "[DONE]" in await engines.ask(source)
    here = [name for name in names if not name.startswith(("PooledTokenSource", "TorchBackend"))]
    assert 1 < len(here) <= MOST - 1, names
