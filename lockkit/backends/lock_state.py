"""
The state of one lock, for the backends that decide themselves instead of asking a server: memory and file.

Pure: no I/O. All times are of one monotonic clock, in seconds, and come from the caller.

======== ================================ ==================================================================
state    fields                           who may take it
======== ================================ ==================================================================
held     `holder`, `until` in the future  nobody
expired  `holder`, `until` in the past    as *offered*, from `until` on
offered  no `holder`, `queue` not empty   the head of the queue; after `until` the first request that arrives
free     no `holder`, `queue` empty       the first request that arrives
======== ================================ ==================================================================

The queue is served first come, first served: a released lock is *offered* to the head of the queue. Otherwise a client
that releases and acquires again at once would always overtake the waiter, which first has to be scheduled.
An offer is limited to `OFFER_SECONDS_MAX` or half of the waiter's ttl, so that a stopped waiter delays the others for
no longer than that. A waiter that misses its offer loses its place in the queue; its next attempt adds it at the end.

`LockState` skips claims of clients that have ended. It calls the ``dead`` argument of its methods only when the answer
matters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from lockkit.backend import Busy, Gone, Grant, Holder, Renewal, Renewed, decode_metadata

if TYPE_CHECKING:
    from lockkit.units import Seconds

__all__ = ["OFFER_SECONDS_MAX", "Claim", "LockState", "offer_seconds", "wall_clock_us"]

OFFER_SECONDS_MAX = 1.0
"""Longest offer to a waiter. A longer one lets a stopped waiter delay the others for longer; if it is shorter than the
time in which a busy machine schedules a woken process, waiters lose their turn."""


class Claim(Protocol):
    """One acquisition that wants a lock."""

    @property
    def owner(self) -> str:
        """Its random id."""
        ...

    @property
    def ttl(self) -> float:
        """The ttl that it asked for, seconds."""
        ...

    @property
    def metadata(self) -> str:
        """JSON text for `Holder.metadata`."""
        ...


C = TypeVar("C", bound=Claim)


def offer_seconds(claim: Claim) -> float:
    """How long an offer to this waiter lasts, seconds: ``min(ttl / 2, OFFER_SECONDS_MAX)``."""
    return min(claim.ttl / 2, OFFER_SECONDS_MAX)


def wall_clock_us() -> int:
    """The wall clock of this machine: the "server time" of the hybrid token. It decides nothing else."""
    return time.time_ns() // 1000  # noqa: TID251


def _never(claim: Claim) -> bool:
    del claim
    return False


class LockState(Generic[C]):
    """
    Holder, queue and token of one lock.

    Attributes:
        holder: The claim that holds the lock (until `until`), or None.
        until: When the lease ends; without a holder, when the offer to the head of the queue ends.
        token: The last token, 0 if there was none.
        queue: The waiters, first come first.
        broken: Owner of the last lease that `break_lock` ended, so that its renewal can say so; empty if there is none.
        note: The note on the lock, and the end of its life, µs of the wall clock; None if there is none. Only the file
            backend keeps notes here.
    """

    __slots__ = ("broken", "holder", "note", "queue", "token", "until")

    def __init__(self, token: int = 0) -> None:
        """Make a free lock."""
        self.holder: C | None = None
        self.until = 0.0
        self.token = token
        self.queue: list[C] = []
        self.broken = ""
        self.note: tuple[str, int] | None = None

    def acquire(
        self, name: str, claim: C, now: float, token_min: int, *, queue: bool, dead: Callable[[C], bool] = _never
    ) -> tuple[Grant | Busy, Sequence[C]]:
        """
        Take the lock if it is this claim's turn. Otherwise, with `queue`, add the claim to the queue.

        Args:
            name: Of the lock.
            claim: Who asks. A waiter asks again under the same owner.
            now: The time.
            token_min: Lower bound of the new token.
            queue: Add the claim to the queue if the lock is busy.
            dead: Tells whether the client of a claim has ended.

        Returns:
            The outcome, and the waiters to notify.
        """
        notify: Sequence[C] = ()
        if self.holder is not None:
            notify = self._free_if_over(now, dead)
        if self.holder is None:
            if self.queue:
                notify = self._skip_dead(claim, now, dead) or notify
            if not self.queue or self.queue[0].owner == claim.owner or now >= self.until:
                notify = self._take(claim, now, token_min)
                return Grant(name, claim.owner, self.token, claim.ttl), notify
        if queue:
            self._enqueue(claim)
        assert self.holder is not None or self.queue, "refused a free lock"
        return Busy(max(0.0, self.until - now), owner=None if self.holder is None else self.holder.owner), notify

    def _enqueue(self, claim: C) -> None:
        """Add a claim to the queue, or replace the one of its owner: its client may have a new id."""
        for index, waiter in enumerate(self.queue):
            if waiter.owner == claim.owner:
                self.queue[index] = claim
                return
        self.queue.append(claim)

    def _free_if_over(self, now: float, dead: Callable[[C], bool]) -> Sequence[C]:
        assert self.holder is not None
        if now >= self.until:
            # From `until` on, not from `now`: an offer that nobody noticed for hours is over.
            return self._free(self.until)
        if dead(self.holder):
            return self._free(now)
        return ()

    def _skip_dead(self, claim: C, now: float, dead: Callable[[C], bool]) -> Sequence[C]:
        """Remove dead heads of the queue and offer the lock to the first live waiter."""
        notify: Sequence[C] = ()
        while self.queue and self.queue[0].owner != claim.owner and now < self.until and dead(self.queue[0]):
            del self.queue[0]
            notify = self._free(now)
        return notify

    def _take(self, claim: C, now: float, token_min: int) -> Sequence[C]:
        notify: Sequence[C] = ()
        if self.queue:
            if self.queue[0].owner == claim.owner:
                del self.queue[0]
            else:
                # The head missed its offer. The waiter behind it watched it, and has another predecessor now.
                self.queue = [waiter for waiter in self.queue[1:] if waiter.owner != claim.owner]
                notify = self.queue[:1]
        self.holder = claim
        self.until = now + claim.ttl
        self.token = max(self.token + 1, token_min)
        return notify

    def _free(self, now: float) -> Sequence[C]:
        """Free the lock, or offer it to the head of the queue; return the waiters to notify."""
        self.holder = None
        if not self.queue:
            self.until = 0.0
            return ()
        self.until = now + offer_seconds(self.queue[0])
        # The second too: if the first is stopped, the second must look when the offer ends, not when the ttl of the
        # former holder would have ended. Nobody else, so that 100 waiters do not wake at once.
        return self.queue[:2]

    def held(self, now: float, dead: Callable[[C], bool] = _never) -> bool:
        """Tell whether the lock is held."""
        return self.holder is not None and now < self.until and not dead(self.holder)

    def holders(self, now: float, dead: Callable[[C], bool] = _never) -> Sequence[Holder]:
        """Describe the holder, if there is one."""
        holder = self.holder
        if holder is None or not self.held(now, dead):
            return []
        waiters = sum(not dead(waiter) for waiter in self.queue)
        return [Holder(holder.owner, self.token, self.until - now, decode_metadata(holder.metadata), waiters)]

    def renew(self, owner: str, ttl: Seconds, now: float) -> Renewal:
        """Restart the ttl if `owner` still holds the lock; otherwise say why not."""
        if self.holder is not None and self.holder.owner == owner and now < self.until:
            self.until = now + ttl
            return Renewed()
        if self.broken == owner:
            return Gone("broken")
        if self.holder is None:
            return Gone("gone")
        return Gone("expired" if self.holder.owner == owner else "taken")

    def release(self, owner: str, now: float) -> tuple[bool, Sequence[C]]:
        """Free the lock if `owner` holds it; return whether its lease had not ended, and the waiters to notify."""
        if self.holder is None or self.holder.owner != owner:
            return False, ()
        in_time = now < self.until
        return in_time, self._free(now)

    def abandon(self, owner: str, now: float) -> Sequence[C]:
        """Remove every trace of `owner`; return the waiters to notify."""
        if self.holder is not None and self.holder.owner == owner:
            return self._free(now)
        for index, waiter in enumerate(self.queue):
            if waiter.owner == owner:
                del self.queue[index]
                if index == 0 and self.holder is None:
                    return self._free(now)
                return self.queue[index : index + 1]
        return ()

    def break_lock(self, now: float, dead: Callable[[C], bool] = _never) -> tuple[bool, Sequence[C]]:
        """Free the lock by force; return whether it was held, and the waiters to notify."""
        if self.holder is None:
            return False, ()
        held = self.held(now, dead)
        if held:
            self.broken = self.holder.owner
        return held, self._free(now)

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
        if index > 1 or (index == 1 and self.holder is None):
            return self.queue[index - 1]
        return self.holder

    @property
    def idle(self) -> bool:
        """The lock has no holder, no waiter and no broken lease: only the token is worth keeping."""
        return self.holder is None and not self.queue and not self.broken
