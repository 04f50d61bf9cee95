"""
The state of one lock, for the backends that decide themselves instead of asking a server: memory and file.

Pure: no I/O, no clock of its own. All times are of one monotonic clock, seconds.

======== ==================================== =============================================================
state    fields                               who may take it
======== ==================================== =============================================================
held     ``holder``, ``until`` in the future  nobody
expired  ``holder``, ``until`` in the past    as *offered*, from ``until`` on
offered  no ``holder``, somebody in `queue`   the head of the queue; from ``until`` on whoever comes first
free     no ``holder``, nobody in `queue`     whoever comes first
======== ==================================== =============================================================

First come, first served, by hand-off: a lock that is given back is *offered* to the head of the queue, so that a
releaser that comes straight back (it runs, the waiter sleeps) does not overtake it for ever.
The offer is for a limited time, `GRACE_MAX` or half of the waiter's ttl, so that a stopped waiter blocks nobody longer.
Who misses its offer has lost its place, and takes a new one when it looks again.

Dead clients (``dead``, asked only when it matters) are treated as if they had never come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from lockkit.backend import LossReason

__all__ = ["GRACE_MAX", "Claim", "Ledger", "grace"]

GRACE_MAX = 1.0
"""Longest offer to a waiter, seconds. Longer, and a stopped waiter delays the others more; shorter than a busy machine
takes to schedule a woken process, and the order of arrival is lost."""


class Claim(Protocol):
    """Who wants a lock: one acquisition."""

    @property
    def owner(self) -> str:
        """Its random id."""
        ...

    @property
    def ttl(self) -> float:
        """The lease time that it asked for, seconds."""
        ...


C = TypeVar("C", bound=Claim)


def grace(claim: Claim) -> float:
    """How long an offer to this waiter stands, seconds: ``min(ttl / 2, GRACE_MAX)``."""
    return min(claim.ttl / 2, GRACE_MAX)


class Ledger(Generic[C]):
    """
    Holder, queue and token of one lock.

    Attributes:
        holder: Who holds it (until ``until``), or None.
        until: When the lease ends; without a holder, when the offer to the head of the queue ends.
        token: The last token given, 0 if none was.
        queue: The waiters, first come first.
        broken: Owner of the last lease that `break_lock` ended, so that it can be told; empty if none was.
    """

    __slots__ = ("broken", "holder", "queue", "token", "until")

    def __init__(self, token: int = 0) -> None:
        """Make a free lock."""
        self.holder: C | None = None
        self.until = 0.0
        self.token = token
        self.queue: list[C] = []
        self.broken = ""

    def acquire(
        self, claim: C, now: float, floor: int, *, queue: bool, dead: Callable[[C], bool]
    ) -> tuple[bool, Sequence[C]]:
        """
        Take the lock if it is this claim's turn, else (with `queue`) a place in the queue.

        Args:
            claim: Who asks. Asks again under the same owner while it waits.
            now: The time.
            floor: The token is at least this.
            queue: Take a place if the lock is busy.
            dead: Tells whether the client of a claim has ended.

        Returns:
            Whether it was taken, and which waiters must look again.
        """
        wake: Sequence[C] = ()
        if self.holder is not None:
            wake = self._vacate_if_over(now, dead)
        if self.holder is None:
            if self.queue:
                wake = self._next(claim, now, dead) or wake
            if not self.queue or self.queue[0].owner == claim.owner or now >= self.until:
                return True, self._take(claim, now, floor)
        if queue:
            self._stand(claim)
        return False, wake

    def _stand(self, claim: C) -> None:
        """Take a place, or bring the one that it has up to date: its client may have had to take another name."""
        for index, waiter in enumerate(self.queue):
            if waiter.owner == claim.owner:
                self.queue[index] = claim
                return
        self.queue.append(claim)

    def _vacate_if_over(self, now: float, dead: Callable[[C], bool]) -> Sequence[C]:
        assert self.holder is not None
        if now >= self.until:
            # Not from `now`: an offer that nobody noticed for hours has been missed.
            return self._vacate(self.until)
        if dead(self.holder):
            return self._vacate(now)
        return ()

    def _next(self, claim: C, now: float, dead: Callable[[C], bool]) -> Sequence[C]:
        """Go past dead heads of the queue, offering the lock to the first that lives."""
        wake: Sequence[C] = ()
        while self.queue and self.queue[0].owner != claim.owner and now < self.until and dead(self.queue[0]):
            del self.queue[0]
            wake = self._vacate(now)
        return wake

    def _take(self, claim: C, now: float, floor: int) -> Sequence[C]:
        wake: Sequence[C] = ()
        if self.queue:
            if self.queue[0].owner == claim.owner:
                del self.queue[0]
            else:
                # The head has missed its offer. Who stood behind it, watching it, has another predecessor now.
                self.queue = [waiter for waiter in self.queue[1:] if waiter.owner != claim.owner]
                wake = self.queue[:1]
        self.holder = claim
        self.until = now + claim.ttl
        self.token = max(self.token + 1, floor)
        return wake

    def _vacate(self, now: float) -> Sequence[C]:
        """Free the lock, or offer it to the head of the queue; return who must look again."""
        self.holder = None
        if not self.queue:
            self.until = 0.0
            return ()
        self.until = now + grace(self.queue[0])
        # The second too: should the first be stopped, it has to look when the offer is over, and not when the ttl of
        # the former holder is. Nobody else: 100 waiters are no herd.
        return self.queue[:2]

    def held(self, now: float, dead: Callable[[C], bool]) -> bool:
        """Tell whether somebody holds the lock."""
        return self.holder is not None and now < self.until and not dead(self.holder)

    def retry_after(self, now: float) -> float:
        """Seconds after which a refused claim may look again even if nobody wakes it."""
        return max(0.0, self.until - now)

    def renew(self, owner: str, ttl: float, now: float) -> LossReason | None:
        """Start the ttl anew if `owner` still holds the lock; otherwise return why not."""
        if self.holder is None or self.holder.owner != owner or now >= self.until:
            return self._lost(owner)
        self.until = now + ttl
        return None

    def _lost(self, owner: str) -> LossReason:
        if self.broken == owner:
            return "broken"
        if self.holder is None:
            return "gone"
        return "expired" if self.holder.owner == owner else "taken"

    def release(self, owner: str, now: float) -> tuple[bool, Sequence[C]]:
        """Free the lock if `owner` holds it; return whether its lease had not run out, and who must look again."""
        if self.holder is None or self.holder.owner != owner:
            return False, ()
        in_time = now < self.until
        return in_time, self._vacate(now)

    def abandon(self, owner: str, now: float) -> Sequence[C]:
        """Remove every trace of `owner`; return who must look again."""
        if self.holder is not None and self.holder.owner == owner:
            return self._vacate(now)
        for index, waiter in enumerate(self.queue):
            if waiter.owner == owner:
                del self.queue[index]
                if index == 0 and self.holder is None:
                    return self._vacate(now)
                return self.queue[index : index + 1]
        return ()

    def break_lock(self, now: float, dead: Callable[[C], bool]) -> tuple[bool, Sequence[C]]:
        """Free the lock whoever holds it; return whether somebody did, and who must look again."""
        if self.holder is None:
            return False, ()
        held = self.held(now, dead)
        if held:
            self.broken = self.holder.owner
        return held, self._vacate(now)

    def predecessor(self, owner: str, dead: Callable[[C], bool]) -> C | None:
        """
        The claim just before `owner` in the queue, or the holder: whose end it should watch for.

        Dead waiters in between are removed; the result may still be a dead holder.
        """
        index = next((i for i, waiter in enumerate(self.queue) if waiter.owner == owner), 0)
        while index > 0 and dead(self.queue[index - 1]):
            index -= 1
            del self.queue[index]
        return self.queue[index - 1] if index > 0 else self.holder

    @property
    def idle(self) -> bool:
        """Nobody holds it, nobody waits, nobody has to be told anything: only the token is worth keeping."""
        return self.holder is None and not self.queue and not self.broken
