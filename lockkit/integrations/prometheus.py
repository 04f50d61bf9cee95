"""Metrics of locks for Prometheus. Needs ``pip install 'lockkit[prometheus]'``."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from lockkit.backend import LossReason
from lockkit.errors import ConfigurationError
from lockkit.integrations.labels import template_of
from lockkit.observers import LockEvent, Observer
from lockkit.units import Seconds

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


__all__ = ["BUCKETS", "PrometheusObserver"]

BUCKETS: Sequence[Seconds] = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
"""Upper bounds of the histograms, seconds: from a lock of the same machine to a job of ten minutes."""

_LABELS = ("template", "backend", "mode")

_Labels: TypeAlias = "tuple[str, str, str]"


class PrometheusObserver(Observer):
    """
    Counts the events of locks. All metrics have the labels ``template`` (never the name), ``backend`` and ``mode``.

    - ``lockkit_acquisitions_total``, by ``outcome``: ``granted``, ``busy``, ``unavailable``, ``cancelled``, ``error``
    - ``lockkit_waits_total``: acquisitions that found the lock busy and began to wait
    - ``lockkit_wait_seconds``: how long callers waited, whatever the outcome
    - ``lockkit_waiting``: calls that wait now
    - ``lockkit_held``: leases held now
    - ``lockkit_oldest_held_timestamp_seconds``: when the oldest lease that is held now was granted, Unix time;
      ``+Inf`` without leases
    - ``lockkit_hold_seconds``: how long they were held
    - ``lockkit_renewals_total`` and ``lockkit_jeopardies_total``: successful renewals, and times that the
      renewals of a lease began to fail
    - ``lockkit_renewal_late_seconds``: how much later than planned the last renewal was sent
    - ``lockkit_losses_total``, by ``reason``: 0 from the first grant on, so that an alert sees the first loss
    - ``lockkit_undone_total``: requests withdrawn because their answer was lost or too late
    """

    def __init__(self, registry: CollectorRegistry | None = None, *, buckets: Sequence[Seconds] = BUCKETS) -> None:
        """
        Register the metrics.

        Args:
            registry: Where to register them; None: prometheus_client's default. One observer per registry.
            buckets: Upper bounds of the histograms, seconds.

        Raises:
            ConfigurationError: prometheus_client is not installed.
        """
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # noqa: PLC0415 - an extra
        except ImportError as error:
            message = "PrometheusObserver needs prometheus_client: pip install 'lockkit[prometheus]'"
            raise ConfigurationError(message) from error
        to = REGISTRY if registry is None else registry

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"lockkit_{name}", about, [*_LABELS, *labels], registry=to)

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"lockkit_{name}", about, _LABELS, registry=to, buckets=tuple(buckets))

        self._acquisitions = counter("acquisitions", "Calls that acquire, by their outcome.", "outcome")
        self._waits = counter("waits", "Calls that found the lock busy and began to wait.")
        self._wait_seconds = histogram("wait_seconds", "How long calls waited for the lock.")

        # Where processes share a directory of metrics, one that was killed holds nothing any more.
        def gauge(name: str, about: str, mode: Literal["livesum", "livemin", "livemax"]) -> Gauge:
            return Gauge(f"lockkit_{name}", about, _LABELS, registry=to, multiprocess_mode=mode)

        self._waiting = gauge("waiting", "Calls that wait for the lock.", "livesum")
        self._held = gauge("held", "Leases that are held.", "livesum")
        oldest = "When the oldest lease that is held was granted, Unix time; +Inf without leases."
        self._oldest = gauge("oldest_held_timestamp_seconds", oldest, "livemin")
        late = "How much later than planned the last renewal was sent."
        self._late = gauge("renewal_late_seconds", late, "livemax")
        self._hold_seconds = histogram("hold_seconds", "How long leases were held.")
        self._renewals = counter("renewals", "Renewals that the backend confirmed.")
        self._jeopardies = counter("jeopardies", "Times that the renewals of a lease began to fail.")
        self._losses = counter("losses", "Leases that ended before their holder released them.", "reason")
        self._undone = counter("undone", "Requests withdrawn because their answer was lost or too late.")
        self._owners: dict[str | None, _Labels] = {}  # labels at the grant: a downgrade changes the mode
        self._grants: dict[_Labels, dict[str | None, float]] = {}  # when each was granted, the oldest first
        self._calls: Counts[_Labels] = Counts()  # that wait

    def waiting(self, event: LockEvent, /) -> None:
        """Count it."""
        values = _values(event)
        self._waits.labels(*values).inc()
        self._calls[values] += 1
        self._waiting.labels(*values).inc()

    def granted(self, event: LockEvent, /) -> None:
        """Count it, and the lease as held."""
        values = _values(event)
        self._acquisitions.labels(*values, "granted").inc()
        self._wait_seconds.labels(*values).observe(event.waited or 0.0)
        self._owners[event.owner] = values
        self._held.labels(*values).inc()
        self._grants.setdefault(values, {})[event.owner] = event.at
        self._set_oldest(values)
        for reason in get_args(LossReason):
            self._losses.labels(*values, reason)
        self._end_wait(event, values)

    def refused(self, event: LockEvent, /) -> None:
        """Count it by its reason."""
        values = _values(event)
        self._acquisitions.labels(*values, event.reason).inc()
        self._wait_seconds.labels(*values).observe(event.waited or 0.0)
        self._end_wait(event, values)

    def renewed(self, event: LockEvent, /) -> None:
        """Count it, and note how late it was."""
        self._renewals.labels(*_values(event)).inc()
        self._late.labels(*_values(event)).set(event.late or 0.0)

    def jeopardy(self, event: LockEvent, /) -> None:
        """Count it."""
        self._jeopardies.labels(*_values(event)).inc()

    def lost(self, event: LockEvent, /) -> None:
        """Count it by its reason, and the lease as ended."""
        self._losses.labels(*_values(event), event.reason).inc()
        self._end(event)

    def released(self, event: LockEvent, /) -> None:
        """Count the lease as ended."""
        self._end(event)

    def undone(self, event: LockEvent, /) -> None:
        """Count it."""
        self._undone.labels(*_values(event)).inc()

    def _end(self, event: LockEvent) -> None:
        values = self._owners.pop(event.owner, None)
        self._hold_seconds.labels(*(values or _values(event))).observe(event.held or 0.0)
        if values is not None:  # else it was granted before the observer was added
            self._held.labels(*values).dec()
            self._grants[values].pop(event.owner, None)
            self._set_oldest(values)

    def _end_wait(self, event: LockEvent, values: _Labels) -> None:
        if event.waits and self._calls[values]:  # else it began to wait before the observer was added
            self._calls[values] -= 1
            self._waiting.labels(*values).dec()

    def _set_oldest(self, values: _Labels) -> None:
        self._oldest.labels(*values).set(next(iter(self._grants[values].values()), inf))


def _values(event: LockEvent) -> _Labels:
    return template_of(event), event.backend, event.mode
