"""Spans and metrics of locks for OpenTelemetry. Needs ``pip install 'lockkit[opentelemetry]'``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

from lockkit.errors import ConfigurationError
from lockkit.integrations.metrics import COUNTED, Counted, Labels, MetricsObserver, labels_of
from lockkit.observers import LockEvent
from lockkit.runtime import wall_clock
from lockkit.units import Seconds

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import Span, Status, TracerProvider

__all__ = ["OpenTelemetryObserver"]

_UNITS: dict[Counted, str] = {
    **dict.fromkeys(("acquisitions", "waits", "waiting"), "{call}"),
    **dict.fromkeys(("held", "jeopardies", "stalls", "losses"), "{lease}"),
    "renewals": "{renewal}",
    "undone": "{request}",
}


class OpenTelemetryObserver(MetricsObserver):
    """
    Makes spans and metrics of the events of locks.

    Spans, below the span in which the lock was acquired: ``lockkit.acquire`` from the call to its outcome, with the
    status error if it was refused for another reason than ``busy``; ``lockkit.hold`` from the grant to the end of the
    lease, with an event where renewals began to fail, and with the status error if the lease was lost.

    Metrics: ``lockkit.acquisitions`` (by ``lockkit.outcome``), ``lockkit.waits``, ``lockkit.wait.duration``,
    ``lockkit.waiting``, ``lockkit.held``, ``lockkit.held.oldest`` (age of the oldest lease), ``lockkit.hold.duration``,
    ``lockkit.renewals``, ``lockkit.renewal.late``, ``lockkit.jeopardies``, ``lockkit.stalls``, ``lockkit.losses`` (by
    ``lockkit.reason``, 0 from the first grant on) and ``lockkit.undone``.

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
        super().__init__()
        self._trace = trace
        self._tracer = trace.get_tracer("lockkit", tracer_provider=tracer_provider)
        meter = metrics.get_meter("lockkit", meter_provider=meter_provider)
        self._counters = {
            what: (meter.create_up_down_counter if what in {"waiting", "held"} else meter.create_counter)(
                f"lockkit.{what}", _UNITS[what], about
            )
            for what, about in COUNTED.items()
        }
        self._histograms = {
            "wait": meter.create_histogram("lockkit.wait.duration", "s", "How long calls waited for the lock."),
            "hold": meter.create_histogram("lockkit.hold.duration", "s", "How long leases were held."),
        }
        self._observe(meter, "lockkit.held.oldest", "Age of the oldest lease that is held.", self._ages)
        self._observe(
            meter, "lockkit.renewal.late", "How much later than planned the last renewal was sent.",
            lambda: self._late.copy().items(),
        )  # fmt: skip

    def _begin(self) -> None:
        super()._begin()
        self._spans: dict[str | None, Span] = {}  # of leases
        self._late: dict[Labels, Seconds] = {}

    @staticmethod
    def _observe(meter: Meter, name: str, about: str, values: Callable[[], Iterable[tuple[Labels, float]]]) -> None:
        """Make a gauge that is looked at when it is exported."""
        from opentelemetry.metrics import CallbackOptions, Observation  # noqa: PLC0415 - an extra

        def look(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, _attributes(labels)) for labels, value in values()]

        meter.create_observable_gauge(name, [look], "s", about)

    def _ages(self) -> Iterable[tuple[Labels, Seconds]]:
        now = wall_clock()
        for labels, grants in self._grants.copy().items():  # in the exporter's thread
            yield labels, max(0.0, now - next(iter(grants.copy().values()), now))

    def _count(self, what: Counted, labels: Labels, amount: int = 1, **more: str) -> None:
        self._counters[what].add(amount, _attributes(labels, **more))

    def _record(self, what: Literal["wait", "hold"], labels: Labels, seconds: Seconds) -> None:
        self._histograms[what].record(seconds, _attributes(labels))

    def _set_late(self, labels: Labels, seconds: Seconds) -> None:
        self._late[labels] = seconds

    def granted(self, event: LockEvent, /) -> None:
        super().granted(event)
        attributes: dict[str, str | int] = {**_attributes(labels_of(event)), **_token(event)}
        self._spans[event.owner] = self._tracer.start_span(
            "lockkit.hold", attributes=attributes, start_time=_nanoseconds(event.at)
        )

    def jeopardy(self, event: LockEvent, /) -> None:
        super().jeopardy(event)
        if event.owner in self._spans:
            self._spans[event.owner].add_event("jeopardy", timestamp=_nanoseconds(event.at))

    def lost(self, event: LockEvent, /) -> None:
        if event.owner in self._spans:
            self._spans[event.owner].set_status(self._error(f"lost: {event.reason or ''}"))
        super().lost(event)

    def _end_call(self, event: LockEvent, outcome: str) -> None:
        super()._end_call(event, outcome)
        span = self._tracer.start_span(
            "lockkit.acquire",
            attributes={**_attributes(labels_of(event), outcome=outcome), **_token(event)},
            start_time=_nanoseconds(event.at - (event.waited or 0.0)),
        )
        if outcome not in {"granted", "busy"}:
            span.set_status(self._error(outcome))
        span.end(_nanoseconds(event.at))

    def released(self, event: LockEvent, /) -> None:
        super().released(event)
        span = self._spans.pop(event.owner, None)
        if span is not None:  # else it was granted before the observer was added
            span.end(_nanoseconds(event.at))

    def _error(self, description: str) -> Status:
        return self._trace.Status(self._trace.StatusCode.ERROR, description)


def _attributes(labels: Labels, **more: str) -> dict[str, str]:
    return {f"lockkit.{name}": value for name, value in {**labels._asdict(), **more}.items()}


def _token(event: LockEvent) -> dict[str, int]:
    return {} if event.token is None else {"lockkit.token": event.token}


def _nanoseconds(at: float) -> int:
    return round(at * 1e9)
