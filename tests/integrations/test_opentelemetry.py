"""Spans and metrics of locks, with the real library."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import lockkit
from lockkit import observers
from lockkit.errors import BackendUnavailable
from lockkit.integrations.opentelemetry import OpenTelemetryObserver
from lockkit.observers import LockEvent
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import fail, once, scripted
from tests.tries import begin_to_wait


class Collected:
    """What an observer of all locks has sent to OpenTelemetry."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.traces = TracerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meters = MeterProvider([self._reader])
        self.observer = OpenTelemetryObserver(tracer_provider=self.traces, meter_provider=self.meters)

    def seen(self) -> None:
        """Wait until the observer has seen everything: a loss is nobody's call, so no call waits for it."""
        for channel in observers.active or ():
            channel.flush(PATIENCE)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Spans that have ended."""
        return list(self._exporter.get_finished_spans())

    def metric(self, name: str) -> dict[tuple[str, ...], Any]:
        """Points of a metric, by template, mode, and outcome or reason."""
        data = self._reader.get_metrics_data()
        metrics = [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics
        keys = ("lockkit.template", "lockkit.mode", "lockkit.outcome", "lockkit.reason")
        return {
            tuple(str(attributes[key]) for key in keys if key in attributes): point
            for metric in metrics
            if metric.name == name
            for point in metric.data.data_points
            if (attributes := point.attributes or {})
        }


@pytest.fixture
def collected() -> Iterator[Collected]:
    """An observer of all locks, with providers of its own."""
    collected = Collected()
    lockkit.add_observer(collected.observer)
    yield collected
    lockkit.remove_observer(collected.observer)
    collected.traces.shutdown()
    collected.meters.shutdown()


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client of a space of its own."""
    with lockkit.connect("memory://opentelemetry", ttl=PATIENCE) as client:
        yield client


def test_spans_are_below_that_of_the_caller(collected: Collected, client: lockkit.Client) -> None:
    """`acquire` from the call to the grant, `hold` from there to the release."""

    @client.lock("seat:{seat}")
    def book(seat: str) -> str:
        return seat

    with collected.traces.get_tracer("test").start_as_current_span("request"):
        book("12A")

    acquire, hold, request = collected.spans
    assert [span.name for span in (acquire, hold, request)] == ["lockkit.acquire", "lockkit.hold", "request"]
    for span in (acquire, hold):
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
    attributes = dict(acquire.attributes or {})
    token = attributes.pop("lockkit.token")
    assert attributes == {
        "lockkit.template": "seat:{seat}",
        "lockkit.backend": "memory://opentelemetry",
        "lockkit.mode": "exclusive",
        "lockkit.outcome": "granted",
    }
    assert (hold.attributes or {})["lockkit.token"] == token
    assert acquire.end_time == hold.start_time
    assert acquire.start_time <= acquire.end_time <= hold.end_time  # type: ignore[operator]
    assert "12A" not in "".join(span.to_json() for span in (acquire, hold))


def test_asyncio_spans_are_below_that_of_their_task(collected: Collected) -> None:
    """Each task has its own context."""

    async def main() -> None:
        tracer = collected.traces.get_tracer("test")

        async def request(number: int) -> None:
            with tracer.start_as_current_span(f"request {number}"):
                async with locks.lock("a", label=f"{number}"):
                    await asyncio.sleep(0)

        async with await lockkit.aio.connect("memory://opentelemetry-aio", ttl=PATIENCE) as locks:
            await asyncio.gather(*map(request, range(3)))

    asyncio.run(main())

    ids = {span.context.span_id: span.name for span in collected.spans}
    below = [
        (ids[span.parent.span_id], (span.attributes or {})["lockkit.template"])
        for span in collected.spans
        if span.parent is not None
    ]
    assert sorted(below) == [(f"request {number}", str(number)) for number in range(3) for _ in range(2)]


def test_loss_and_refusals_on_spans(collected: Collected, client: lockkit.Client) -> None:
    """Busy is no error; a loss and a backend that does not answer are."""
    lease = client.lock("a").acquire()
    client.lock("a").try_acquire()
    client.break_lock("a")
    collected.seen()
    assert lease.lost
    unreachable, backend = scripted()
    backend.after["try_acquire"] = once(fail(BackendUnavailable("gone")))
    with pytest.raises(BackendUnavailable):
        unreachable.lock("b").acquire(timeout=0)

    status = [
        (span.name, (span.attributes or {}).get("lockkit.outcome"), span.status.status_code, span.status.description)
        for span in collected.spans
    ]
    assert status == [
        ("lockkit.acquire", "granted", StatusCode.UNSET, None),
        ("lockkit.acquire", "busy", StatusCode.UNSET, None),
        ("lockkit.hold", None, StatusCode.ERROR, "lost: broken"),
        ("lockkit.acquire", "unavailable", StatusCode.ERROR, "unavailable"),
    ]


def test_jeopardy_is_an_event_of_the_span(collected: Collected) -> None:
    """A trace shows when renewals began to fail."""
    granted = LockEvent("a", "a", "memory://", "exclusive", 1, "o", 0.0, None, None, 10.0)
    collected.observer.granted(granted)
    collected.observer.jeopardy(LockEvent("a", "a", "memory://", "exclusive", 1, "o", None, 1.0, "unavailable", 11.0))
    collected.observer.released(LockEvent("a", "a", "memory://", "exclusive", 1, "o", None, 2.0, None, 12.0))

    hold = collected.spans[-1]
    assert [(event.name, event.timestamp) for event in hold.events] == [("jeopardy", 11_000_000_000)]
    assert hold.end_time == 12_000_000_000
    assert collected.metric("lockkit.jeopardies")["a", "exclusive"].value == 1


def test_metrics(collected: Collected, client: lockkit.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by template and mode, never by the name."""
    begin_to_wait(monkeypatch)

    @client.lock("seat:{seat}")
    def book(seat: str) -> None:
        client.lock(f"seat:{seat}", label="seat:{seat}").try_acquire(0.02)

    book("12A")
    book("12B")
    with client.rwlock("x", label="x").write() as lease:
        lease.extend()
        lease.downgrade()
        assert collected.metric("lockkit.held")["x", "exclusive"].value == 1
    with pytest.raises(lockkit.LockLost), client.lock("y"):
        client.break_lock("y")
    collected.seen()

    seats = ("seat:{seat}", "exclusive")
    assert collected.metric("lockkit.acquisitions")[(*seats, "granted")].value == 2
    assert collected.metric("lockkit.acquisitions")[(*seats, "busy")].value == 2
    assert collected.metric("lockkit.waits")[seats].value == 2
    assert collected.metric("lockkit.waiting")[seats].value == 0
    assert collected.metric("lockkit.held.oldest")[seats].value == 0
    assert collected.metric("lockkit.losses")[(*seats, "expired")].value == 0  # known before the first one
    assert collected.metric("lockkit.wait.duration")[seats].count == 4
    assert collected.metric("lockkit.hold.duration")[seats].count == 2
    assert {point.value for point in collected.metric("lockkit.held").values()} == {0}
    assert collected.metric("lockkit.renewals")["x", "exclusive"].value == 1
    assert collected.metric("lockkit.losses")["unlabelled", "exclusive", "broken"].value == 1


def test_lease_granted_before_the_observer_was_added(client: lockkit.Client) -> None:
    """Its end does not make the number of held leases negative."""
    collected = Collected()
    lease = client.lock("a", label="a").acquire()
    lockkit.add_observer(collected.observer)
    lease.release()
    lockkit.remove_observer(collected.observer)

    assert collected.metric("lockkit.held") == {}
    assert collected.metric("lockkit.hold.duration")["a", "exclusive"].count == 1
    collected.traces.shutdown()
    collected.meters.shutdown()


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(lockkit.ConfigurationError, match=r"lockkit\[opentelemetry\]"):
        OpenTelemetryObserver()
