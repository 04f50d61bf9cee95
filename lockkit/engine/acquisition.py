"""
One acquisition: in the client's queue, at the backend, waiting, through outages, to the lease or to the error.

::

    LocalQueues.enter ── head? ──> try_acquire ──> Grant ──> lease
                                      │  ^
                                      │  └── woken, or the holder's ttl has run out
                                      ├──> Busy ──> wait ──┘
                                      └──> no answer ──> abandon by owner ──> back off ──> a new request, a new owner

Whatever ends it early (timeout, Ctrl-C, cancellation, an outage) leaves nothing behind: the request is abandoned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Generic, TypeVar
from weakref import WeakValueDictionary

from lockkit.backend import CALL_SECONDS, Busy, Grant, Holder, LockBackend, Request, split_space
from lockkit.engine import lock_order, observation
from lockkit.engine.cleanup import PendingCleanups
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.engine.local_queue import LocalQueues, Ticket
from lockkit.engine.lookup import HolderLookups, holder_of
from lockkit.engine.settings import LockSettings
from lockkit.errors import BackendUnavailable, LockError, LockTimeout
from lockkit.runtime import Event
from lockkit.units import Instant, Seconds
from lockkit.validation import plain

log = logging.getLogger("lockkit")

L = TypeVar("L")

UNDO_SECONDS = 5.0
"""How long a cancelled or failed acquisition waits until it is undone, seconds; then that goes on in the background."""

UNDO_SECONDS_MIN = 0.05
"""How long the cleanup of an acquisition may take at least, also when the time of the call is used up, seconds. Longer
makes the caller wait for a server that hangs; shorter leaves more to the background though the server would have
answered at once."""

ANSWER_GRACE = 0.4
"""How long after the end of a timed wait the last answer may still come, seconds: all the time that a call with
``timeout=0`` has. With a longer one, a server that hangs delays the caller more; with a shorter one, a server that is
only slow or far away counts as unavailable."""

OUTAGE_PAUSE_MAX = 1.0
"""Longest pause between tries while the backend is away, seconds. Longer notices its return later."""

GIVEN_UP_SECONDS = 0.25
"""How often a call that waits behind another one of this client asks whether it is given up, seconds. Longer ends it
later; shorter costs wake-ups. At the backend it is woken."""

HOLDER_CHARS_MAX = 200
"""How many characters of a holder's metadata, and of its owner id, go into a warning or an error."""


@dataclass(eq=False)
class AcquisitionContext(Generic[L]):
    """What the acquisitions of one client share."""

    client: ClientState
    leases: Leases  # what the client holds already, for messages
    cleanups: PendingCleanups  # undoes in the background what could not be undone at once
    admit: Callable[[LockSettings, Grant, Instant], L | None]  # makes the lease; None if it has ended already
    unavailable_after: Seconds  # without one answer; then a wait without timeout gives up
    waiting: set[Request] = field(default_factory=set)  # the requests that wait at the backend
    answered_at: Instant = -inf  # before the last request that was answered
    last_error: BackendUnavailable | None = None  # of the last request, if it was not answered

    def __post_init__(self) -> None:
        """Start without acquisitions."""
        self.lookups = HolderLookups(self.client)
        self.queues = LocalQueues(self.client.runtime)  # those who wait behind another call of this client
        # By the text of an error: the outage of the calls that failed with it and retry.
        self.outages: WeakValueDictionary[str, Outage] = WeakValueDictionary()
        self.order = lock_order.of_client(self.leases)

    def forked(self) -> None:
        """Forget the parent's waiters."""
        self.lookups.forked()
        self.queues.forked()
        self.waiting = set()
        self.last_error = None
        self.outages = WeakValueDictionary()

    def outage(self, error: BackendUnavailable) -> Outage:
        """Return the outage of the calls that failed with this error."""
        # Servers are told apart by their errors, which name them: where one of several is down, locks at the others
        # do not wait for it. No name of a lock begins like that of this queue.
        queue = f"\0\0{error}"
        return self.outages.setdefault(queue, Outage(queue, self.client.runtime.event()))

    def wake(self, name: str) -> None:
        """Wake what waits for a lock at the backend, from any thread, so that it asks whether it is given up."""
        for request in list(self.waiting):
            if request.name == name:
                request.wake.set()

    def waiting_count(self, name: str) -> int:
        """How many calls of this client wait for a lock: at the backend (at most one), or behind that one."""
        return sum(request.name == name for request in list(self.waiting)) + self.queues.behind(name)


@dataclass(eq=False)
class Outage:
    """
    The calls of one client that failed for the same reason, of which one at a time pauses and retries.

    So a hundred waiting calls connect to a dead port as often as one. Each failed try passes the turn on: an error that
    concerns the lock of one call does not keep the others from trying theirs.
    """

    queue: str  # its name among the `LocalQueues`: the head is the call that pauses
    over: Event  # set when one of these calls has been answered: nobody pauses any more
    tries: int = 0  # how many have failed so far, besides the first one of each call


class Acquisition(Generic[L]):
    """The state of one call of ``acquire``. Times are the client's monotonic clock."""

    _too_late_error: ClassVar[type[LockError]] = LockTimeout  # when the answer took longer than the ttl
    _late_until: Instant = inf  # when a wait without timeout gives up, because each grant comes after its ttl

    def __init__(
        self, context: AcquisitionContext[L], backend: LockBackend, settings: LockSettings, timeout: Seconds | None
    ) -> None:
        """Start the clock."""
        self._context = context
        self._client = context.client
        self._runtime = context.client.runtime
        self._backend = backend
        self._settings = settings
        self._began = self._runtime.now()
        self._deadline = None if timeout is None else self._began + timeout
        self._answer_by = inf if self._deadline is None else self._deadline + ANSWER_GRACE
        self._warn_at = self._began + settings.ttl
        self._attempts = 0
        self._failures = 0  # since the last answer
        self._waiting = False
        self._stayed_busy = False
        self._busy: Busy | None = None
        self._outage: Outage | None = None
        self._request = self._new_request()

    async def run(self, name_holder: bool) -> L:  # noqa: FBT001 - every acquisition comes here
        """Acquire; with `name_holder`, the error of a wait that timed out says who holds the lock."""
        queues, name, ticket = self._context.queues, self._settings.name, Ticket()
        mode = self._settings.mode
        if mode != "exclusive" and (mode == "shared" or not self._request.queue):
            # A queue of its own. Readers of one client do not wait for one another, and a single try for a permit asks
            # the backend: another call of this client may be about to get one, and there may be more.
            name = f"{name}\0{self._request.owner}"
        try:
            started = self._began
            if not queues.enter(name, ticket, self._request.queue):
                if not self._request.queue or not await self._wait_in_queue(ticket):
                    self._check_open()
                    raise self._timed_out(None)
                started = self._runtime.now()
            # From here on this is the only contender of this client for that name.
            while (lease := await self._ask(started)) is None:
                started = self._runtime.now()
        except LockTimeout as error:
            queues.leave(name, ticket)  # before the question: others wait behind this call
            if name_holder:
                await self._name_holder(error)
            raise
        else:
            return lease
        finally:
            queues.leave(name, ticket)

    async def _wait_in_queue(self, ticket: Ticket) -> bool:
        """Wait behind other calls of this client; returns whether this call is at the head now."""
        assert self._request.queue, "a single try does not wait"
        if self._settings.on_wait is not None:
            self._settings.on_wait()
        self._warn_loop()
        self._record_order()
        until = inf if self._deadline is None else self._deadline
        return await self._wait_for_turn(self._settings.name, ticket, until, self._warn_at)

    async def _wait_for_turn(self, queue: str, ticket: Ticket, until: Instant, warn_at: Instant) -> bool:
        """Wait to become the head of a queue, unless the call is given up; returns whether this call is it."""
        queues = self._context.queues
        if self._settings.given_up is None:
            return await queues.wait_for_turn(queue, ticket, until, warn_at, self._warn_in_queue)
        while (now := self._runtime.now()) < until:
            self._check_open()
            look_at = min(now + GIVEN_UP_SECONDS, until)
            if await queues.wait_for_turn(queue, ticket, look_at, warn_at, self._warn_in_queue):
                return True
        return False

    async def _ask(self, started: Instant) -> L | None:
        """Ask the backend once, and wait if it is worth asking again. None: ask again."""
        request = self._request
        assert not request.uncertain, "a request that was not answered is not sent again"
        # Every acquisition comes here, and min() takes three times as long.
        answer_by = started + CALL_SECONDS
        request.answer_by = answer_by if answer_by < self._answer_by else self._answer_by  # noqa: FURB136
        self._attempts += 1
        try:
            # Until the answer is here: what is interrupted or cancelled from here on must be undone.
            request.uncertain = True
            outcome = await self._backend.try_acquire(request)
            self._context.answered_at = started
            if self._outage is not None or self._context.last_error is not None:
                self._answered()
            if isinstance(outcome, Grant):
                lease = self._context.admit(self._settings, outcome, started)
                if lease is None:
                    await self._give_back()
                return lease
            request.uncertain = False
            self._late_until = inf
            await self._wait(outcome)
        except BackendUnavailable as error:
            if not error.sent:
                request.uncertain = False  # it cannot have been granted
            await self._undo()
            await self._back_off(error)
            self._request = self._new_request()
            assert self._request.owner != request.owner, "the lease of a lost answer is never handed out"
        except BaseException:
            await self._undo()
            raise
        return None

    async def _give_back(self) -> None:
        """Release a lease that had ended when its grant arrived: the answer took longer than it is worth."""
        await self._undo()
        now = self._runtime.now()
        if self._out_of_time or (self._endless and now >= self._late_until):
            raise self._too_late()
        self._late_until = min(self._late_until, now + self._context.unavailable_after)
        self._request = self._new_request()

    def _new_request(self) -> Request:
        # A fresh owner for each. Never a host, process or thread id: two workers of one host would own each other's
        # lock; never that of a request whose answer was lost: its lease must not be handed out later.
        settings, runtime = self._settings, self._runtime
        queue = self._deadline != self._began
        return Request(
            settings.name, runtime.owner(), settings.ttl, settings.metadata,
            queue, runtime, settings.mode, settings.limit, settings.nests,
        )  # fmt: skip

    async def _wait(self, busy: Busy) -> None:
        """Sleep until it is worth asking again, or raise `LockTimeout` if that is too late."""
        context, request = self._context, self._request
        if self._out_of_time:
            raise self._timed_out(busy)
        if not self._waiting:
            self._waiting = True
            if self._settings.on_wait is not None:
                self._settings.on_wait()
            self._record_order()
            await self._before_waiting(busy)
        assert request.queue, "a single try does not wait"
        now = self._runtime.now()
        if now >= self._warn_at:
            self._warn_at = inf
            self._warn_at_backend(now - self._began)
        # Look again a little after the holder's ttl: the server must have seen it run out. At random times, so that the
        # waiters of many clients do not all ask at once.
        look = self._settings.ttl if busy.retry_after is None else busy.retry_after + self._jitter(0.001, 0.01)
        until = min(now + look, self._warn_at, inf if self._deadline is None else self._deadline)
        request.answer_by = min(until + CALL_SECONDS, self._answer_by)
        context.waiting.add(request)
        try:
            self._check_open()  # after the add: close() wakes what is in `waiting`
            if busy.poll or self._client.capabilities.wakeup == "poll":
                pause = min(self._pause(self._backend.poll_seconds, self._attempts), until - now)
                await request.wake.wait(max(0.0, pause))
            else:
                await self._backend.wait(request, busy, until)
            # All calls of a name are woken when one of them is given up: left set, it would end each further wait.
            request.wake.clear()
        finally:
            context.waiting.discard(request)
        self._check_open()

    async def _undo(self) -> None:
        """
        Leave nothing of the request at the backend.

        If it was granted and the answer was lost, it would block everybody, this client too, for its ttl.
        If the backend cannot be reached now, the client retries in the background.
        """
        request = self._request
        if request.state is None and not request.uncertain:
            return
        now, close_by = self._runtime.now(), self._client.close_by
        request.answer_by = min(now + UNDO_SECONDS, max(min(self._answer_by, close_by), now + UNDO_SECONDS_MIN))
        idle = self._runtime.event()
        idle.set()
        try:
            await self._runtime.settle(self._abandon(request, idle), request.answer_by - now)
        except BaseException as error:
            log.debug("cleaning up a request for lock %r: %s", request.name, error)
            # A place in the queue is kept for a ttl beyond the lease of the holder, which mostly has a like ttl.
            seconds = request.ttl * (2.2 if request.queue else 1.1)
            self._context.cleanups.add(seconds, lambda: self._abandon_again(request, idle))
            if not isinstance(error, Exception):
                raise
        else:
            assert not request.uncertain, "what was withdrawn is not granted any more"

    async def _abandon(self, request: Request, idle: Event) -> None:
        """Undo a request; `idle` is not set meanwhile."""
        try:
            idle.clear()
            await self._backend.abandon(request)
            if request.uncertain:
                request.uncertain = False
                observation.undone(self._client, self._settings, request.owner)
        finally:
            idle.set()

    async def _abandon_again(self, request: Request, idle: Event) -> None:
        # If the caller was cancelled again, the first try may go on: two at once would use one connection for both.
        until = self._client.answer_by(CALL_SECONDS)
        if not await idle.wait(max(0.0, until - self._runtime.now())):
            raise BackendUnavailable(f"the request for lock {request.name!r} is being undone already")
        if request.state is not None or request.uncertain:
            request.answer_by = until
            await self._abandon(request, idle)

    def _answered(self) -> None:
        """End the outage in which this call failed before."""
        self._failures, self._context.last_error = 0, None
        self._context.leases.report.answered()
        if self._outage is not None:
            self._context.outages.pop(self._outage.queue, None)
            self._outage.over.set()
            self._outage = None

    async def _back_off(self, error: BackendUnavailable) -> None:
        """Pause after a failure, or raise it if the wait is over."""
        assert self._attempts > 0, "only what was tried can fail"
        self._failures += 1
        context, name = self._context, self._settings.name
        # Not itself: its traceback refers to the frames of all callers, and so to the leases that they hold.
        context.last_error = type(error)(str(error))
        now = self._runtime.now()
        # From the start of this call, or the last answer to any call: those in the queue do not each wait anew.
        until = self._deadline
        if until is None:
            until = max(self._began, context.answered_at) + context.unavailable_after
        if now >= until:
            raise self._client.unavailable(error, f"acquire lock {name!r}", name)
        if self._failures == 1:
            context.leases.report.unanswered(name, error)
        outage = context.outage(error)
        outage.tries += outage is self._outage
        self._outage = outage
        await self._pause_in_turn(outage, until)
        self._check_open()

    async def _pause_in_turn(self, outage: Outage, until: Instant) -> None:
        """Wait until it is this call's turn to try again, or another one has been answered, or the time is over."""
        queues, ticket = self._context.queues, Ticket()
        try:
            if not queues.enter(outage.queue, ticket, wait=True):
                await self._wait_for_turn(outage.queue, ticket, until, inf)
            left = until - self._runtime.now()
            if left > 0.0 and not self._client.closed:
                # A call whose errors differ each time is alone in each outage.
                pause = self._pause(OUTAGE_PAUSE_MAX, max(self._failures, outage.tries))
                await outage.over.wait(min(pause, left))
        finally:
            queues.leave(outage.queue, ticket)

    def _pause(self, longest: Seconds, attempts: int) -> float:
        """Jittered exponential back-off, seconds: half to all of ``min(longest, 0.01 * 2 ** attempts)``."""
        assert attempts > 0, "the first attempt is not delayed"
        return min(longest, 0.01 * 2.0 ** min(attempts, 20)) * self._jitter(0.5, 1.0)

    def _jitter(self, low: float, high: float) -> float:
        return self._runtime.random.uniform(low, high)

    def _check_open(self) -> None:
        if self._client.closed:
            raise self._client.closed_error()
        if self._settings.given_up is not None and self._settings.given_up():
            name, url = self._settings.name, self._client.url
            raise LockError(f"the wait for lock {name!r} at {url} was given up", name=name, backend=url)

    @property
    def _endless(self) -> bool:
        return self._deadline is None

    @property
    def _out_of_time(self) -> bool:
        return self._deadline is not None and self._runtime.now() >= self._deadline

    def _too_late(self) -> LockError:
        name, url = self._settings.name, self._client.url
        message = (
            f"lock {name!r} at {url} was granted and released again: the answer took longer than its ttl of "
            f"{self._settings.ttl:g} s. Acquire with a longer ttl."
        )
        return self._too_late_error(message, name=name, backend=url)

    def _timed_out(self, busy: Busy | None) -> LockError:
        """Return the error of a wait that is over; `busy` is None if it ended in the client's queue."""
        assert self._deadline is not None, "a wait without limit does not time out"
        name, url, error = self._settings.name, self._client.url, self._context.last_error
        if busy is None and error is not None:
            return self._client.unavailable(error, f"acquire lock {name!r}", name)
        self._stayed_busy, self._busy = True, busy
        record = None if busy is None else self._holder_in_same_thread(busy)
        if record is not None:
            relation = self._runtime.relation(record.acquired_by)
            message = self._busy_message(relation, f"{self._advice(record)}.")
        else:
            owner = "" if busy is None or not busy.owner else plain(busy.owner, HOLDER_CHARS_MAX)
            message = self._busy_message(owner and f"owner {owner}")
        return LockTimeout(message, name=name, backend=url)

    def _busy_message(
        self, holder: str, advice: str = "Wait longer with timeout=, or see who holds it with holders()."
    ) -> str:
        waited = round(self._runtime.now() - self._began, 3)
        busy = f"busy (held by {holder})" if holder else "busy"
        return f"lock {self._settings.name!r} at {self._client.url} is {busy}: waited {waited:g} s. {advice}"

    async def _name_holder(self, error: LockTimeout) -> None:
        """
        Have the error of this call say who holds the lock, as far as the client knows or one question can find out.

        A single try asks nobody: a second round trip would make it twice as long.
        """
        assert error.holder is None, "named once"
        if not self._stayed_busy:
            return
        name, busy = self._settings.name, self._busy
        record = self._context.leases.find(None if busy is None else busy.owner, name)
        if record is not None:
            error.holder = holder_of(record.grant.owner, record.metadata)
            if self._runtime.relation(record.acquired_by):
                return  # the message says it in other words
        elif busy is not None and busy.owner is not None and busy.metadata is not None:
            error.holder = holder_of(busy.owner, busy.metadata)
        elif self._request.queue:
            seconds = max(0.0, self._answer_by - self._runtime.now())
            error.holder = await self._context.lookups.ask(self._backend, name, seconds)
        if error.holder is not None:
            error.args = (self._busy_message(str(error.holder)),)

    # -- warnings of waits that may never end ------------------------------------------------------------------------

    def _holder_in_same_thread(self, busy: Busy) -> LeaseRecord | None:
        """Return the lease that holds the lock, if its holder cannot go on while the caller waits."""
        record = self._context.leases.find(busy.owner, self._settings.name)
        return record if record is not None and self._runtime.relation(record.acquired_by) else None

    def _is_own(self, record: LeaseRecord) -> bool:
        """Tell whether the caller's own thread or task holds a lease; another task of the same loop is not the same."""
        return record.acquired_by == self._runtime.current()

    def _advice(self, record: LeaseRecord) -> str:
        """Say how to avoid waiting for a holder that cannot go on."""
        assert record.grant.name == self._settings.name, "the holder of this lock"
        if self._is_own(record):
            if split_space(record.grant.name)[0] == "once":
                return "A run asks for its own key, which is free when it has ended: give the inner work another key"
            return "Pass reentrant=True to lock(), here and there, to get the same lease again"
        return "It cannot release while this call blocks their event loop: use lockkit.aio, which does not block"

    async def _before_waiting(self, busy: Busy) -> None:
        """
        Warn of a wait for oneself.

        LockError: It could never end: A holds the lock and awaits something. B, a task of the same event loop,
        waits for the lock by blocking their thread: the loop stands still, and A never leaves.
        """
        assert self._waiting, "warned when the wait begins"
        record = self._holder_in_same_thread(busy)
        if record is None:
            self._warn_loop()
            return
        name, url, holder = self._settings.name, self._client.url, self._runtime.relation(record.acquired_by)
        if self._endless and self._runtime.blocks_event_loop() and not self._others_may_release():
            if await self._context.leases.handed_over(record):
                return
            itself = ", which would wait for itself" if self._is_own(record) else ""
            message = f"lock {name!r} at {url} is held by {holder}{itself}. {self._advice(record)}."
            raise LockError(message, name=name, backend=url)
        log.warning("waiting for lock %r at %s, which %s holds. %s", name, url, holder, self._advice(record))

    def _others_may_release(self) -> bool:
        """Tell whether what is waited for has holders that can go on, besides one that cannot."""
        return False

    def _warn_loop(self) -> None:
        if self._runtime.blocks_event_loop():
            log.warning(
                "waiting for lock %r at %s in a thread that runs an event loop: nothing else runs in that loop until "
                "the lock is free; use lockkit.aio in coroutines", self._settings.name, self._client.url,
            )  # fmt: skip

    def _record_order(self) -> None:
        order = self._context.order
        if order is not None and (
            warning := order.waits(self._settings.name, self._client.url, self._runtime.current())
        ):
            log.warning("%s", warning)

    def _warn_in_queue(self) -> None:
        assert self._warn_at != inf, "warned once"
        self._warn_at = inf
        log.warning(
            "waiting for lock %r at %s for more than %g s, behind other waiters of this same client",
            self._settings.name, self._client.url, self._settings.ttl,
        )  # fmt: skip

    def _warn_at_backend(self, waited: Seconds) -> None:
        """In the background: a backend that hangs must not make the wait longer than its timeout."""
        assert self._warn_at == inf, "warned once"
        self._client.spawn("lockkit-holders", lambda: self._warn_of_holders(waited))

    async def _warn_of_holders(self, waited: Seconds) -> None:
        name = self._settings.name
        try:
            holders: Sequence[Holder] = await self._backend.holders(name)
        except LockError as error:
            log.debug("asking for the holders of lock %r: %s", name, error)
            holders = ()
        who = ", ".join(self._describe(holder) for holder in holders) or "unknown"
        log.warning(
            "waiting for lock %r at %s for %.1f s, longer than its ttl; holder: %s", name, self._client.url, waited, who
        )

    def _describe(self, holder: Holder) -> str:
        about = plain(" ".join(f"{key}={value}" for key, value in holder.metadata.items()), HOLDER_CHARS_MAX)
        mine = " (this same client)" if holder.owner in self._context.leases.records else ""
        return f"owner {plain(holder.owner, HOLDER_CHARS_MAX)}{mine} {about}".rstrip()
