"""Metrics of locks for Prometheus. Needs ``pip install 'lockkit[prometheus]'``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockkit.errors import ConfigurationError
from lockkit.integrations.labels import template_of
from lockkit.observers import Observer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import CollectorRegistry

    from lockkit.observers import LockEvent
    from lockkit.units import Seconds

__all__ = ["BUCKETS", "PrometheusObserver"]

BUCKETS: Sequence[Seconds] = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
"""Upper bounds of the histograms, seconds: from a lock of the same machine to a job of ten minutes."""

_LABELS = ("template", "backend", "mode")


class PrometheusObserver(Observer):
    """
    Counts the events of locks. All metrics have the labels ``template`` (never the name), ``backend`` and ``mode``.

    - ``lockkit_acquisitions_total``, by ``outcome``: ``granted``, ``busy``, ``unavailable``, ``cancelled``, ``error``
    - ``lockkit_waits_total``: acquisitions that found the lock busy and began to wait
    - ``lockkit_wait_seconds``: how long callers waited, whatever the outcome
    - ``lockkit_held``: leases held now
    - ``lockkit_hold_seconds``: how long they were held
    - ``lockkit_renewals_total`` and ``lockkit_jeopardies_total``: successful renewals, and times that the
      renewals of a lease began to fail
    - ``lockkit_losses_total``, by ``reason``
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
        self._held = Gauge("lockkit_held", "Leases that are held.", _LABELS, registry=to, multiprocess_mode="livesum")
        self._hold_seconds = histogram("hold_seconds", "How long leases were held.")
        self._renewals = counter("renewals", "Renewals that the backend confirmed.")
        self._jeopardies = counter("jeopardies", "Times that the renewals of a lease began to fail.")
        self._losses = counter("losses", "Leases that ended before their holder released them.", "reason")
        self._undone = counter("undone", "Requests withdrawn because their answer was lost or too late.")
        self._owners: dict[str | None, tuple[str, str, str]] = {}  # labels at the grant: a downgrade changes the mode

    def waiting(self, event: LockEvent, /) -> None:
        """Count it."""
        self._waits.labels(*_values(event)).inc()

    def granted(self, event: LockEvent, /) -> None:
        """Count it, and the lease as held."""
        values = _values(event)
        self._acquisitions.labels(*values, "granted").inc()
        self._wait_seconds.labels(*values).observe(event.waited or 0.0)
        self._owners[event.owner] = values
        self._held.labels(*values).inc()

    def refused(self, event: LockEvent, /) -> None:
        """Count it by its reason."""
        values = _values(event)
        self._acquisitions.labels(*values, event.reason).inc()
        self._wait_seconds.labels(*values).observe(event.waited or 0.0)

    def renewed(self, event: LockEvent, /) -> None:
        """Count it."""
        self._renewals.labels(*_values(event)).inc()

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


def _values(event: LockEvent) -> tuple[str, str, str]:
    return template_of(event), event.backend, event.mode
