"""Test helper: a tiny OTLP/HTTP receiver that keeps the spans it is sent."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.fake_http import QuietHandler, serving


@dataclass(frozen=True)
class Span:
    """What the collector was reported of one span."""

    name: str
    span_id: str
    parent_id: str
    resource: dict[str, str]
    attributes: dict[str, Any]

    @property
    def replica(self) -> str:
        return self.resource["service.instance.id"]


@dataclass
class Collector:
    """The spans of every trace: by trace, by name."""

    url: str = ""
    spans: dict[str, dict[str, Span]] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                attributes = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
                reported = Span(span.name, span.span_id.hex(), span.parent_span_id.hex(), about, attributes)
                self.spans.setdefault(span.trace_id.hex(), {})[span.name] = reported


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """One that listens on this machine."""
    kept = Collector()

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            kept.take(self.sent())
            self.say(200)

    with serving(Handler) as url:
        kept.url = f"{url}/v1/traces"
        yield kept
