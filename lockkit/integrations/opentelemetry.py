"""Spans and metrics of locks for OpenTelemetry. Needs ``pip install 'lockkit[opentelemetry]'``."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias, get_args

from lockkit.backend import LossReason
from lockkit.errors import ConfigurationError
from lockkit.integrations.labels import template_of
from lockkit.observers import LockEvent, Observer
from lockkit.runtime import wall_clock
from lockkit.units import Seconds

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import Span, Status, TracerProvider


__all__ = ["OpenTelemetryObserver"]

_Labels: TypeAlias = "tuple[tuple[str, str], ...]"
"""Attributes, as a key."""


class OpenTelemetryObserver(Observer):
    """
    Makes spans and metrics of the events of locks.

    Spans, below the span in which the lock was acquired: ``lockkit.acquire`` from the call to its outcome, with the
    status error if it was refused for another reason than ``busy``; ``lockkit.hold`` from the grant to the end of the
    lease, with an event where renewals began to fail, and with the status error if the lease was lost.

    Metrics: ``lockkit.acquisitions`` (by ``lockkit.outcome``), ``lockkit.waits``, ``lockkit.wait.duration``,
    ``lockkit.waiting``, ``lockkit.held``, ``lockkit.held.oldest`` (age of the oldest lease), ``lockkit.hold.duration``,
    ``lockkit.renewals``, ``lockkit.renewal.late``, ``lockkit.jeopardies``, ``lockkit.losses`` (by ``lockkit.reason``, 0
    from the first grant on) and ``lockkit.undone``.

    Attributes of all: ``lockkit.template`` (never the name), ``lockkit.backend`` and ``lockkit.mode``; spans also have
    ``lockkit.token``.
    """

    def __init__(
        self, *, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        """
        Make the instruments.

        Args:
            tracer_provider: Of the spans; None: the process's.
            meter_provider: Of the metrics; None: the process's.

        Raises:
            ConfigurationError: opentelemetry-api is not installed.
        """
        try:
            from opentelemetry import metrics, trace  # noqa: PLC0415 - an extra
        except ImportError as error:
            message = "OpenTelemetryObserver needs opentelemetry-api: pip install 'lockkit[opentelemetry]'"
            raise ConfigurationError(message) from error
        self._trace = trace
        self._tracer = trace.get_tracer("lockkit", tracer_provider=tracer_provider)
        meter = metrics.get_meter("lockkit", meter_provider=meter_provider)
        self._acquisitions = meter.create_counter(
            "lockkit.acquisitions", "{call}", "Calls that acquire, by their outcome."
        )
        self._waits = meter.create_counter(
            "lockkit.waits", "{call}", "Calls that found the lock busy and began to wait."
        )
        self._wait_seconds = meter.create_histogram("lockkit.wait.duration", "s", "How long calls waited for the lock.")
        self._waiting = meter.create_up_down_counter("lockkit.waiting", "{call}", "Calls that wait for the lock.")
        self._held = meter.create_up_down_counter("lockkit.held", "{lease}", "Leases that are held.")
        self._hold_seconds = meter.create_histogram("lockkit.hold.duration", "s", "How long leases were held.")
        self._renewals = meter.create_counter("lockkit.renewals", "{renewal}", "Renewals that the backend confirmed.")
        self._jeopardies = meter.create_counter(
            "lockkit.jeopardies", "{lease}", "Times that the renewals of a lease began to fail."
        )
        self._losses = meter.create_counter(
            "lockkit.losses", "{lease}", "Leases that ended before their holder released them."
        )
        self._undone = meter.create_counter(
            "lockkit.undone", "{request}", "Requests withdrawn because their answer was lost or too late."
        )
        # Attributes at the grant: a downgrade changes the mode.
        self._open: dict[str | None, tuple[Span, dict[str, str]]] = {}
        self._calls: Counts[_Labels] = Counts()  # that wait
        self._grants: dict[_Labels, dict[str | None, float]] = {}  # when each was granted, the oldest first
        self._late: dict[_Labels, Seconds] = {}
        self._observe(meter, "lockkit.held.oldest", "Age of the oldest lease that is held.", self._ages)
        self._observe(
            meter, "lockkit.renewal.late", "How much later than planned the last renewal was sent.",
            lambda: self._late.copy().items(),
        )  # fmt: skip

    @staticmethod
    def _observe(meter: Meter, name: str, about: str, values: Callable[[], Iterable[tuple[_Labels, float]]]) -> None:
        """Make a gauge that is looked at when it is exported."""
        from opentelemetry.metrics import CallbackOptions, Observation  # noqa: PLC0415 - an extra

        def look(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, dict(labels)) for labels, value in values()]

        meter.create_observable_gauge(name, [look], "s", about)

    def _ages(self) -> Iterable[tuple[_Labels, Seconds]]:
        now = wall_clock()
        for labels, grants in self._grants.copy().items():  # in the exporter's thread
            yield labels, max(0.0, now - next(iter(grants.copy().values()), now))

    def waiting(self, event: LockEvent, /) -> None:
        """Count it."""
        self._waits.add(1, _attributes(event))
        self._calls[_labels(event)] += 1
        self._waiting.add(1, _attributes(event))

    def granted(self, event: LockEvent, /) -> None:
        """Make the span of the acquisition, and begin that of the lease."""
        self._acquired(event, "granted")
        attributes = _attributes(event)
        self._held.add(1, attributes)
        span = self._tracer.start_span(
            "lockkit.hold", attributes={**attributes, **_token(event)}, start_time=_nanoseconds(event.at)
        )
        self._open[event.owner] = span, attributes
        self._grants.setdefault(_labels(event), {})[event.owner] = event.at
        for reason in get_args(LossReason):
            self._losses.add(0, {**attributes, "lockkit.reason": reason})

    def refused(self, event: LockEvent, /) -> None:
        """Make the span of the acquisition."""
        self._acquired(event, event.reason or "error")

    def renewed(self, event: LockEvent, /) -> None:
        """Count it, and note how late it was."""
        self._renewals.add(1, _attributes(event))
        self._late[_labels(event)] = event.late or 0.0

    def jeopardy(self, event: LockEvent, /) -> None:
        """Count it, and note it on the span of the lease."""
        self._jeopardies.add(1, _attributes(event))
        if event.owner in self._open:
            self._open[event.owner][0].add_event("jeopardy", timestamp=_nanoseconds(event.at))

    def lost(self, event: LockEvent, /) -> None:
        """Count it, and end the span of the lease with an error."""
        reason = event.reason or ""
        self._losses.add(1, {**_attributes(event), "lockkit.reason": reason})
        self._end(event, self._error(f"lost: {reason}"))

    def released(self, event: LockEvent, /) -> None:
        """End the span of the lease."""
        self._end(event, None)

    def undone(self, event: LockEvent, /) -> None:
        """Count it."""
        self._undone.add(1, _attributes(event))

    def _acquired(self, event: LockEvent, outcome: str) -> None:
        waited: Seconds = event.waited or 0.0
        attributes = _attributes(event)
        self._acquisitions.add(1, {**attributes, "lockkit.outcome": outcome})
        if event.waits and self._calls[_labels(event)]:  # else it began to wait before the observer was added
            self._calls[_labels(event)] -= 1
            self._waiting.add(-1, attributes)
        self._wait_seconds.record(waited, attributes)
        span = self._tracer.start_span(
            "lockkit.acquire",
            attributes={**attributes, **_token(event), "lockkit.outcome": outcome},
            start_time=_nanoseconds(event.at - waited),
        )
        if outcome not in {"granted", "busy"}:
            span.set_status(self._error(outcome))
        span.end(_nanoseconds(event.at))

    def _end(self, event: LockEvent, status: Status | None) -> None:
        opened = self._open.pop(event.owner, None)
        if opened is None:  # it was granted before the observer was added
            self._hold_seconds.record(event.held or 0.0, _attributes(event))
            return
        span, attributes = opened
        self._hold_seconds.record(event.held or 0.0, attributes)
        self._held.add(-1, attributes)
        self._grants[tuple(attributes.items())].pop(event.owner, None)
        if status is not None:
            span.set_status(status)
        span.end(_nanoseconds(event.at))

    def _error(self, description: str) -> Status:
        return self._trace.Status(self._trace.StatusCode.ERROR, description)


def _attributes(event: LockEvent) -> dict[str, str]:
    return {"lockkit.template": template_of(event), "lockkit.backend": event.backend, "lockkit.mode": event.mode}


def _labels(event: LockEvent) -> _Labels:
    return tuple(_attributes(event).items())


def _token(event: LockEvent) -> dict[str, int]:
    return {} if event.token is None else {"lockkit.token": event.token}


def _nanoseconds(at: float) -> int:
    return round(at * 1e9)
