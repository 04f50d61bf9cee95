"""What the observers for Prometheus and OpenTelemetry count, whichever of them counts it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Literal, NamedTuple, get_args
from weakref import WeakSet

from lockkit.backend import LossReason
from lockkit.observers import LockEvent, Observer
from lockkit.runtime import in_forked_child
from lockkit.units import Seconds

UNLABELLED = "unlabelled"
"""The label of locks for which the application gave neither a template nor ``label=``."""

Counted = Literal["acquisitions", "waits", "waiting", "held", "renewals", "jeopardies", "stalls", "losses", "undone"]

COUNTED: dict[Counted, str] = {
    "acquisitions": "Calls that acquire, by their outcome.",
    "waits": "Calls that found the lock busy and began to wait.",
    "waiting": "Calls that wait for the lock.",
    "held": "Leases that are held.",
    "renewals": "Renewals that the backend confirmed.",
    "jeopardies": "Times that the renewals of a lease began to fail.",
    "stalls": "Times that the holder of a lease made no progress.",
    "losses": "Leases that ended before their holder released them.",
    "undone": "Requests withdrawn because their answer was lost or too late.",
}
"""What is counted, in words. ``waiting`` and ``held`` also go down."""


class Labels(NamedTuple):
    """By what everything is counted. The template, never the name: each value of a label is a series of its own."""

    template: str
    backend: str
    mode: str


def labels_of(event: LockEvent) -> Labels:
    """Return the labels of an event."""
    return Labels(UNLABELLED if event.label is None else event.label, event.backend, event.mode)


class MetricsObserver(Observer, ABC):
    """Counts the events of locks. A subclass says where."""

    def __init__(self) -> None:
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Know of no lease: also in a forked child, which holds none; there, `held` keeps the parent's count."""
        self._owners: dict[str | None, Labels] = {}  # labels at the grant: a downgrade changes the mode
        self._grants: dict[Labels, dict[str | None, float]] = {}  # when each was granted, the oldest first
        self._calls: Counter[Labels] = Counter()  # that wait

    @abstractmethod
    def _count(self, what: Counted, labels: Labels, amount: int = 1, **more: str) -> None:
        """Add to a counter; `more` is the outcome of an acquisition, or the reason of a loss."""

    @abstractmethod
    def _record(self, what: Literal["wait", "hold"], labels: Labels, seconds: Seconds) -> None:
        """Add to a histogram: how long a call waited, or a lease was held."""

    @abstractmethod
    def _set_late(self, labels: Labels, seconds: Seconds) -> None:
        """Note how much later than planned a renewal was sent."""

    def _leases_changed(self, labels: Labels) -> None:
        """Look at `_grants`: one has begun or ended."""

    def waiting(self, event: LockEvent, /) -> None:
        labels = labels_of(event)
        self._count("waits", labels)
        self._calls[labels] += 1
        self._count("waiting", labels)

    def granted(self, event: LockEvent, /) -> None:
        labels = labels_of(event)
        self._end_call(event, "granted")
        self._owners[event.owner] = labels
        self._count("held", labels)
        self._grants.setdefault(labels, {})[event.owner] = event.at
        self._leases_changed(labels)
        for reason in get_args(LossReason):  # from 0 on, so that an alert sees the first loss
            self._count("losses", labels, 0, reason=reason)

    def refused(self, event: LockEvent, /) -> None:
        self._end_call(event, event.reason or "error")

    def renewed(self, event: LockEvent, /) -> None:
        self._count("renewals", labels_of(event))
        self._set_late(labels_of(event), event.late or 0.0)

    def jeopardy(self, event: LockEvent, /) -> None:
        self._count("jeopardies", labels_of(event))

    def stalled(self, event: LockEvent, /) -> None:
        self._count("stalls", labels_of(event))

    def lost(self, event: LockEvent, /) -> None:
        self._count("losses", labels_of(event), reason=event.reason or "")
        self.released(event)

    def undone(self, event: LockEvent, /) -> None:
        self._count("undone", labels_of(event))

    def _end_call(self, event: LockEvent, outcome: str) -> None:
        labels = labels_of(event)
        self._count("acquisitions", labels, outcome=outcome)
        self._record("wait", labels, event.waited or 0.0)
        if event.waits and self._calls[labels]:  # else it began to wait before the observer was added
            self._calls[labels] -= 1
            self._count("waiting", labels, -1)

    def released(self, event: LockEvent, /) -> None:
        labels = self._owners.pop(event.owner, None)
        self._record("hold", labels or labels_of(event), event.held or 0.0)
        if labels is not None:  # else it was granted before the observer was added
            self._count("held", labels, -1)
            self._grants[labels].pop(event.owner, None)
            self._leases_changed(labels)


_all: WeakSet[MetricsObserver] = WeakSet()


def _forked() -> None:
    for observer in list(_all):
        observer._begin()  # noqa: SLF001 - of this module


in_forked_child(_forked)
