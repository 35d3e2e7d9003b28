"""Spans of requests over fake engines: who is whose parent, across replicas too, and what each of them counts.

A call to another replica is one in a context of its own: nothing but what is carried gets across.
"""

import asyncio
import contextvars
import dataclasses
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode

from serve_app.backends.base import Prefilled, Replayed
from serve_app.http.routes import build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.verdicts import Checked
from serve_app.referee.records.records import Record, Records
from serve_app.referee.records.replay_selection import Checks
from serve_app.streams import spans
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry import tracing
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.telemetry.tracing import Tracing, adopt, carried
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError, EngineFault
from speculative.request import Request
from tests.support.fake_serving import make_backend
from tests.support.front_ends import observed
from tests.support.otlp_collector import Collector, running_collector
from tests.support.referees import TOLERANCE, traces_of
from tests.support.waiting import wait_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
BODY = {"model": "fake", "prompt": "hello world", "max_tokens": 12, "ignore_eos": True, "seed": 1}


async def across(work: Callable[..., Awaitable[Any]], *args: Any) -> Any:
    """Do something as another process would: with a context of its own."""
    reported = carried()

    async def there() -> Any:
        adopt(reported)
        return await work(*args)

    return await asyncio.get_running_loop().create_task(there(), context=contextvars.Context())


class App:
    """A decode replica that answers HTTP, a prefill replica, and a referee, each with a tracer of its own."""

    def __init__(self, tokenizer: Tokenizer, *, share: float | None) -> None:
        self.exporter = InMemorySpanExporter()
        self.share = share
        metrics = Metrics(BufferSink("d"), model_name="fake", pool="decode")
        self.traces = {name: self._tracing(name) for name in ("decode", "prefill", "referee")}
        fakes = [make_backend(tokenizer)[0] for _ in range(2)]
        self.decode, self.prefill = fakes
        self.handoff_spoils = False
        self.records = Records("d", 256)
        self.checker = ReplayChecker(self._replay, Judge(TOLERANCE).judge, ReplicaBook(TOLERANCE))
        self.checks = Checks(lambda _: False, lambda _: True, traces_of, lambda *_: None, self._check, 20)
        pooled = PooledTokenSource(
            self.decode, metrics, self._ask, self.records.handed_off, tracing=self.traces["decode"]
        )
        source = observed(pooled, metrics, records=self.records, select=self.checks.select, ended=self._ended)
        front_end = FrontEnd(source, tokenizer, fakes[0].info, checks=self.checks)
        self.http = build_ingress(front_end, tracing=self.traces["decode"])

    def _tracing(self, name: str) -> Tracing:
        if self.share is None:
            return Tracing()
        sampler, resource = ParentBased(TraceIdRatioBased(self.share)), Resource({"service.instance.id": name})
        provider = TracerProvider(sampler=sampler, resource=resource)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return Tracing(provider)

    async def _ask(self, request: Request, first_token: bool) -> Prefilled:
        async def there() -> Prefilled:
            return await spans.prefill(self.traces["prefill"], self.prefill, request, first_token=first_token)

        with self.traces["decode"].call("prefill.call", {}):
            prefilled: Prefilled = await across(there)
        if self.handoff_spoils and prefilled.handoff is not None:
            spoilt = prefilled.handoff.copy()
            spoilt[-1] ^= 1
            prefilled = dataclasses.replace(prefilled, handoff=spoilt)
        return prefilled

    def _ended(self, record: Record, checked: bool) -> None:
        if checked:
            self.checks.ended(record)

    async def _check(self, answer: Answer) -> Checked:
        checked: Checked = await across(self.checker.check, answer)
        return checked

    async def _replay(self, request: Request, _: object) -> Replayed:
        with self.traces["referee"].call("replay.call", {}):
            replayed: Replayed = await across(spans.replay, self.traces["prefill"], self.prefill, request)
        return replayed

    async def post(self, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        return await self.send("/v1/completions", BODY | changes, headers or {})

    async def send(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.http)
        async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=120) as client:
            return await client.post(path, json=body, headers=headers)

    def generation(self) -> dict[str, Any]:
        """Return the OpenTelemetry attributes of the one request's span, as a collector receives them."""
        collector = Collector()
        collector.take(encode_spans(self.exporter.get_finished_spans()).SerializePartialToString())
        (trace,) = collector.spans.values()
        (request,) = (span for name, span in trace.items() if name.startswith("POST"))
        return {
            name: [one.string_value for one in value.values] if hasattr(value, "values") else value
            for name, value in request.attributes.items()
            if name.startswith(("gen_ai.", "error."))
        }

    def spans(self) -> dict[str, ReadableSpan]:
        """By name; each name once."""
        spans = self.exporter.get_finished_spans()
        named = {span.name: span for span in spans}
        assert len(named) == len(spans), [span.name for span in spans]
        return named


@pytest.fixture
async def app(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> AsyncIterator[App]:
    made = App(tokenizer, share=getattr(request, "param", 1.0))
    referee = asyncio.create_task(made.checker.run())
    yield made
    referee.cancel()
    await asyncio.gather(referee, return_exceptions=True)


def parent_of(span: ReadableSpan, spans: dict[str, ReadableSpan]) -> str:
    assert span.parent is not None
    return next((name for name, one in spans.items() if one.context.span_id == span.parent.span_id), "")


def replica_of(span: ReadableSpan) -> str:
    return str(span.resource.attributes["service.instance.id"])


async def test_a_request_is_one_trace_over_all_replicas(app: App) -> None:
    reply = await app.post({"traceparent": SAMPLED, "x-request-id": "r-1"}, verify=True)
    assert reply.status_code == 200 and reply.json()["verdict"] == "logprobs_only", "the backend is a fake without rows"
    spans = app.spans()
    request = "POST /v1/completions"
    assert {name: parent_of(span, spans) for name, span in spans.items()} == {
        **dict.fromkeys(("prefill.call", "handoff", "decode", "replay.call"), request),
        **{request: "", "queue": "prefill.call", "prefill": "prefill.call", "replay": "replay.call"},
    }
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert f"{spans[request].parent.span_id:016x}" == PARENT  # type: ignore[union-attr]
    assert {name: replica_of(span) for name, span in spans.items()} == {
        **dict.fromkeys((request, "prefill.call", "handoff", "decode"), "decode"),
        **dict.fromkeys(("queue", "prefill", "replay"), "prefill"),
        "replay.call": "referee",
    }
    attributes = dict(spans[request].attributes or {})
    assert {name: value for name, value in attributes.items() if not name.startswith("gen_ai.")} == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "truespec.request_id": "r-1",
        "http.response.status_code": 200,
    }
    assert all(span.status.status_code is StatusCode.UNSET for span in spans.values())


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_adds_up_its_rounds(app: App, stream: bool) -> None:
    await app.post(stream=stream)
    spans = app.spans()
    decode, prefill = dict(spans["decode"].attributes or {}), dict(spans["prefill"].attributes or {})
    assert str(decode.pop("truespec.choice")) == prefill.pop("truespec.choice")
    # The first token is the prefill's. In the other eleven, a round of three has two accepted drafts, the last has one.
    assert decode == {
        "truespec.rounds": 4, "truespec.drafted_tokens": 12, "truespec.accepted_tokens": 7, "truespec.tokens": 11,
        "truespec.finish_reason": "length",
    }  # fmt: skip
    assert prefill == {"truespec.prompt_tokens": 2, "truespec.cached_tokens": 0}
    assert spans["handoff"].attributes["truespec.handoff_bytes"] > 0  # type: ignore[index,operator]
    ends = [spans[name].end_time or 0 for name in ("queue", "prefill", "prefill.call", "handoff", "decode")]
    assert ends == sorted(ends)


async def test_a_refused_handoff_is_a_failed_span_and_the_work_is_done_here(app: App) -> None:
    app.handoff_spoils = True
    assert (await app.post()).status_code == 200
    spans = app.exporter.get_finished_spans()
    handoff = next(span for span in spans if span.name == "handoff")
    assert handoff.status.status_code is StatusCode.ERROR
    assert str(handoff.status.description).startswith("HandoffRefused")
    names = [(span.name, replica_of(span)) for span in spans]
    assert names.count(("prefill", "prefill")) == names.count(("prefill", "decode")) == 1
    assert names.count(("decode", "decode")) == 1


GENERATION = {
    "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "truespec", "gen_ai.request.model": "fake",
    "gen_ai.request.max_tokens": 12, "gen_ai.request.temperature": 1.0, "gen_ai.request.top_p": 1.0,
    "gen_ai.request.seed": 1, "gen_ai.response.model": "fake", "gen_ai.response.finish_reasons": ["length"],
    "gen_ai.usage.input_tokens": 2, "gen_ai.usage.output_tokens": 12, "gen_ai.usage.cache_read.input_tokens": 0,
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_described_in_opentelemetrys_terms(app: App, stream: bool) -> None:
    reply = await app.post(stream=stream)
    reported = app.generation()
    assert GENERATION.items() <= reported.items()
    more = reported.keys() - GENERATION.keys() - {"gen_ai.response.id"}
    assert more == ({"gen_ai.request.stream", "gen_ai.response.time_to_first_chunk"} if stream else set())
    assert f'"{reported["gen_ai.response.id"]}"' in reply.text
    assert 0 < reported.get("gen_ai.response.time_to_first_chunk", 1) < 60


async def test_what_the_client_chose_is_on_the_span(app: App) -> None:
    chosen = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "presence_penalty": 0.25, "frequency_penalty": 0.75}
    usage = (await app.post(n=2, seed=None, max_tokens=4, **chosen)).json()["usage"]
    reported = app.generation()
    assert {name: reported[f"gen_ai.request.{name}"] for name in chosen} == chosen
    assert reported["gen_ai.request.choice.count"] == 2 and "gen_ai.request.seed" not in reported
    assert reported["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert reported["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
    ],
)
async def test_a_conversation_is_called_chat(app: App, path: str, body: dict[str, Any]) -> None:
    reply = (await app.send(path, {"model": "fake"} | body)).json()
    reported = app.generation()
    assert reported["gen_ai.operation.name"] == "chat"
    assert reported["gen_ai.response.id"] == reply["id"]
    usage = reply["usage"]
    assert reported["gen_ai.usage.output_tokens"] == usage.get("completion_tokens", usage.get("output_tokens"))


async def test_a_generation_that_fails_names_the_error(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object, **__: object) -> AsyncIterator[object]:
        raise EngineFault("broken")
        yield

    assert (await app.post(temperature=-1)).status_code == 400
    assert app.spans()["POST /v1/completions"].status.status_code is StatusCode.UNSET, "the client's fault"
    app.exporter.clear()
    for name in ("generate", "resume"):
        monkeypatch.setattr(app.decode, name, fails)
    assert (await app.post()).status_code == 500
    status = next(span.status for span in app.exporter.get_finished_spans() if span.name.startswith("POST"))
    assert (status.status_code, status.description) == (StatusCode.ERROR, "status 500")
    reported = app.generation()
    assert reported["error.type"] == "EngineFault"
    assert reported["gen_ai.request.model"] == "fake"
    assert "gen_ai.response.finish_reasons" not in reported


async def test_each_choice_decodes_in_a_span_of_its_own_which_holds_no_tokens(app: App) -> None:
    reply = await app.post(prompt="a secret", n=3, verify=True)
    spans = app.exporter.get_finished_spans()
    reported = " ".join(span.to_json() for span in spans)
    for text in ("secret", reply.json()["choices"][0]["text"]):
        assert text and text not in reported
    decodes = [span for span in spans if span.name == "decode"]
    assert len({span.attributes["truespec.choice"] for span in decodes if span.attributes}) == 3
    request = next(span for span in spans if span.name.startswith("POST"))
    assert {span.parent.span_id for span in decodes if span.parent} == {request.context.span_id}


@pytest.mark.parametrize("app", [0.0, 1.0], indirect=True)
async def test_a_share_of_the_traces_is_recorded_but_a_clients_own_as_it_is_sampled(app: App) -> None:
    await app.post({"traceparent": UNSAMPLED}, verify=True)
    if app.share == 0:
        await app.post()
    assert app.exporter.get_finished_spans() == ()
    await app.post({"traceparent": SAMPLED})
    assert len(app.spans()) == 6


async def test_a_broken_traceparent_begins_a_trace_of_its_own(app: App) -> None:
    broken = ("", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01")
    for header in broken:
        assert (await app.post({"traceparent": header})).status_code == 200
    requests = [span for span in app.exporter.get_finished_spans() if span.name.startswith("POST")]
    assert [span.parent for span in requests] == [None] * len(broken)
    assert len({span.context.trace_id for span in requests}) == len(broken)


@pytest.mark.parametrize("app", [None], indirect=True)
async def test_without_tracing_no_span_is_made(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[tuple[str, str]] = []
    prefill = app.prefill.prefill

    async def watched(request: Request, *, first_token: bool) -> Prefilled:
        known.append((tracing.request_id(), tracing.trace_id()))
        return await prefill(request, first_token=first_token)

    monkeypatch.setattr(app.prefill, "prefill", watched)
    await app.post({"traceparent": SAMPLED, "x-request-id": "r-2"})
    await app.post({"x-request-id": "r-3"})
    assert known == [("r-2", TRACE), ("r-3", "")]  # both are reported in log lines, all the same
    assert (tracing.request_id(), tracing.trace_id()) == ("", "")


def test_spans_reach_a_collector() -> None:
    with running_collector() as collector:
        traces = Tracing.to_collector(collector.url, 1.0, {"service.name": "truespec", "service.instance.id": "d1"})
        with traces.request("POST /v1/models", "r-1", [(b"traceparent", SAMPLED.encode())], {"truespec.rounds": 3}):
            traces.start("queue", time.time_ns(), {}).end()
        wait_for(lambda: collector.spans.get(TRACE, {}).keys() == {"queue", "POST /v1/models"}, "both spans")
    spans = collector.spans[TRACE]
    assert spans["POST /v1/models"].parent_id == PARENT
    assert spans["queue"].parent_id == spans["POST /v1/models"].span_id
    assert spans["POST /v1/models"].attributes == {"truespec.rounds": 3}
    assert spans["queue"].replica == "d1"


def test_without_the_exporter_the_error_names_the_setting_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"observability\.traces_endpoint.*pip install -e '\.\[tracing\]'"):
        Tracing.to_collector("http://127.0.0.1:1/v1/traces", 1.0, {})
