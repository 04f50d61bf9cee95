"""
The engine's record of one lease: its state, its deadline and the plan of its renewals.

The states, and what changes them::

    HELD ──> RELEASING ──> RELEASED        the backend has answered
      │        │    ^  └──> LOST           the backend says that another owner holds the lock, or nobody
      │        v    │
      │     UNCONFIRMED                    no answer; `release` may be called again
      ├──> RELEASED                        the lease was dropped, or the client closed without a body under it
      └──> LOST                            the deadline passed, or the backend said so
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, Final

from lockkit.backend import Grant, LossReason, Mode, Renewed
from lockkit.engine.client_state import ClientState
from lockkit.engine.settings import LockSettings, LostCallback, drift_margin
from lockkit.errors import LockError, LockLost
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds

if TYPE_CHECKING:
    import weakref


LATE_SECONDS = 120.0
"""How long a request that was not answered may still reach the server, seconds: a kernel goes on sending for a
connection that was closed, on Linux about 100 s (tcp_orphan_retries, tcp(7)). Longer keeps a lease that was extended
for a moment short for longer; shorter, and a late one could cut the time that its holder believes in."""

LOSS_REASONS: dict[LossReason, str] = {
    "expired": "its deadline passed without a renewal",
    "paused": "its deadline passed: this process did not run (it was stopped or suspended, or its event loop blocked)",
    "stalled": "its deadline passed: its holder made no progress, and so was not renewed (stall=)",
    "taken": "the backend says that another owner holds it",
    "gone": "the backend says that it is not held any more",
    "session": "the client, session or process that it belonged to has ended",
    "broken": "it was freed by force (break_lock)",
}
"""What a loss reason means, for messages."""

PAUSED_SHARE = 1 / 4
"""A lease whose deadline passes counts as ``paused`` if the watch is late by this share of its ttl: renewals begin at a
third of it and leave twice that, so a process that misses them was away for longer. Less blames a busy machine for a
dead server; more, a dead server for a process that stood still."""


class LeaseState(Enum):
    """What has become of a lease."""

    HELD = "held"
    RELEASING = "releasing"
    """Its holder has released it, and the backend has not answered yet."""
    UNCONFIRMED = "unconfirmed"
    """Its holder has released it, and the backend did not answer: releasing again sends it again."""
    RELEASED = "released"
    LOST = "lost"


# As names of the module: reading a member of an enumeration takes 50 ns on Python 3.11.
HELD: Final = LeaseState.HELD
RELEASING: Final = LeaseState.RELEASING
UNCONFIRMED: Final = LeaseState.UNCONFIRMED
RELEASED: Final = LeaseState.RELEASED
LOST: Final = LeaseState.LOST


@dataclass(slots=True, eq=False)
class RenewalPlan:
    """
    When a lease is renewed, and what is known of the renewals that were sent.

    Changed under the client's mutex. Times are the client's monotonic clock.
    """

    next_at: Instant  # when to renew next; ``inf`` for never
    until: Instant  # no renewal is sent after this time (``max_hold``)
    grace: Seconds  # how long before the deadline the holder stops
    stall: Seconds = inf  # how long the holder may go without a beat
    stall_at: Instant = inf  # when it will have gone so long
    stalled: bool = False  # it has, and no renewal is sent until the next beat
    in_flight: bool = False  # a renewal is about to be sent, or has been sent and not been answered
    in_jeopardy: bool = False  # the last renewal failed
    unanswered_ttl: Seconds = inf  # the shortest one of a renewal that was not answered: the server may still run it
    unanswered_ttl_max: Seconds = 0.0  # the longest one: so long the server may keep the lock
    unanswered_until: Instant = 0.0  # until when it may
    answered: Event | None = None  # set when the renewal in flight has been answered; made by a call that waits for it

    def schedule(self, at: Instant) -> None:
        """Plan the next renewal, unless there is to be none."""
        self.next_at = at if at <= self.until and not self.stalled else inf

    def beat(self, now: Instant) -> bool:
        """Note that the holder makes progress; returns whether a renewal has waited for that, and is due."""
        self.stall_at = now + self.stall
        waited, self.stalled = self.stalled, False
        if waited:
            self.next_at = 0.0
        return waited

    def note_unanswered(self, ttl: Seconds, sent: Instant) -> None:
        """Remember that a renewal for `ttl`, sent at `sent`, was not answered."""
        self.unanswered_ttl = min(self.unanswered_ttl, ttl)
        self.unanswered_ttl_max = max(self.unanswered_ttl_max, ttl)
        self.unanswered_until = max(self.unanswered_until, sent + LATE_SECONDS)

    def finish(self) -> None:
        """Note that no renewal is in flight any more."""
        assert self.in_flight, "each renewal ends once"
        self.in_flight = False
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Wake the calls that wait for the renewal in flight: it has ended, or will not be sent."""
        if self.answered is not None:
            self.answered.set()

    @property
    def may_have_renewed(self) -> bool:
        """Whether the server may have renewed the lease without lockkit having received the answer."""
        return self.next_at != inf or self.in_flight or self.unanswered_ttl != inf


@dataclass(slots=True, init=False, eq=False, repr=False)
class LeaseRecord:
    """
    What the engine knows about one grant.

    The client's `Leases` refer to it strongly, the user's `Lease` only points to it: so lockkit notices a lease that
    was dropped without release.

    `state`, `lost_reason`, `count` and the deadline are changed under the client's mutex, except when the lease has
    been dropped. Times are the client's monotonic clock.
    """

    client: ClientState
    grant: Grant  # the backend's answer
    settings: LockSettings  # what was asked for; metadata and mode may have changed since
    metadata: str  # as stored beside the lock
    mode: Mode  # beside whom it is held
    renewal: RenewalPlan
    state: LeaseState
    lost_reason: LossReason | None
    valid_until: Instant  # the deadline
    stood_still: Seconds  # for how long this process had not run when it was lost, if that is why
    since: Instant  # before the request was sent that was granted
    count: int  # how often it has been acquired, by re-entry
    part_of: str  # of what the lease is a part that needs it: a set of locks, a term; empty for none
    handed_over: bool  # its holder has ended it with a ticket, by which another client may take the lock
    blocks: int  # how many ``with`` blocks run under it
    callbacks: list[LostCallback] | None  # to be called when it is lost
    end_events: tuple[Event, ...]  # set when it ends; the first is made by a call that waits for the loss
    release_done: Event | None  # set when the backend has answered the release; made by a thread that waits for that
    acquired_by: object  # the thread or task, from `Runtime.current`
    reentry_key: tuple[object, str] | None  # by which that enters it again; None if it is not reentrant
    lease_ref: weakref.ref[Any] | None  # the user's lease
    look_at: Instant | None  # when the renewer's watch looks at it again; None before the watch has seen it
    _lose: Callable[[LeaseRecord, LossReason], None]

    def __init__(
        self,
        client: ClientState,
        grant: Grant,
        settings: LockSettings,
        since: Instant,
        lose: Callable[[LeaseRecord, LossReason], None],
    ) -> None:
        """Start as held once, by the thread or task that calls this; `lose` is called when its deadline has passed."""
        self.client = client
        self.grant = grant
        self.metadata = settings.metadata
        self.mode = settings.mode
        self.settings = settings
        until = inf if settings.max_hold is None else since + settings.max_hold
        # `set_deadline` says when the first renewal is due.
        self.renewal = RenewalPlan(0.0 if settings.renew else inf, until, settings.grace)
        self.state = HELD
        self.lost_reason = None
        self.stood_still = 0.0
        self.since = since
        self.count = 1
        self.part_of = ""
        self.handed_over = False
        self.blocks = 0
        self.callbacks = None if settings.on_lost is None else [settings.on_lost]
        self.end_events = ()
        self.release_done = None
        self.acquired_by = client.runtime.current()
        self.reentry_key = self.lease_ref = self.look_at = None
        self._lose = lose
        if settings.stall is not None:
            self.start_beats(settings.stall)
        self.set_deadline(since if grant.anchor is None else grant.anchor, grant.ttl)

    # -- local, for the holder -------------------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        """
        Whether it was lost; a passed deadline is loss whatever the backend would say (rule 7).

        After SIGSTOP or a VM migration the watch may not have run yet, so this asks the clock.
        """
        if self.state is HELD and self.client.runtime.now() >= self.valid_until:
            self._lose(self, "expired")
        return self.state is LOST

    @property
    def held(self) -> bool:
        """Whether the holder may believe that it holds the lock."""
        return not self.lost and self.state is HELD

    @property
    def released(self) -> bool:
        """Whether its holder has released or dropped it, or the client has; the backend may not have answered yet."""
        state = self.state
        return state is not HELD and state is not LOST

    def leave(self, block: bool) -> bool:  # noqa: FBT001 - faster than by its name
        """
        Count one acquisition less. Under the client's mutex; gives whether the lease is to be ended with it.

        A block within another may release early, as `block` is not set then. Its end gives that acquisition back: were
        both to count, the outer block would go on without the lock.
        """
        if self.state is HELD and self.count > 1:
            if block:
                self.blocks = max(0, self.blocks - 1)
            if block or self.count > self.blocks:
                self.count -= 1
            return False
        return self.state is not RELEASED

    def remaining(self) -> float:
        """Return the seconds to the deadline, 0.0 when not held."""
        return max(0.0, self.valid_until - self.client.runtime.now()) if self.held else 0.0

    def check(self) -> None:
        """Raise unless held."""
        # As `held`, without its two calls: bodies check often.
        if self.state is HELD and self.client.runtime.now() < self.valid_until:
            return
        if self.lost:
            raise self.lost_error()
        if self.state is not HELD:
            raise self._released_error()

    def find_pause(self) -> bool:
        """Note whether the deadline passed because this process did not run. Under the client's mutex."""
        client, plan = self.client, self.renewal
        late = client.runtime.now() - client.watch_at
        # Without renewals the deadline passes whether the process runs or not.
        renews = plan.next_at != inf or plan.in_flight
        if renews and client.watch_at <= self.valid_until and late >= self.grant.ttl * PAUSED_SHARE:
            self.stood_still = late
        return self.stood_still > 0.0

    @property
    def min_hold_left(self) -> Seconds:
        """How long the backend is to keep the lock after a release now, seconds."""
        min_hold = self.settings.min_hold
        return max(0.0, self.since + min_hold - self.client.runtime.now()) if min_hold else 0.0

    # -- progress --------------------------------------------------------------------------------------------------

    def start_beats(self, stall: Seconds) -> None:
        """Expect a beat every so many seconds from now on."""
        self.renewal.stall = stall
        self.renewal.beat(self.client.runtime.now())

    @property
    def stalled(self) -> bool:
        """Whether its holder has made no progress for too long. As `lost`, this asks the clock."""
        plan = self.renewal
        return plan.stalled or (self.state is HELD and self.client.runtime.now() >= plan.stall_at)

    @property
    def loss_text(self) -> str:
        """Why it was lost, for messages."""
        assert self.lost_reason is not None, "a lost lease has a reason"
        text = LOSS_REASONS[self.lost_reason]
        return text.replace("run (", f"run for {self.stood_still:.1f} s (", 1) if self.stood_still else text

    def lost_error(self) -> LockLost:
        """Return the error for a lease that was lost."""
        grant = self.grant
        message = (
            f"lost lock {grant.name!r} (token {grant.token}) at {self.client.url}: {self.loss_text}. "
            "Somebody else may hold it now: stop, and let storage reject this token."
        )
        return LockLost(message, name=grant.name, backend=self.client.url)

    def _released_error(self) -> LockError:
        name, url = self.grant.name, self.client.url
        if self.handed_over:
            message = f"the lease of lock {name!r} (token {self.grant.token}) at {url} was handed over with a ticket"
            return LockError(message, name=name, backend=url)
        return LockLost(
            f"the lease of lock {name!r} at {url} was released; acquire the lock again", name=name, backend=url
        )

    # -- the deadline ----------------------------------------------------------------------------------------------

    def set_deadline(self, anchor: Instant, ttl: Seconds) -> None:
        """Set the deadline, and plan the next renewal if there is to be one."""
        plan = self.renewal
        believed = ttl
        if plan.unanswered_ttl != inf:
            # A renewal whose answer never came may still be under way (in the buffer of a connection that was given
            # up) and be run after this one: then the server counts its ttl from then on.
            if anchor >= plan.unanswered_until:
                plan.unanswered_ttl, plan.unanswered_ttl_max = inf, 0.0
            believed = min(ttl, plan.unanswered_ttl)
        self.valid_until = anchor + believed - drift_margin(believed)
        assert self.valid_until < anchor + ttl or ttl <= 0.0, "never later than the server's own end of the lease"
        if plan.next_at != inf:
            at = anchor + believed * self.client.renewal_share
            plan.next_at = at if at <= plan.until else inf

    def shorten_deadline(self, anchor: Instant, ttl: Seconds) -> None:
        """Believe in `ttl` from `anchor` on, if that ends earlier. Under the client's mutex."""
        self.valid_until = min(self.valid_until, anchor + ttl - drift_margin(ttl))
        assert self.valid_until < anchor + ttl, "never later than the server's own end of the lease"

    def renewed(self, outcome: Renewed, sent: Instant) -> bool:
        """Move the deadline after the backend has renewed the lease. Under the client's mutex."""
        # It may be dropped at any time, without the mutex.
        assert self.state is not LOST, "lost is final"
        if outcome.ttl is not None:
            self.grant.ttl = outcome.ttl
        self.set_deadline(sent if outcome.anchor is None else outcome.anchor, self.grant.ttl)
        recovered, self.renewal.in_jeopardy = self.renewal.in_jeopardy, False
        return recovered
