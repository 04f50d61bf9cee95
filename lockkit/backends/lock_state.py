"""
The state of one lock, for the backends that decide themselves instead of asking a server: memory and file.

Pure: no I/O. All times are of one monotonic clock, in seconds, and come from the caller.

======== =================================== ==================================================================
state    fields                              who may take it
======== =================================== ==================================================================
blocked  `leases`, `until` is ``inf``        nobody: an exclusive lease, or the head of the queue does not fit beside
                                             them; once they have ended, as *offered*, from the end of the last on
shared   `leases`, `queue` empty             another claim that fits beside them
offered  `queue` not empty, `until` finite   the head of the queue; after `until` the first request that arrives
free     no `leases`, `queue` empty          the first request that arrives
======== =================================== ==================================================================

A claim has a mode. An *exclusive* one fits when nobody holds the lock, a *shared* one (a reader) beside other readers,
a *permit* while fewer than its limit are held. Each lease has an end of its own.

The queue is served first come, first served: a released lock is *offered* to the head of the queue. Otherwise a client
that releases and acquires again at once would always overtake the waiter, which first has to be scheduled.
An offer is limited to `OFFER_SECONDS_MAX` or half of the waiter's ttl, so that a stopped waiter delays the others for
no longer than that. A waiter that misses its offer loses its place in the queue; its next attempt adds it at the end.

If the head of the queue fits beside others, the lock is offered to all claims behind it that fit as well: a run of
readers, or as many permits as are free. A reader that arrives while a writer waits goes behind it, so readers that
come and go do not starve writers.

`LockState` skips claims of clients that have ended. It calls the ``dead`` argument of its methods only when the answer
matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, Protocol, TypeVar

from lockkit.backend import Busy, Gone, Grant, Holder, Mode, Renewal, Renewed, decode_metadata, granted_at
from lockkit.units import Seconds

OFFER_SECONDS_MAX = 1.0
"""Longest offer to a waiter. A longer one lets a stopped waiter delay the others for longer; if it is shorter than the
time in which a busy machine schedules a woken process, waiters lose their turn."""

BROKEN_MAX = 100
"""Owners of broken permits that are remembered. More takes space in each record; an owner that was forgotten learns
that its permit is gone, and not why."""


class Claim(Protocol):
    """One acquisition that wants a lock."""

    @property
    def owner(self) -> str:
        """Its random id."""

    @property
    def ttl(self) -> float:
        """The ttl that it asked for, seconds."""

    @property
    def metadata(self) -> str:
        """JSON text for `Holder.metadata`."""

    @property
    def mode(self) -> Mode:
        """Beside whom it fits."""

    @property
    def limit(self) -> int:
        """Of a permit: how many may be held at the same time, itself included."""


C = TypeVar("C", bound=Claim)


@dataclass(slots=True)
class Lease(Generic[C]):
    """A lease."""

    claim: C  # who holds it
    until: float
    token: int
    mode: Mode = "exclusive"  # beside whom it is: a writer may go on as a reader, so not always that of the claim
    slot: int | None = None  # number of the permit; None for others


def wall_clock_us() -> int:
    """The wall clock of this machine: the "server time" of the hybrid token. It decides nothing else."""
    return time.time_ns() // 1000  # noqa: TID251


def lowest_free(slots: Iterable[int | None]) -> int:
    """Return the lowest number of a permit that is not among these."""
    taken = set(slots)
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)


def _never(claim: Claim) -> bool:
    del claim
    return False


class LockState(Generic[C]):
    """Leases, queue and token of one lock."""

    __slots__ = ("broken", "leases", "note", "queue", "token", "until")

    def __init__(self, token: int = 0) -> None:
        """Make a free lock."""
        self.leases: dict[str, Lease[C]] = {}  # by owner: one alone, or several beside one another
        self.until = 0.0  # when the offer to the head of the queue ends; ``inf`` while nobody fits beside the leases
        self.token = token  # the last one, 0 if there was none
        self.queue: list[C] = []  # the waiters, first come first
        self.broken: tuple[str, ...] = ()  # owners of the leases that `break_lock` ended last: renewals can say so
        # With the end of its life, µs of the wall clock; None if there is none. Only the file backend keeps notes here.
        self.note: tuple[str, int] | None = None

    def acquire(  # noqa: PLR0917 - faster than by their names
        self,
        name: str,
        claim: C,
        now: float,
        token_min: int,
        queue: bool,  # noqa: FBT001 - as above
        dead: Callable[[C], bool] = _never,
    ) -> tuple[Grant | Busy, Sequence[C]]:
        """Take the lock if it is this claim's turn. Otherwise, with `queue`, add the claim to the queue."""
        notify = self._end_leases(claim, now, dead) if self.leases else ()
        if not self.leases or self._fits_beside(claim):
            if self.queue:
                notify = self._skip_dead(claim, now, dead) or notify
                if self.leases and now >= self.until and not self._is_next(claim):
                    # The head missed its offer. The next may be a writer, which no reader overtakes.
                    del self.queue[0]
                    notify = self._offer(now)
            if not self.queue or self._is_next(claim) or now >= self.until:
                notify = self._take(claim, now, token_min)
                grant = Grant(name, claim.owner, self.token, claim.ttl)
                if claim.mode != "exclusive":
                    grant.slot = self.leases[claim.owner].slot
                return grant, notify
        if queue:
            self._enqueue(claim)
        assert self.leases or self.queue, "refused a free lock"
        # The claim itself may be the second behind a head that has just been offered the lock: it is looking already.
        return self._busy(claim, now), [waiter for waiter in notify if waiter.owner != claim.owner]

    def _busy(self, claim: C, now: float) -> Busy:
        """Say until when the lock is held, as far as that can be known now, and by whom."""
        if self.queue and self.until != inf:
            return Busy(max(0.0, self.until - now))
        ends = [lease.until for lease in self.leases.values()]
        until = min(ends) if claim.mode == "permit" else max(ends)
        holder = next(iter(self.leases.values())).claim
        return Busy(max(0.0, until - now), False, holder.owner, holder.metadata)  # noqa: FBT003

    @property
    def alone(self) -> Lease[C] | None:
        """The lease that excludes all others; None if there is none."""
        lease = next(iter(self.leases.values()), None)
        return lease if lease is not None and lease.mode == "exclusive" else None

    def _fits_beside(self, claim: C) -> bool:
        """Tell whether a claim fits beside the leases."""
        fits = claim.mode == "shared" or (claim.mode == "permit" and len(self.leases) < claim.limit)
        return fits and self.alone is None

    def _is_next(self, claim: C) -> bool:
        """
        Tell whether a claim that fits is the head of the queue, or fits together with all before it.

        A waiter whose limit is smaller is not overtaken: others would come and go before it for ever.
        """
        ahead, limit = 0, claim.limit
        for waiter in self.queue:
            if waiter.owner == claim.owner:
                break
            if waiter.mode == "exclusive":
                return False
            ahead += 1
            limit = min(limit, waiter.limit)
        if not ahead or claim.mode == "shared":
            return True
        return claim.mode == "permit" and len(self.leases) + ahead < limit

    def _end_leases(self, claim: C, now: float, dead: Callable[[C], bool]) -> Sequence[C]:
        """Remove the leases that have expired, and if the claim does not fit then, those of clients that have ended."""
        over = [owner for owner, lease in self.leases.items() if now >= lease.until]
        if len(over) < len(self.leases) and not self._fits_beside(claim):
            over += [owner for owner, lease in self.leases.items() if owner not in over and dead(lease.claim)]
        if not over:
            return ()
        # From their end on, not from `now`: an offer that nobody noticed for hours is over.
        return self._offer(min(now, max([self.leases.pop(owner).until for owner in over])))

    def _enqueue(self, claim: C) -> None:
        """Add a claim to the queue, or replace the one of its owner: its client may have a new id."""
        if self.leases and not self.queue:
            self.until = inf  # the claim does not fit, or it would not have to wait
        for index, waiter in enumerate(self.queue):
            if waiter.owner == claim.owner:
                self.queue[index] = claim
                return
        self.queue.append(claim)

    def _skip_dead(self, claim: C, now: float, dead: Callable[[C], bool]) -> Sequence[C]:
        """Remove dead heads of the queue and offer the lock to the first live waiter."""
        notify: Sequence[C] = ()
        while self.queue and self.queue[0].owner != claim.owner and now < self.until and dead(self.queue[0]):
            del self.queue[0]
            notify = self._offer(now)
        return notify

    def _take(self, claim: C, now: float, token_min: int) -> Sequence[C]:
        notify: Sequence[C] = ()
        if self.queue:
            # If it is not this claim's turn, the head missed its offer. The waiter behind it watched it.
            missed = not self._is_next(claim)
            self.queue = [waiter for waiter in self.queue[missed:] if waiter.owner != claim.owner]
            if missed:
                notify = self.queue[:1]  # it has another predecessor now
        self.token = max(self.token + 1, token_min)
        slot = self._free_slot() if claim.mode == "permit" else None
        self.leases[claim.owner] = Lease(claim, now + claim.ttl, self.token, claim.mode, slot)
        if claim.mode == "exclusive":
            self.until = inf
            return notify
        return self._offer(now) or notify

    def _free_slot(self) -> int:
        return lowest_free(lease.slot for lease in self.leases.values())

    def _offer(self, now: float) -> Sequence[C]:
        """Offer a lock that nobody has alone to the waiters that fit; return those to notify."""
        if not self.queue:
            self.until = 0.0
            return ()
        head = self.queue[0]
        if self.leases and not self._fits_beside(head):
            self.until = inf
            return self.queue[:1]  # it may watch the client of a lease that has ended now
        self.until = now + min(head.ttl / 2, OFFER_SECONDS_MAX)
        # The second too: if the first is stopped, the second must look when the offer ends, not when the ttl of the
        # former holder would have ended. Of those that exclude one another nobody else, so that 100 waiters do not wake
        # at once.
        return self.queue[: max(2, 0 if head.mode == "exclusive" else self._fitting(head))]

    def _fitting(self, head: C) -> int:
        """Count the waiters that fit together, from the head of the queue on."""
        mode, limit = head.mode, head.limit
        for ahead, waiter in enumerate(self.queue):
            limit = min(limit, waiter.limit)
            full = mode == "permit" and len(self.leases) + ahead >= limit
            if waiter.mode != mode or (full and waiter is not head):
                return ahead
        return len(self.queue)

    def downgrade(self, owner: str, now: float) -> tuple[bool, Sequence[C]]:
        """Turn the lease of a holder into that of a reader, in one step: no waiting writer gets in between."""
        lease = self.leases.get(owner)
        if lease is None or now >= lease.until:
            return False, ()
        if lease.mode != "exclusive":
            return True, ()  # asked again: the first answer was lost
        lease.mode = "shared"
        return True, self._offer(now)

    def take_over(self, name: str, owner: str, claim: C, now: float, token_min: int) -> Grant | None:
        """Put a claim in the place of the holder, if that is `owner`; the queue stays."""
        lease = self.alone
        if lease is None or now >= lease.until or lease.claim.owner not in {owner, claim.owner}:
            return None
        if lease.claim.owner == owner:
            self.token = max(self.token + 1, token_min)
            self.leases = {claim.owner: Lease(claim, now + claim.ttl, self.token)}
        return Grant(name, claim.owner, self.token, claim.ttl)

    def held(self, now: float, dead: Callable[[C], bool] = _never) -> bool:
        """Tell whether the lock is held."""
        return any(now < lease.until and not dead(lease.claim) for lease in self.leases.values())

    def in_use(self, now: float, dead: Callable[[C], bool] = _never) -> bool:
        """Tell whether the lock is held or waited for."""
        return self.held(now, dead) or any(not dead(waiter) for waiter in self.queue)

    def holders(self, now: float, dead: Callable[[C], bool] = _never) -> Sequence[Holder]:
        """Describe the holders, if there are any."""
        waiters = sum(not dead(waiter) for waiter in self.queue)
        return [
            Holder(
                owner, lease.token, lease.until - now, decode_metadata(lease.claim.metadata), waiters,
                mode=lease.mode, slot=lease.slot, since=granted_at(lease.token),
            )
            for owner, lease in self.leases.items()
            if now < lease.until and not dead(lease.claim)
        ]  # fmt: skip

    def renew(self, owner: str, ttl: Seconds, now: float) -> Renewal:
        """Restart the ttl if `owner` still holds the lock; otherwise say why not."""
        gone = self.confirm(owner, now)
        if gone is not None:
            return gone
        self.leases[owner].until = now + ttl
        return Renewed()

    def update(self, owner: str, change: Callable[[C], C], now: float) -> Gone | None:
        """Replace the claim of a holder if `owner` still holds the lock; otherwise say why not."""
        gone = self.confirm(owner, now)
        if gone is None:
            self.leases[owner].claim = change(self.leases[owner].claim)
        return gone

    def confirm(self, owner: str, now: float, dead: Callable[[C], bool] = _never) -> Gone | None:
        """Say why `owner` does not hold the lock; None if it does."""
        lease = self.leases.get(owner)
        if lease is not None and now < lease.until:
            return Gone("gone") if dead(lease.claim) else None
        if owner in self.broken:
            return Gone("broken")
        return Gone("expired" if lease is not None else "gone" if self.alone is None else "taken")

    def release(self, owner: str, now: float) -> tuple[bool, Sequence[C]]:
        """Free the lock if `owner` holds it; return whether its lease had not ended, and the waiters to notify."""
        lease = self.leases.pop(owner, None)
        return (False, ()) if lease is None else (now < lease.until, self._offer(now))

    def abandon(self, owner: str, now: float) -> Sequence[C]:
        """Remove every trace of `owner`; return the waiters to notify."""
        if owner in self.leases:
            return self.release(owner, now)[1]
        for index, waiter in enumerate(self.queue):
            if waiter.owner == owner:
                del self.queue[index]
                if index == 0 and self.alone is None:
                    return self._offer(now)
                return self.queue[index : index + 1]
        return ()

    def break_lock(self, now: float, dead: Callable[[C], bool] = _never) -> tuple[bool, Sequence[C]]:
        """Free the lock by force; return whether it was held, and the waiters to notify."""
        if not self.leases:
            return False, ()
        held = self.held(now, dead)
        if held:
            self.broken = tuple(self.leases)
        self.leases.clear()
        return held, self._offer(now)

    def break_permit(self, slot: int, now: float, dead: Callable[[C], bool] = _never) -> tuple[bool, Sequence[C]]:
        """Free one permit by force; return whether it was held, and the waiters to notify."""
        lease = next((lease for lease in self.leases.values() if lease.slot == slot), None)
        if lease is None:
            return False, ()
        held = now < lease.until and not dead(lease.claim)
        if held:
            self.broken = (*self.broken, lease.claim.owner)[-BROKEN_MAX:]
        return held, self.release(lease.claim.owner, now)[1]

    def predecessor(self, owner: str, dead: Callable[[C], bool] = _never) -> C | None:
        """
        Find the claim whose client `owner` must watch: the waiter before it in the queue, or the holder.

        The first two waiters watch the holder: the first may be stopped when the holder dies. If the first dies
        instead, the release notifies the second.
        Dead waiters in between are removed; the result may still be a dead holder.
        """
        index = next((i for i, waiter in enumerate(self.queue) if waiter.owner == owner), 0)
        while index > 0 and dead(self.queue[index - 1]):
            index -= 1
            del self.queue[index]
        if index > 1 or (index == 1 and self.alone is None):
            return self.queue[index - 1]
        # One is enough: the end of each wakes the head of the queue, which then watches another.
        return next((lease.claim for lease in self.leases.values()), None)

    @property
    def claims(self) -> Sequence[C]:
        """All who hold the lock or wait for it."""
        return [*(lease.claim for lease in self.leases.values()), *self.queue]

    @property
    def idle(self) -> bool:
        """The lock has no holder, no waiter and no broken lease: only the token is worth keeping."""
        return not self.leases and not self.queue and not self.broken
