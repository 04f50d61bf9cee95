"""Metrics of locks for Prometheus. Needs ``pip install 'lockkit[prometheus]'``."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from lockkit.errors import ConfigurationError
from lockkit.integrations.metrics import COUNTED, Counted, Labels, MetricsObserver
from lockkit.units import Seconds

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["BUCKETS", "PrometheusObserver"]

BUCKETS: Sequence[Seconds] = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0)
"""Upper bounds of the histograms, seconds: from a lock of the same machine to a job of ten minutes."""

_MORE: dict[Counted, list[str]] = {"acquisitions": ["outcome"], "losses": ["reason"]}
"""Further labels."""


class PrometheusObserver(MetricsObserver):
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
    - ``lockkit_stalls_total``: times that the holder of a lease made no progress (``stall=``)
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
        super().__init__()
        to = REGISTRY if registry is None else registry

        # Where processes share a directory of metrics, one that was killed holds nothing any more.
        def gauge(name: str, about: str, mode: Literal["livesum", "livemin", "livemax"]) -> Gauge:
            return Gauge(f"lockkit_{name}", about, Labels._fields, registry=to, multiprocess_mode=mode)

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"lockkit_{name}_seconds", about, Labels._fields, registry=to, buckets=tuple(buckets))

        self._counters: dict[Counted, Any] = {
            what: gauge(what, about, "livesum")
            if what in {"waiting", "held"}
            else Counter(f"lockkit_{what}", about, [*Labels._fields, *_MORE.get(what, [])], registry=to)
            for what, about in COUNTED.items()
        }
        self._histograms = {
            "wait": histogram("wait", "How long calls waited for the lock."),
            "hold": histogram("hold", "How long leases were held."),
        }
        oldest = "When the oldest lease that is held was granted, Unix time; +Inf without leases."
        self._oldest = gauge("oldest_held_timestamp_seconds", oldest, "livemin")
        late = "How much later than planned the last renewal was sent."
        self._late = gauge("renewal_late_seconds", late, "livemax")

    def _count(self, what: Counted, labels: Labels, amount: int = 1, **more: str) -> None:
        self._counters[what].labels(*labels, *more.values()).inc(amount)

    def _record(self, what: Literal["wait", "hold"], labels: Labels, seconds: Seconds) -> None:
        self._histograms[what].labels(*labels).observe(seconds)

    def _set_late(self, labels: Labels, seconds: Seconds) -> None:
        self._late.labels(*labels).set(seconds)

    def _leases_changed(self, labels: Labels) -> None:
        self._oldest.labels(*labels).set(next(iter(self._grants[labels].values()), inf))
