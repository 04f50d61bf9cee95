"""Metrics of locks in Prometheus and OpenTelemetry, and spans, with the real libraries."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

import lockkit
from lockkit import observers
from lockkit.backend import LossReason
from lockkit.errors import BackendUnavailable
from lockkit.integrations.opentelemetry import OpenTelemetryObserver
from lockkit.integrations.prometheus import PrometheusObserver
from lockkit.observers import LockEvent
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import MovableClock, fail, once, pass_time, scripted
from tests.programs import run_python
from tests.tries import begin_to_wait, until

ROOT = Path(__file__).parents[2]
URL = "memory://metrics"


class Prometheus:
    """What an observer has counted in Prometheus."""

    OTHERS: ClassVar = {"oldest": "oldest_held_timestamp_seconds", "late": "renewal_late_seconds"}

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.observer: lockkit.Observer = PrometheusObserver(self.registry)

    def value(self, what: str, template: str, mode: str = "exclusive", **more: str) -> float | None:
        """Read a counter or gauge, or the count of a histogram; None if there is no such series."""
        labels = {"template": template, "backend": URL, "mode": mode, **more}
        end = "_seconds_count" if what in {"wait", "hold"} else "_total"
        name = self.OTHERS.get(what, what if what in {"waiting", "held"} else what + end)
        return self.registry.get_sample_value(f"lockkit_{name}", labels)

    def everything(self) -> str:
        """All that is exported."""
        return generate_latest(self.registry).decode()


class OpenTelemetry:
    """What an observer has sent to OpenTelemetry."""

    NAMES: ClassVar = {
        "oldest": "held.oldest",
        "late": "renewal.late",
        "wait": "wait.duration",
        "hold": "hold.duration",
    }

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.traces = TracerProvider()
        self.traces.add_span_processor(SimpleSpanProcessor(self._exporter))
        meters = MeterProvider([self._reader])
        self.observer: lockkit.Observer = OpenTelemetryObserver(tracer_provider=self.traces, meter_provider=meters)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Spans that have ended."""
        return list(self._exporter.get_finished_spans())

    def value(self, what: str, template: str, mode: str = "exclusive", **more: str) -> float | None:
        """See `Prometheus.value`."""
        labels = {"template": template, "backend": more.pop("backend", URL), "mode": mode, **more}
        wanted = {f"lockkit.{name}": text for name, text in labels.items()}
        for metric in self._metrics():
            for point in metric.data.data_points if metric.name == f"lockkit.{self.NAMES.get(what, what)}" else ():
                if dict(point.attributes) == wanted:
                    return float(getattr(point, "count", getattr(point, "value", None)))  # type: ignore[arg-type]
        return None

    def everything(self) -> str:
        """All that is exported."""
        return " ".join(repr(metric) for metric in self._metrics()) + "".join(span.to_json() for span in self.spans)

    def _metrics(self) -> list[Any]:
        data = self._reader.get_metrics_data()
        return [] if data is None else list(data.resource_metrics[0].scope_metrics[0].metrics)


Seen = Prometheus | OpenTelemetry


def flush() -> None:
    """Wait until the observers have seen everything: a loss is nobody's call, so no call waits for it."""
    for channel in observers.active or ():
        channel.flush(PATIENCE)


def observing(seen: Seen) -> Iterator[Any]:
    """Have it observe all locks."""
    lockkit.add_observer(seen.observer)
    yield seen
    lockkit.remove_observer(seen.observer)


@pytest.fixture(params=[Prometheus, OpenTelemetry])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """What an observer of each kind sees of all locks."""
    yield from observing(request.param())


@pytest.fixture
def telemetry() -> Iterator[OpenTelemetry]:
    """Spans."""
    yield from observing(OpenTelemetry())


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client of a space of its own."""
    with lockkit.connect(URL, ttl=PATIENCE) as client:
        yield client


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_acquisitions_waits_and_holds(seen: Seen, client: lockkit.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by template, backend, mode and outcome."""
    begin_to_wait(monkeypatch)

    @client.lock("seat:{seat}")
    def book(seat: str) -> float | None:
        client.lock(f"seat:{seat}", label="seat:{seat}").try_acquire(0.02)
        return seen.value("held", "seat:{seat}")

    assert (book("12A"), book("12B")) == (1.0, 1.0)

    counts = {what: seen.value(what, "seat:{seat}") for what in ("waits", "wait", "waiting", "held", "hold")}
    assert counts == {"waits": 2, "wait": 4, "waiting": 0, "held": 0, "hold": 2}
    assert [seen.value("acquisitions", "seat:{seat}", outcome=how) for how in ("granted", "busy")] == [2, 2]


def test_no_label_is_ever_a_name(seen: Seen, client: lockkit.Client) -> None:
    """Names may be without number, and each value of a label is a series."""
    with client.lock("seat:12A"), client.rwlock("seat:12B").read(), client.semaphore("seat:12C", 2):
        client.lock("seat:12A").try_acquire()

    assert "seat" not in seen.everything()
    assert [seen.value("hold", "unlabelled", mode) for mode in ("exclusive", "shared", "permit")] == [1, 1, 1]


def test_losses_are_counted_from_zero(seen: Seen, client: lockkit.Client) -> None:
    """An alert on an increase does not see a series that begins with 1."""
    client.lock("a", label="a").acquire().release()
    flush()
    assert [seen.value("losses", "a", reason=reason) for reason in get_args(LossReason)] == [0] * len(
        get_args(LossReason)
    )


def test_calls_that_wait_and_the_oldest_lease(seen: Seen, client: lockkit.Client) -> None:
    """Both go back when the wait and the lease are over."""
    before = time.time()
    holder = client.lock("a", label="a").acquire()
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(client.lock("a", label="a").try_acquire, PATIENCE)
        until(lambda: seen.value("waiting", "a") == 1.0)
        oldest, now = seen.value("oldest", "a"), time.time()
        assert oldest is not None
        assert before <= oldest <= now if isinstance(seen, Prometheus) else 0 <= oldest <= now - before
        holder.release()
        lease = call.result()
        assert lease is not None
        lease.release()
        flush()
        assert seen.value("waiting", "a") == 0.0
        assert seen.value("oldest", "a") == (float("inf") if isinstance(seen, Prometheus) else 0.0)


def test_forked_child_has_no_lease_of_its_parent(seen: Seen, client: lockkit.Client) -> None:
    """The oldest lease of a worker was for ever one that its parent had held."""
    with client.lock("a", label="a"):
        flush()
        pid = os.fork()
        if pid == 0:
            try:
                client.lock("b", label="a").acquire().release()
                flush()
                os._exit(seen.value("oldest", "a") != (float("inf") if isinstance(seen, Prometheus) else 0.0))
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0


def test_late_renewal_is_shown(seen: Seen) -> None:
    """As its observers see it."""
    client, _ = scripted(MovableClock(), space="metrics-late")
    with client, client.lock("a", label="a", ttl=60):
        pass_time(client, 25.0)  # it was due after 20
        until(lambda: (seen.value("late", "a", backend=client.url) or 0.0) >= 5.0)


def test_failures(seen: Seen, client: lockkit.Client) -> None:
    """Renewals, jeopardies, losses and requests that were undone; a downgrade ends with the mode of its grant."""
    with client.rwlock("a", label="a").write() as lease:
        lease.extend()
        lease.downgrade()
    with pytest.raises(lockkit.LockLost), client.lock("b", label="b"):
        client.break_lock("b")
    flush()
    unreachable, backend = scripted()
    backend.after["try_acquire"] = once(fail(BackendUnavailable("gone")))
    with pytest.raises(BackendUnavailable):
        unreachable.lock("c", label="c").acquire(timeout=0)
    seen.observer.jeopardy(LockEvent("d", "d", URL, "exclusive", 1, "o", None, 1.0, "unavailable", 11.0))
    seen.observer.stalled(LockEvent("d", "d", URL, "exclusive", 1, "o", None, 2.0, None, 12.0))

    assert [seen.value(what, "a") for what in ("renewals", "held")] == [1, 0]
    assert seen.value("losses", "b", reason="broken") == 1
    assert seen.value("held", "b") == 0
    assert seen.value("undone", "c", backend=unreachable.url) == 1
    assert seen.value("acquisitions", "c", backend=unreachable.url, outcome="unavailable") == 1
    assert seen.value("jeopardies", "d") == 1
    assert seen.value("stalls", "d") == 1


@pytest.mark.parametrize("kind", [Prometheus, OpenTelemetry])
def test_lease_granted_before_the_observer_was_added(kind: type[Seen], client: lockkit.Client) -> None:
    """Its end does not make the number of held leases negative."""
    lease = client.lock("a", label="a").acquire()
    for seen in observing(kind()):
        lease.release()
        assert seen.value("held", "a") is None
        assert seen.value("hold", "a") == 1


@pytest.mark.parametrize(
    ("module", "extra", "observer"),
    [
        ("prometheus_client", "prometheus", PrometheusObserver),
        ("opentelemetry", "opentelemetry", OpenTelemetryObserver),
    ],
)
def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, module: str, extra: str, observer: Any) -> None:  # noqa: ANN401 - a class
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(lockkit.ConfigurationError, match=rf"lockkit\[{extra}\]"):
        observer()


# -- Prometheus alone --------------------------------------------------------------------------------------------------


def exported() -> dict[str, set[str]]:
    """The series of each metric."""
    ends = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    return {metric.name: {metric.name + end for end in ends[metric.type]} for metric in Prometheus().registry.collect()}


def test_alert_rules_name_the_metrics_that_exist() -> None:
    """docs/how-to/lockkit.rules.yml."""
    known = set().union(*exported().values())
    rules = yaml.safe_load((ROOT / "docs/how-to/lockkit.rules.yml").read_text())["groups"][0]["rules"]
    assert rules
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        used = re.findall(r"lockkit_\w+", rule["expr"])
        assert used
        assert set(used) <= known, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_dashboard_shows_every_metric_and_no_other() -> None:
    """docs/how-to/lockkit-grafana.json."""
    metrics = exported()
    dashboard = json.loads((ROOT / "docs/how-to/lockkit-grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"]]
    used = set(re.findall(r"lockkit_\w+", " ".join(queries)))

    assert used - set().union(*metrics.values()) == set()
    assert [name for name, series in metrics.items() if not series & used] == []
    assert [query for query in queries if query.count("(") != query.count(")")] == []


HOLDER = """
import os
import lockkit
from lockkit import observers
from lockkit.integrations.prometheus import PrometheusObserver

lockkit.add_observer(PrometheusObserver())
lease = lockkit.connect("memory://metrics").lock("a", label="a").acquire()
for channel in observers.active:
    channel.flush({patience})
print(os.getpid(), flush=True)
os._exit(1)
"""


def test_leases_of_a_killed_process_are_no_longer_counted(tmp_path: Path) -> None:
    """With metrics of several processes, as with gunicorn; the others' leases are one sum."""
    seen = Prometheus()
    seen.registry = CollectorRegistry()
    MultiProcessCollector(seen.registry, path=str(tmp_path))  # type: ignore[no-untyped-call] # of prometheus_client
    program = HOLDER.format(patience=PATIENCE)
    killed, _ = (int(run_python("-c", program, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)).stdout) for _ in range(2))

    assert seen.value("held", "a") == 2
    mark_process_dead(killed, str(tmp_path))  # type: ignore[no-untyped-call] # see above
    assert seen.value("held", "a") == 1


# -- spans -------------------------------------------------------------------------------------------------------------


def test_spans_are_below_that_of_the_caller(telemetry: OpenTelemetry, client: lockkit.Client) -> None:
    """`acquire` from the call to the grant, `hold` from there to the release."""

    @client.lock("seat:{seat}")
    def book(seat: str) -> str:
        return seat

    with telemetry.traces.get_tracer("test").start_as_current_span("request"):
        book("12A")

    acquire, hold, request = telemetry.spans
    assert [span.name for span in (acquire, hold, request)] == ["lockkit.acquire", "lockkit.hold", "request"]
    for span in (acquire, hold):
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
    labels = {"lockkit.template": "seat:{seat}", "lockkit.backend": URL, "lockkit.mode": "exclusive"}
    token = (hold.attributes or {})["lockkit.token"]
    assert dict(hold.attributes or {}) == {**labels, "lockkit.token": token}
    assert dict(acquire.attributes or {}) == {**labels, "lockkit.token": token, "lockkit.outcome": "granted"}
    assert acquire.end_time == hold.start_time
    assert acquire.start_time <= acquire.end_time <= hold.end_time  # type: ignore[operator]


def test_asyncio_spans_are_below_that_of_their_task(telemetry: OpenTelemetry) -> None:
    """Each task has its own context."""

    async def main() -> None:
        tracer = telemetry.traces.get_tracer("test")

        async def request(number: int) -> None:
            with tracer.start_as_current_span(f"request {number}"):
                async with locks.lock("a", label=f"{number}"):
                    await asyncio.sleep(0)

        async with await lockkit.aio.connect(f"{URL}-aio", ttl=PATIENCE) as locks:
            await asyncio.gather(*map(request, range(3)))

    asyncio.run(main())

    ids = {span.context.span_id: span.name for span in telemetry.spans}
    below = [
        (ids[span.parent.span_id], (span.attributes or {})["lockkit.template"])
        for span in telemetry.spans
        if span.parent is not None
    ]
    assert sorted(below) == [(f"request {number}", str(number)) for number in range(3) for _ in range(2)]


def test_loss_and_refusals_on_spans(telemetry: OpenTelemetry, client: lockkit.Client) -> None:
    """Busy is no error; a loss and a backend that does not answer are."""
    lease = client.lock("a").acquire()
    client.lock("a").try_acquire()
    client.break_lock("a")
    flush()
    assert lease.lost
    unreachable, backend = scripted()
    backend.after["try_acquire"] = once(fail(BackendUnavailable("gone")))
    with pytest.raises(BackendUnavailable):
        unreachable.lock("b").acquire(timeout=0)

    status = [
        (span.name, (span.attributes or {}).get("lockkit.outcome"), span.status.status_code, span.status.description)
        for span in telemetry.spans
    ]
    assert status == [
        ("lockkit.acquire", "granted", StatusCode.UNSET, None),
        ("lockkit.acquire", "busy", StatusCode.UNSET, None),
        ("lockkit.hold", None, StatusCode.ERROR, "lost: broken"),
        ("lockkit.acquire", "unavailable", StatusCode.ERROR, "unavailable"),
    ]


def test_jeopardy_is_an_event_of_the_span(telemetry: OpenTelemetry) -> None:
    """A trace shows when renewals began to fail."""
    observer = telemetry.observer
    observer.granted(LockEvent("a", "a", URL, "exclusive", 1, "o", 0.0, None, None, 10.0))
    observer.jeopardy(LockEvent("a", "a", URL, "exclusive", 1, "o", None, 1.0, "unavailable", 11.0))
    observer.released(LockEvent("a", "a", URL, "exclusive", 1, "o", None, 2.0, None, 12.0))

    hold = telemetry.spans[-1]
    assert [(event.name, event.timestamp) for event in hold.events] == [("jeopardy", 11_000_000_000)]
    assert hold.end_time == 12_000_000_000
