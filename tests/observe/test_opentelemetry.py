"""Metrics and spans, in the SDK's exporters in memory; the waiter's span links to the holder's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import StatusCode

import holdfast
from harnesses import harness_classes
from holdfast import observe
from holdfast.observe.metrics import METRICS, server_of, system_of
from holdfast.observe.opentelemetry import HoldfastInstrumentor
from holdfast.testing import Harness

from .recorder import wait_until

STORES = [name for name in ("redis", "postgres", "etcd") if name in harness_classes()]


class Telemetry:
    """A program's SDK."""

    def __init__(self, *, sampled: bool = True) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider(sampler=ALWAYS_ON if sampled else ALWAYS_OFF)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meters = MeterProvider([self.reader])
        self.observer = observe.OpenTelemetry(
            tracer_provider=self.tracers, meter_provider=self.meters
        )

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]

    def value(self, name: str, **attributes: str) -> float:
        wanted = {f"holdfast.{word}": text for word, text in attributes.items()}
        found = [
            point.value for point in self.points(name) if wanted.items() <= point.attributes.items()
        ]
        return float(sum(found))


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    made.tracers.shutdown()
    made.meters.shutdown()


def test_the_spans_of_a_hold(telemetry: Telemetry) -> None:
    tracer = telemetry.tracers.get_tracer("the program")
    with (
        holdfast.connect("memory://otel-hold", observers=[telemetry.observer]) as locks,
        tracer.start_as_current_span("request") as request,
        locks.lock("order:42") as lease,
    ):
        [acquire] = telemetry.spans("acquire order")
        assert telemetry.spans("hold order") == []
    [hold] = telemetry.spans("hold order")
    for span in (acquire, hold):
        assert span.parent is not None
        assert span.parent.span_id == request.get_span_context().span_id
        assert span.attributes is not None
        assert span.attributes["holdfast.name"] == "order:42"
        assert span.attributes["holdfast.token"] == lease.token
        assert span.attributes["db.system.name"] == "memory"
    assert [link.context.span_id for link in hold.links] == [acquire.context.span_id]


@pytest.mark.parametrize("harness", STORES, indirect=True, scope="session")
def test_the_span_of_a_waiter_links_to_the_holder(harness: Harness) -> None:
    """Two programs, each with its own SDK: the store is what connects their traces."""
    holders, waiters = Telemetry(), Telemetry()
    namespace = f"otel-{os.getpid()}-{harness.name}"
    with (
        holdfast.connect(harness.url, namespace=namespace, observers=[holders.observer]) as theirs,
        holdfast.connect(harness.url, namespace=namespace, observers=[waiters.observer]) as mine,
    ):
        lease = theirs.lock("order:42").acquire()
        assert lease is not None

        def wait() -> None:
            with mine.lock("order:42", timeout=60):
                pass

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: bool(theirs.inspect("order:42").waiters), "a waiter")
        wait_until(lambda: waiters.value("holdfast.lock.count", state="waiting") == 1, "waiting")
        lease.release()
        thread.join()
        [held] = holders.spans("acquire order")
        [waited] = waiters.spans("acquire order")
        [link] = waited.links
        assert (link.context.trace_id, link.context.span_id) == (
            held.context.trace_id,
            held.context.span_id,
        )
        assert waited.attributes is not None
        assert waited.attributes["holdfast.holder.pid"] == os.getpid()
        assert waited.attributes["holdfast.holder.token"] == lease.token
        assert waited.attributes["server.address"] == server_of(
            harness.url.rpartition("?")[0] or harness.url
        )


def test_a_trace_that_is_not_sampled_costs_no_request_and_is_not_stored() -> None:
    telemetry = Telemetry(sampled=False)
    with (
        holdfast.connect("memory://otel-off", observers=[telemetry.observer]) as locks,
        locks.lock("a"),
    ):
        assert locks.inspect("a").holders[0].traceparent == ""
        use = observe.current()
        assert use is not None
        assert not telemetry.observer.wants_holder(use)


def test_a_loss_is_an_error_of_its_span(telemetry: Telemetry) -> None:
    with holdfast.connect("memory://otel-lost", observers=[telemetry.observer]) as locks:
        lease = locks.lock("order:42").acquire()
        assert lease is not None
        locks.break_lock("order:42", reason="stuck")
        wait_until(lambda: bool(telemetry.spans("hold order")), "the end")
    [hold] = telemetry.spans("hold order")
    assert hold.status.status_code is StatusCode.ERROR
    assert "stuck" in (hold.status.description or "")
    assert [event.name for event in hold.events] == ["lost"]
    assert telemetry.value("holdfast.lock.losses", kind="order", reason="broken") == 1
    assert telemetry.value("holdfast.lock.count", kind="order", state="held") == 0


def test_the_metrics(telemetry: Telemetry) -> None:
    with holdfast.connect("memory://otel-metrics", observers=[telemetry.observer]) as locks:
        with locks.lock("order:42"):
            assert telemetry.value("holdfast.lock.count", kind="order", state="held") == 1
            thread = threading.Thread(target=lambda: locks.lock("order:42").acquire(timeout=0))
            thread.start()
            thread.join()
        with locks.election("leader").campaign():
            assert telemetry.value("holdfast.leader", kind="leader") == 1
        locks.once("report:1").run(lambda: None)
    waits = {
        point.attributes["holdfast.outcome"]
        for point in telemetry.points("holdfast.lock.wait_time")
    }
    assert waits == {"granted", "timeout"}
    assert telemetry.value("holdfast.lock.count", state="held") == 0
    assert telemetry.value("holdfast.leader", kind="leader") == 0
    assert telemetry.value("holdfast.once.runs", outcome="ran") == 1
    operations = telemetry.points("holdfast.operation.duration")
    assert {point.attributes["holdfast.operation"] for point in operations} >= {
        "attempt",
        "release",
    }
    assert operations[0].explicit_bounds[0] == 0.001
    assert operations[0].explicit_bounds[-1] == 300


def test_labels_are_few() -> None:
    """A name, a token or a reason in free words is never one."""
    words = {word for metric in METRICS for word in metric.labels}
    assert words == {
        *("kind", "mode", "outcome", "contended", "state", "reason", "store", "error"),
        *("operation", "resource"),
    }


@pytest.mark.parametrize(
    ("store", "system", "server"),
    [
        ("redis://cache:6379/0", "redis", "cache:6379"),
        ("rediss://cache:6379/0", "redis", "cache:6379"),
        ("redis+sentinel://a:1,b:2/main", "redis", "a:1,b:2"),
        ("etcds://a:1", "etcd", "a:1"),
        ("postgresql://user@db:5432/app?mode=advisory", "postgresql", "db:5432"),
        ("sqlite:///var/locks", "sqlite", ""),
        ("memory://x", "memory", "x"),
    ],
)
def test_the_place_of_a_store(store: str, system: str, server: str) -> None:
    assert (system_of(store), server_of(store)) == (system, server)


def test_the_instrumentor(telemetry: Telemetry) -> None:
    instrumentor = HoldfastInstrumentor()
    instrumentor.instrument(tracer_provider=telemetry.tracers, meter_provider=telemetry.meters)
    instrumentor.instrument()
    try:
        with holdfast.connect("memory://otel-instrumented") as locks, locks.lock("a"):
            pass
    finally:
        instrumentor.uninstrument()
    assert len(telemetry.spans("hold a")) == 1
    with holdfast.connect("memory://otel-instrumented") as locks, locks.lock("a"):
        pass
    assert len(telemetry.spans("hold a")) == 1


def test_opentelemetry_instrument_finds_it() -> None:
    """The program has not a line about telemetry."""
    program = (
        "import holdfast\n"
        "with holdfast.connect('memory://x') as locks, locks.lock('order:42'): pass\n"
        "from opentelemetry import trace\n"
        "from holdfast.core.events import installed\n"
        "print([type(each).__name__ for each in installed])\n"
    )
    command = Path(sys.executable).parent / "opentelemetry-instrument"
    environment = {**os.environ, "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
    environment |= {"OTEL_LOGS_EXPORTER": "none"}
    done = subprocess.run(
        [command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.stdout.strip() == "['OpenTelemetry']", done.stderr


def test_a_missing_extra_names_its_command() -> None:
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "import holdfast\n"
        "try: holdfast.connect('memory://')\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "HOLDFAST_OBSERVE": "opentelemetry"},
    )
    assert "pip install 'holdfast[opentelemetry]'" in done.stdout, done.stderr
