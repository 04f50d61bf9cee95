"""What the engine knows about one lease, and the part of the public `Lease` that needs no I/O."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from lockkit.backend import decode_metadata
from lockkit.errors import LockError

if TYPE_CHECKING:
    from lockkit.backend import Grant, LossReason
    from lockkit.engine.engine import Engine
    from lockkit.runtime import Event

__all__ = ["BaseLease", "Entered", "Hold", "drift"]

LostCallback = Callable[[Any, str], object]
"""Called as ``callback(lease, reason)``."""


LATE_SECONDS = 120.0
"""How long a request that was not answered may still reach the server, seconds: a kernel goes on sending for a
connection that was closed, on Linux about 100 s (tcp_orphan_retries, tcp(7)). Longer keeps a lease that was extended
for a moment short for longer; shorter, and a late one could cut the time that its holder believes in."""


def drift(ttl: float) -> float:
    """
    Allowance for client and server clocks running at different rates, seconds: ``ttl * 0.01 + 0.002``.

    Larger gives up leases earlier than needed; smaller trusts the two clocks more than the Redlock description does,
    from which the figures are (1 % of the ttl, and 2 ms for the granularity of the server's expiry).
    """
    return ttl * 0.01 + 0.002


class Hold:
    """
    The engine's record of one grant.

    The keeper holds it strongly, the user's `Lease` only points to it: so a lease that was dropped without release can
    be noticed.

    Every change of `finished`, `lost_reason`, `count` and the deadlines is made under the engine's mutex.
    Times are the client's monotonic clock.
    """

    __slots__ = (
        "acquired_by",
        "body",
        "callbacks",
        "count",
        "engine",
        "finished",
        "grant",
        "in_flight",
        "in_jeopardy",
        "lease_ref",
        "lost_event",
        "lost_reason",
        "metadata",
        "raise_on_lost",
        "reentry_key",
        "release_done",
        "releasing",
        "renew_at",
        "renew_until",
        "settled",
        "unanswered_ttl",
        "unanswered_until",
        "unconfirmed",
        "valid_until",
    )

    def __init__(self, engine: Engine[Any], grant: Grant, metadata: str, *, raise_on_lost: bool) -> None:
        """Start as held once, without renewal and without deadline: the engine sets those."""
        self.engine = engine
        self.grant = grant
        self.metadata = metadata
        self.raise_on_lost = raise_on_lost
        self.valid_until = 0.0
        self.renew_at = inf
        self.renew_until = inf
        self.count = 1
        self.body = False  # a `with` block runs under it
        self.finished = False  # released by the user, or dropped
        self.unconfirmed = False  # released by the user, but the backend has not answered
        self.lost_reason: LossReason | None = None
        self.in_flight = False  # a renewal has been sent and not been answered
        self.unanswered_ttl = inf  # the shortest ttl of a renewal that was not answered, and may be run late
        self.unanswered_until = 0.0  # until when it may
        self.in_jeopardy = False  # the last renewal failed
        self.settled: Event | None = None  # set when the renewal in flight has been answered
        self.lost_event: Event | None = None  # made when somebody waits for the loss
        self.callbacks: list[LostCallback] | None = None
        self.acquired_by: object = None  # the thread or task; kept, so that its id is not used again
        self.reentry_key: tuple[int, str] | None = None
        self.releasing = False  # a release has been sent and not been answered
        self.release_done: Event | None = None  # made by who waits for that answer
        self.lease_ref: weakref.ref[BaseLease] | None = None

    def believe(self, anchor: float, ttl: float) -> None:
        """Set the deadline from the time before the granting request was sent, and the time of the next renewal."""
        # A renewal whose answer never came may still be under way (in the buffer of a connection that was given up) and
        # be run after this one: then the server counts its ttl from then on.
        if anchor >= self.unanswered_until:
            self.unanswered_ttl = inf
        ttl = min(ttl, self.unanswered_ttl)
        self.valid_until = anchor + ttl - drift(ttl)
        # A third: two renewals may fail before the deadline comes near.
        if self.renew_at != inf:
            self.renew_in_time(anchor + ttl / 3)

    def renew_in_time(self, at: float) -> None:
        """Plan the next renewal, unless the lease will have been held for `max_hold` by then."""
        self.renew_at = at if at <= self.renew_until else inf

    def doubt(self, ttl: float, sent: float) -> None:
        """Remember that a renewal for `ttl`, sent at `sent`, was not answered."""
        self.unanswered_ttl = min(self.unanswered_ttl, ttl)
        self.unanswered_until = sent + LATE_SECONDS


class BaseLease:
    """One grant of a lock: the properties and methods that look at local state only and never block."""

    __slots__ = ("__weakref__", "_hold")

    def __init__(self, hold: Hold) -> None:
        """Made by the engine only."""
        self._hold = hold
        hold.lease_ref = weakref.ref(self)

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self._hold.grant.name

    @property
    def owner(self) -> str:
        """Random id of this acquisition, 32 hexadecimal digits."""
        return self._hold.grant.owner

    @property
    def token(self) -> int:
        """Fencing token: above 0, higher than that of every earlier grant of this lock."""
        return self._hold.grant.token

    @property
    def ttl(self) -> float:
        """Seconds for which the backend keeps the lock without renewal, as granted or last extended."""
        return self._hold.grant.ttl

    @property
    def metadata(self) -> Mapping[str, Any]:
        """
        What is stored beside the lock for ``holders``: ``host``, ``pid``, ``started`` and the application's own.

        Read-only: give what is to be stored to ``Client.lock(metadata=…)``.
        """
        return MappingProxyType(dict(decode_metadata(self._hold.metadata)))

    @property
    def held(self) -> bool:
        """
        Not released and the deadline has not passed. Local: asks the clock, not the backend.

        True is no proof that the next statement runs in time (the process may be paused right after): guard storage
        with `token`.
        """
        return self._hold.engine.is_held(self._hold)

    @property
    def lost(self) -> bool:
        """The lease ended without being released: the deadline passed, or the backend said so."""
        return self._hold.engine.is_lost(self._hold)

    def remaining(self) -> float:
        """Seconds until the deadline unless it is renewed; 0.0 when not held. Local."""
        return self._hold.engine.remaining(self._hold)

    def check(self) -> None:
        """
        Raise unless held. Local: call it often, it costs less than a microsecond.

        Raises:
            LockLost: The deadline passed, the backend said that the lock is not ours, or the lease was released.
        """
        self._hold.engine.check(self._hold)

    def on_lost(self, callback: LostCallback) -> None:
        """
        Have ``callback(lease, reason)`` called once if the lease is lost; at once if it is lost already.

        Args:
            callback: Called in a thread of its own (in a task under asyncio, where it may be a coroutine function).
                ``reason`` is one of ``lockkit.backend.LossReason``. Its exceptions are logged and go no further.
        """
        self._hold.engine.on_lost(self._hold, callback)

    def __bool__(self) -> bool:
        """Return True: a lease is never a way to say "no"."""
        return True

    def __repr__(self) -> str:
        """Show name, token and state."""
        hold = self._hold
        if hold.finished:
            state = "released"
        elif hold.lost_reason is not None:
            state = f"lost: {hold.lost_reason}"
        else:
            state = f"{self.remaining():.3f} s left"
        return f"<{type(self).__module__}.Lease {self.name!r} token={self.token} {state}>"

    def __reduce__(self) -> NoReturn:
        """
        Refuse to be pickled: another process would not renew it, nor learn of its loss.

        Raises:
            TypeError: Always.
        """
        message = "a lockkit Lease cannot be pickled or copied: pass lease.token to the other process instead"
        raise TypeError(message)

    def __del__(self) -> None:
        """Stop renewing a lease that was dropped without release; the lock goes at its ttl. No I/O."""
        hold: Hold | None = getattr(self, "_hold", None)
        if hold is None or hold.finished:
            return
        if hold.engine.dropped(hold):
            warnings.warn(
                f"lease of lock {hold.grant.name!r} (token {hold.grant.token}) was dropped without release; "
                f"the backend frees it within {hold.grant.ttl:g} s. Use `with`, or call release().",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )


B = TypeVar("B")


class Entered(Generic[B]):
    """
    Which lease belongs to which ``with`` of one lock object.

    One lock object may be entered by many threads or tasks at once, and again by the same one when reentrant, so each
    keeps its own stack. The key is the thread or task itself.
    """

    __slots__ = ("_stacks",)

    def __init__(self) -> None:
        """Start with nobody inside."""
        self._stacks: dict[object, list[B]] = {}

    def push(self, who: object, lease: B) -> None:
        """Remember the lease of the block that `who` entered."""
        self._stacks.setdefault(who, []).append(lease)

    def pop(self, who: object) -> B:
        """
        Give the lease of the block that `who` leaves.

        A block may be left by another thread or task than entered it (an exit stack closed elsewhere): that is clear as
        long as only one is inside.

        Raises:
            LockError: Several are inside, and none of them is `who`.
        """
        if who not in self._stacks:
            if len(self._stacks) != 1:
                message = (
                    "this `with` block was entered by another thread or task, and the lock object is in use by "
                    "several: hold the lease of lock.acquire() and release that"
                )
                raise LockError(message)
            (who,) = self._stacks
        stack = self._stacks[who]
        lease = stack.pop()
        if not stack:
            del self._stacks[who]
        return lease
