"""When a client looks at which of its leases: a heap of times, and for each the leases that are due then."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, nextafter

from lockkit.units import Instant


class Agenda:
    """
    Owners of leases, by the time when to look at each.

    Nothing is removed before its time: a lease that has ended, or is due later than planned, is found out when its time
    comes. So an entry costs the same however many there are, and a lease that ends early costs nothing.

    Leases that were renewed together share one time. A heap of times with a list for each takes them in without
    comparing anything, where a heap of leases would sort them.

    It refers to leases by owner, so a lease that has ended does not stay in memory until its time comes.
    """

    __slots__ = ("_batches", "_owners", "_times")

    def __init__(self) -> None:
        """Start empty."""
        self._times: list[Instant] = []
        self._owners: dict[Instant, list[str]] = {}
        self._batches: dict[Instant, list[str]] = {}  # apart, since they may be emptied

    def add(self, at: Instant, owner: str) -> None:
        """Plan to look at a lease."""
        self.owners_at(at).append(owner)

    def owners_at(self, at: Instant) -> list[str]:
        """
        Return the leases that are planned for a time, to be added to at once.

        An interrupt may strike between any two steps: the time comes first, so that what has an owner has a time.
        """
        assert at < inf, "what is never due is not planned"
        owners = self._owners.get(at)
        if owners is None:
            heappush(self._times, at)
            owners = self._owners[at] = []
        return owners

    def add_batch(self, at: Instant, owners: list[str]) -> None:
        """Plan to look at several leases at the same time, or a moment earlier. Emptying the list removes them."""
        assert owners, "the watch sends no empty batch"
        while at in self._batches:
            at = nextafter(at, -inf)
        heappush(self._times, at)
        self._batches[at] = owners

    def __len__(self) -> int:
        """Return for how many times something is planned."""
        assert len(self._times) >= len(self._owners) + len(self._batches), "nothing is planned that would not be taken"
        return len(self._times)

    def next_at(self) -> Instant:
        """Return the earliest time; ``inf`` if there is none."""
        while self._times:
            at = self._times[0]
            if at in self._owners or self._batches.get(at):
                return at
            heappop(self._times)  # a batch that was emptied
            self._batches.pop(at, None)
        return inf

    def take(self, until: Instant) -> list[str]:
        """Remove what is planned for `until` or earlier; the earliest comes first."""
        taken: list[str] = []
        while self._times and self._times[0] <= until:
            at = heappop(self._times)
            taken += self._owners.pop(at, ())
            taken += self._batches.pop(at, ())
        assert not self._times or self._times[0] > until, "what is left is due later"
        return taken
