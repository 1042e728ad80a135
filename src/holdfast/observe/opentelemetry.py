"""OpenTelemetry: metrics, and spans that show who blocked whom.

Only ``opentelemetry-api`` is needed: without an SDK it does nothing. The ``traceparent`` of an
acquire is stored with it, and the span of a waiter links to that of the holder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from holdfast.core.events import (
    Acquired,
    Cancelled,
    Doubtful,
    LockEvent,
    LockUse,
    Lost,
    Released,
    TimedOut,
    WaitBegan,
    installed,
)
from holdfast.observe.metrics import BUCKETS, METRICS, Metric, Metrics, server_of, system_of

try:
    from opentelemetry import metrics, trace
    from opentelemetry.trace import (
        Link,
        Span,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "holdfast.observe.OpenTelemetry needs 'opentelemetry': "
        "pip install 'holdfast[opentelemetry]'",
        name=error.name,
    ) from None

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["HoldfastInstrumentor", "OpenTelemetry"]

WORDS = {"error": "error.type", "store": "db.system.name"}
"""Labels that have a name in OpenTelemetry's conventions; the others begin with ``holdfast.``."""


class OpenTelemetry(Metrics):
    """Metrics and spans through the providers of the process, or through those given."""

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        from holdfast import __version__

        self._tracer = trace.get_tracer("holdfast", __version__, tracer_provider)
        meter = metrics.get_meter("holdfast", __version__, meter_provider)
        self._instruments = {metric: _instrument(meter, metric) for metric in METRICS}
        self._spans: WeakKeyDictionary[LockUse, Span] = WeakKeyDictionary()
        """The open span of each acquire or hold."""

    def add(self, metric: Metric, amount: float, store: str, *labels: str) -> None:
        given = dict(zip(metric.labels, labels, strict=True))
        attributes = {WORDS.get(word, f"holdfast.{word}"): text for word, text in given.items()}
        if not given.get("error", "none"):
            del attributes["error.type"]
        if store:
            attributes |= _place(store)
        self._instruments[metric](amount, attributes)

    def traceparent(self, use: LockUse) -> str:
        attributes = {"holdfast.name": use.name, "holdfast.kind": use.kind}
        attributes |= {"holdfast.mode": str(use.mode)} | _place(use.store)
        span = self._tracer.start_span(
            f"acquire {use.kind}", kind=SpanKind.INTERNAL, attributes=attributes
        )
        self._spans[use] = span
        context = span.get_span_context()
        if not (context.is_valid and context.trace_flags.sampled):
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def wants_holder(self, use: LockUse) -> bool:
        span = self._spans.get(use)
        return span is not None and span.is_recording()

    def waiting(self, event: WaitBegan) -> None:
        super().waiting(event)
        span = self._spans.get(event.use)
        if span is None:
            return
        if event.place is not None:
            span.set_attribute("holdfast.queue_position", event.place)
        if event.holder is not None:
            span.set_attribute("holdfast.holder.host", event.holder.host)
            span.set_attribute("holdfast.holder.pid", event.holder.pid)
            span.set_attribute("holdfast.holder.token", event.holder.token)
            if context := _context(event.holder.traceparent):
                span.add_link(context, {"holdfast.link": "holder"})

    def acquired(self, event: Acquired) -> None:
        super().acquired(event)
        span = self._ended(event, "granted")
        links = [] if span is None else [Link(span.get_span_context())]
        attributes = {"holdfast.name": event.name, "holdfast.kind": event.kind}
        attributes |= {"holdfast.mode": str(event.mode)} | _place(event.store)
        self._spans[event.use] = self._tracer.start_span(
            f"hold {event.kind}",
            kind=SpanKind.INTERNAL,
            attributes={**attributes, "holdfast.token": event.token},
            links=links,
        )

    def timed_out(self, event: TimedOut) -> None:
        super().timed_out(event)
        self._ended(event, "timeout")

    def cancelled(self, event: Cancelled) -> None:
        super().cancelled(event)
        error = None if event.outcome == "cancelled" else event.error
        self._ended(event, event.outcome, error)

    def doubtful(self, event: Doubtful) -> None:
        if span := self._spans.get(event.use):
            span.add_event("doubtful", {"holdfast.reason": event.reason})

    def released(self, event: Released) -> None:
        super().released(event)
        self._ended(event, "released")

    def lost(self, event: Lost) -> None:
        super().lost(event)
        if span := self._spans.get(event.use):
            attributes = {"holdfast.reason": event.reason, "holdfast.cause": event.cause}
            span.add_event("lost", attributes)
            span.set_status(Status(StatusCode.ERROR, event.reason))
        self._ended(event, "lost")

    def _ended(
        self, event: LockEvent, outcome: str, error: BaseException | None = None
    ) -> Span | None:
        """Ends the open span of the acquire or hold, if there is one."""
        span = self._spans.pop(event.use, None)
        if span is not None:
            span.set_attribute("holdfast.outcome", outcome)
            if event.token:
                span.set_attribute("holdfast.token", event.token)
            if error is not None:
                span.record_exception(error)
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            span.end()
        return span


def _instrument(meter: metrics.Meter, metric: Metric) -> Any:
    """The method of an instrument that takes an amount and attributes."""
    options = {"name": metric.name, "unit": metric.unit, "description": metric.text}
    if metric.shape == "histogram":
        return meter.create_histogram(
            **options, explicit_bucket_boundaries_advisory=list(BUCKETS)
        ).record
    if metric.shape == "counter":
        return meter.create_counter(**options).add
    return meter.create_up_down_counter(**options).add


def _place(store: str) -> dict[str, str]:
    place = {"db.system.name": system_of(store)}
    if server := server_of(store):
        place["server.address"] = server
    return place


def _context(traceparent: str) -> SpanContext | None:
    """The span of a ``traceparent``; its form was checked when it was read from the store."""
    if not traceparent:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    context = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16))
    )
    return context if context.is_valid else None


class HoldfastInstrumentor:
    """What ``opentelemetry-instrument`` calls: all clients of the process are observed."""

    _observer: OpenTelemetry | None = None

    def instrumentation_dependencies(self) -> tuple[str, ...]:
        """Nothing: Holdfast itself is here."""
        return ()

    def instrument(self, **options: Any) -> None:
        """Observes all clients that are made from now on. May be called again."""
        if HoldfastInstrumentor._observer is None:
            observer = OpenTelemetry(
                tracer_provider=options.get("tracer_provider"),
                meter_provider=options.get("meter_provider"),
            )
            HoldfastInstrumentor._observer = observer
            installed.append(observer)

    def uninstrument(self, **_: Any) -> None:
        """Ends ``instrument``. Clients that exist are still observed."""
        if HoldfastInstrumentor._observer in installed:
            installed.remove(HoldfastInstrumentor._observer)
        HoldfastInstrumentor._observer = None
