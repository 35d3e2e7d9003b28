"""A request's identity on every replica it reaches, and its spans for an OpenTelemetry collector.

A request's id and its W3C trace context (https://www.w3.org/TR/trace-context/) live in context variables, so that the
code that serves it need not pass them on; only a call to another replica does (`carried`, `adopt`). Both are kept even
with tracing off: log lines include them.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from speculative.errors import ConfigError

Attributes = Mapping[str, str | int | float | bool]

_HEADERS = ("traceparent", "tracestate")
_EXPORT_EVERY_MS = 1000
_EXPORT_TIMEOUT_S = 5

_NO_TRACER = NoOpTracer()
_propagator = TraceContextTextMapPropagator()
_request_id: ContextVar[str] = ContextVar("truespec_request_id", default="")


@dataclass(frozen=True, slots=True)
class Carried:
    """Context that is sent with a call to another replica: the request's id ("" = none), and the trace context as
    headers."""

    request_id: str = ""
    headers: tuple[tuple[str, str], ...] = ()


def request_id() -> str:
    """The id of the request being served here; "" = none."""
    return _request_id.get()


def trace_id() -> str:
    """The id of its trace, 32 hexadecimal digits; "" = none."""
    span = current_span().get_span_context()
    return trace.format_trace_id(span.trace_id) if span.is_valid else ""


def current_span() -> Span:
    """The span of what is being done here; one that records nothing where there is none."""
    return trace.get_current_span()


def carried() -> Carried:
    """Return what a call to another replica carries."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return Carried(request_id(), tuple(headers.items()))


def adopt(reported: Carried) -> None:
    """Take on the identity carried here for the rest of this task: Ray Serve runs each call in its own task."""
    _request_id.set(reported.request_id)
    otel_context.attach(_propagator.extract(dict(reported.headers), Context()))


class Tracing:
    """Makes the spans of requests. Even if nothing is recorded, it passes on the client's trace context.

    Args:
        provider: receives the spans; None = no spans are made.
    """

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("truespec") if provider else _NO_TRACER

    @classmethod
    def to_collector(cls, endpoint: str, share: float, resource: Attributes) -> "Tracing":
        """Send spans to a collector, in the background; those it does not accept are dropped.

        Args:
            endpoint: URL of OTLP over HTTP, path included.
            share: of the traces that start here; others follow their parent's flag.
            resource: identifies the replica.

        Raises:
            ConfigError: the exporter is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(
                "observability.traces_endpoint: needs the OTLP exporter; pip install -e '.[tracing]' in the checkout, "
                "or remove it."
            ) from error
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)), resource=Resource.create(dict(resource))
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_EVERY_MS))
        return cls(provider)

    @property
    def recording(self) -> bool:
        """Return whether the request being served here is recorded."""
        span = current_span().get_span_context()
        return self._provider is not None and span.is_valid and span.trace_flags.sampled

    @contextmanager
    def request(
        self,
        name: str,
        request_id: str,
        headers: Iterable[tuple[bytes, bytes]],
        attributes: Attributes,
        *,
        traced: bool = True,
    ) -> Iterator[Span]:
        """The span of a whole HTTP request, continuing the trace that its headers name.

        Args:
            headers: as ASGI has them, names in lower case.
            traced: whether to make a span; the trace is passed on in any case.
        """
        reported = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
        parent = _propagator.extract({key: reported[key] for key in _HEADERS if key in reported}, Context())
        tracer = self._tracer if traced else _NO_TRACER
        span = tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        known = _request_id.set(request_id)
        try:
            with _current(span):
                yield span
        finally:
            _request_id.reset(known)

    @contextmanager
    def call(self, name: str, attributes: Attributes) -> Iterator[Span]:
        """The span of a call to another replica; what it carries names this span as its parent."""
        if not self.recording:
            yield current_span()
            return
        with _current(self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)) as span:
            yield span

    def start(self, name: str, began_ns: int, attributes: Attributes) -> Span:
        """A child span of the current one, which stays current; `began_ns` are unix nanoseconds."""
        return self._tracer.start_span(name, start_time=began_ns, attributes=attributes)


def failed(span: Span, why: BaseException | str) -> None:
    """Mark a span as failed."""
    text = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
    span.set_status(Status(StatusCode.ERROR, text))


@contextmanager
def _current(span: Span) -> Iterator[Span]:
    with trace.use_span(span, end_on_exit=True, record_exception=False):
        yield span
