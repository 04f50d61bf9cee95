"""
Renews the leases of one client, and notices when one has reached its deadline.

Two coroutines per client, whatever the number of leases, each started when first needed and ended when idle:

- the **watch** sleeps until the next deadline or renewal is due. It does no I/O, so a renewal that hangs cannot keep it
  from marking a lease lost at its deadline (design rule 6).
- the **renewer** sends the renewals that are due, in one batch.

They share the client's mutex; nothing is awaited, started or logged while it is held.

The watch looks at a lease only when something is due for it: it has an agenda, a heap of times and owners. Nothing is
removed from it before its time: a lease that has ended, or is due later than planned, is found out then. (By owner, so
a lease that has ended does not stay in memory.) A new lease is not added at once, since most are released before
anything is due. The watch sleeps no longer than until the first of them is due, and adds all that are still held
whenever it wakes up.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from typing import Any

from lockkit import observers
from lockkit.backend import Gone, LockBackend, LossReason, Renewal, Renewed, Unknown
from lockkit.background import Background, nothing
from lockkit.engine import observation
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import HELD, LOST, LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.errors import BackendUnavailable
from lockkit.runtime import Event, Work
from lockkit.units import Instant, Seconds

LINGER = 10.0
"""Seconds that an idle watch or renewer stays. Shorter starts threads more often; longer keeps a dropped client."""

BATCH_SHARE = 1 / 30
"""Renewals due within this share of their ttl go along. Larger batches more and renews earlier than needed."""

OUTDATED_MIN = 1000
"""From how many entries on, besides four for each lease, an agenda is made anew: most are of leases that have ended.
More keeps more of them in memory; fewer makes small ones again and again."""

SLEEP_SECONDS_MAX = 5.0
"""Longest single wait of the watch, seconds. A wait does not count the time in which the machine was suspended; longer
notices later what became due meanwhile, and shorter wakes up more often for nothing."""

RETRY_START = 0.1
"""When to try again to start the renewer if no thread could be had, seconds."""


class Renewer:
    """Deadlines and renewals of all leases of one client."""

    def __init__(
        self, client: ClientState, leases: Leases, loop_ended: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Start nothing yet."""
        self._client = client
        self._runtime = client.runtime
        self._leases = leases
        self._watching = Background(client.runtime, "lockkit-watch", self._watch, loop_ended)
        self._renewing = Background(client.runtime, "lockkit-renew", self._renew, nothing)
        self.forked()

    def forked(self) -> None:
        """Forget what is due, and the threads: they are the parent's."""
        self._wake_at = inf
        self._agenda: list[tuple[Instant, str]] = []
        self._due: list[LeaseRecord] = []
        self._stalled: list[LeaseRecord] = []
        self._last_work: tuple[Work, Event] | None = None
        self._watching.forked()
        self._renewing.forked()

    # -- called under the mutex ------------------------------------------------------------------------------------

    def reschedule(self, record: LeaseRecord) -> None:
        """Make sure that the watch looks at a lease in time: it is new, or something is due earlier than planned."""
        plan, at, look_at = record.renewal, record.valid_until, record.look_at
        if plan.next_at < at:  # noqa: PLR1730 - every acquisition comes here, and min() takes three times as long
            at = plan.next_at
        if plan.stall_at < at and not plan.stalled:
            at = plan.stall_at
        # The watch adds a new one itself, if it is still held when the watch wakes up.
        if look_at is not None and at < look_at:
            heappush(self._agenda, (at, record.grant.owner))
            record.look_at = at
        # In a row of short leases the later ones are due later than the first: no thread is woken for them.
        if at < self._wake_at:
            self._wake_at = at
            self._watching.wake()

    def renew_soon(self) -> None:
        """Plan a renewal of every lease that is renewed at all for now."""
        for record in self._leases.all():
            if record.renewal.next_at != inf:
                record.renewal.next_at = 0.0
                self.reschedule(record)

    # -- called without the mutex ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Make sure that the watch runs."""
        if not self._watching.running:
            self._watching.start()

    def end(self) -> None:
        """Have both coroutines notice that the client is closed."""
        assert self._is_over(), "they end only when the client is closed or idle"
        self._watching.wake()
        self._renewing.wake()

    def hand_over(self, work: Work) -> Event | None:
        """
        Have the watch run this in its own thread.

        While the interpreter exits no thread can be started (Python 3.12 and later), but those that run go on.
        """
        if not self._watching.running:
            return None
        done = self._runtime.event()
        self._last_work = work, done
        self._watching.wake()
        return done

    # -- the watch -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        idle_since: float | None = None
        with self._client.mutex:
            self._start_agenda()  # also if it failed halfway, and is run again
        while True:
            self._watching.clear()
            if self._last_work is not None:
                await self._do_last_work(*self._last_work)
            with self._client.mutex:
                now = self._runtime.now()
                expired, due, at = self._survey(now)
                self._due.extend(due)
                if self._leases.records:
                    idle_since = None
                elif self._is_over() or (idle_since is not None and now >= idle_since + LINGER):
                    self._wake_at = self._client.watch_at = inf
                    return
                elif idle_since is None:
                    idle_since = now
                if at == inf:
                    at = (now if idle_since is None else idle_since) + LINGER
                    if now < self._wake_at < at:
                        # Planned for a lease that has been released: one of a row, of which each next is due later.
                        at = self._wake_at
                self._wake_at = at
            self._tell_of(expired)
            started = not self._due or self._start_renewer()
            if not started:
                at = min(at, now + RETRY_START)
            now = self._runtime.now()
            self._client.watch_at = min(at, now + SLEEP_SECONDS_MAX)
            await self._watching.wait(self._client.watch_at - now)

    def _tell_of(self, expired: list[LeaseRecord]) -> None:
        """Notify of what was found under the mutex."""
        stalled, self._stalled = self._stalled, []
        self._leases.log_now()
        for record in expired:
            self._leases.lose(record, "expired")
        for record in stalled:
            self._leases.stalled(record)

    def _is_over(self) -> bool:
        """Tell whether there will be nothing to renew any more: the client is closed."""
        return self._client.backend is None

    async def _do_last_work(self, work: Work, done: Event) -> None:
        self._last_work = None
        try:
            await work()
        finally:
            done.set()

    def _start_agenda(self) -> None:
        """Begin anew with an empty agenda. Under the mutex."""
        self._agenda = []
        for record in self._leases.all():
            record.look_at = None
            self._leases.unplanned[record.grant.owner] = record

    def _survey(self, now: Instant) -> tuple[list[LeaseRecord], list[LeaseRecord], float]:
        """Find what has expired, what is to be renewed (marked as in flight), and when to look again."""
        expired: list[LeaseRecord] = []
        due: list[LeaseRecord] = []
        if len(self._agenda) > OUTDATED_MIN + 4 * len(self._leases.records):
            self._start_agenda()
        # Exchanged before it is read: `__del__` forgets leases in any thread.
        unplanned, self._leases.unplanned = self._leases.unplanned, {}
        for record in list(unplanned.values()):
            plan = record.renewal
            record.look_at = min(plan.next_at, record.valid_until, inf if plan.stalled else plan.stall_at)
            heappush(self._agenda, (record.look_at, record.grant.owner))
        self._look(now, now, expired, due)
        if due:
            self._client.draw_renewal_share()
            self._look(now + BATCH_SHARE * due[0].grant.ttl, now, expired, due)
        # A lease may be among the expired twice: by an entry of its own, and by that of a renewal in flight.
        if len(self._leases.records) <= len(set(expired)):
            # The watch becomes idle, and must not sleep until a lease that was released would have been due.
            self._agenda = []
        look_again = self._agenda[0][0] if self._agenda else inf
        assert look_again > now, "the watch sleeps before it looks again"
        return expired, due, look_again

    def _look(self, until: Instant, now: Instant, expired: list[LeaseRecord], due: list[LeaseRecord]) -> None:
        """Look at the leases that are on the agenda for `until` or earlier, and plan when to look at each again."""
        agenda, records = self._agenda, self._leases.records
        owners = []
        while agenda and agenda[0][0] <= until:
            owners.append(heappop(agenda)[1])
        for owner in owners:
            record = records.get(owner)
            if record is None:
                continue  # released, dropped or lost meanwhile
            plan, at, look_at = record.renewal, record.valid_until, record.look_at
            assert look_at is not None, "what is on the agenda has been planned"
            if at <= now:
                expired.append(record)
                record.look_at = inf
                continue
            if plan.stall_at > now:
                at = min(at, plan.stall_at)
            elif not plan.stalled and (plan.next_at != inf or plan.in_flight):
                plan.stalled, plan.next_at = True, inf
                self._stalled.append(record)
            if plan.next_at < at and not plan.in_flight:
                if plan.next_at <= now + record.grant.ttl * BATCH_SHARE:
                    plan.in_flight = True
                    record.look_at = inf
                    due.append(record)
                    heappush(agenda, (at, owner))  # should the renewal hang
                    continue
                at = plan.next_at
            if at < look_at or look_at <= until:  # else it is on the agenda for then already
                heappush(agenda, (at, owner))
                record.look_at = at

    # -- the renewer -----------------------------------------------------------------------------------------------

    def _start_renewer(self) -> bool:
        """Make sure that the renewer runs; returns False if it cannot be started now."""
        self._renewing.wake()
        try:
            self._renewing.start()
        except RuntimeError as error:  # no more threads, perhaps for a moment: the leases are in jeopardy
            message = "could not start the renewer, %d renewals are due; lockkit retries: %s"
            self._leases.report.later(message, len(self._due), error)
            return False
        return True

    async def _renew(self) -> None:
        idle_since = self._runtime.now()
        while True:
            self._renewing.clear()
            with self._client.mutex:
                now = self._runtime.now()
                due, self._due = self._due, []
                backend = self._client.backend
                if not due and (self._is_over() or now >= idle_since + LINGER):
                    return
            if due:
                idle_since = now
                await self._renew_due(backend, due, now)
            else:
                await self._renewing.wait(idle_since + LINGER - self._runtime.now())

    async def _renew_due(self, backend: LockBackend | None, due: list[LeaseRecord], now: Instant) -> None:
        """Renew what was due when the watch looked; the answers change deadlines, or mark leases as lost."""
        assert due, "the renewer sleeps when nothing is due"
        batch = [record for record in due if self._is_due(record, now)]
        if not batch:
            return
        started = self._runtime.now()
        outcomes: Sequence[Renewal] = [Unknown(InterruptedError("cut short"))] * len(batch)
        try:
            outcomes = await self._ask(backend, batch)
        finally:
            # Also when this coroutine is cancelled: a lease that stays in flight would never be renewed again.
            self._apply(batch, outcomes, started)
            for record in batch:
                if record.released and record.min_hold_left:
                    # The server may have run the release first, and then this, which sets the full ttl again.
                    self._leases.cleanups.release_later(record)

    def _is_due(self, record: LeaseRecord, now: Instant) -> bool:
        """Tell whether a lease is still to be renewed: the batch before may have taken long."""
        plan = record.renewal
        assert plan.in_flight, "the survey marks what is due"
        if record.state is not HELD:
            return False
        if now > plan.until or plan.stalled:
            with self._client.mutex:
                plan.next_at = inf
                self.reschedule(record)
                plan.finish()
            return False
        return True

    async def _ask(self, backend: LockBackend | None, batch: list[LeaseRecord]) -> Sequence[Renewal]:
        try:
            if backend is None:
                raise BackendUnavailable("the client is closed")  # noqa: TRY301 - goes to the log only
            outcomes = await backend.renew([record.grant for record in batch])
            if len(outcomes) != len(batch):
                message = f"{type(backend).__name__}.renew gave {len(outcomes)} outcomes for {len(batch)} grants"
                raise RuntimeError(message)  # noqa: TRY301 - a backend's bug counts as no answer, and is logged
        except Exception as error:  # noqa: BLE001 - whatever it was: retried until the deadline
            outcomes = [Unknown(error)] * len(batch)
        assert len(outcomes) == len(batch), "one answer for each, whatever the backend gave"
        if Unknown in set(map(type, outcomes)):
            _forget_frames(outcomes)
        return outcomes

    def _apply(
        self, batch: list[LeaseRecord], outcomes: Sequence[Renewal], sent: Instant, ttl: Seconds | None = None
    ) -> None:
        """Change deadlines and plans by the answers to what was sent at `sent`; `ttl` is that of an extension."""
        lost: list[tuple[LeaseRecord, LossReason]] = []
        renewed: list[tuple[LeaseRecord, Seconds | None]] = []
        failed: list[tuple[LeaseRecord, BaseException]] = []
        recovered = 0
        # One for the batch, so that its leases are asked for together again.
        spread = self._runtime.random.uniform(0.8, 1.2)
        with self._client.mutex:
            now = self._runtime.now()
            assert sent <= now, "deadlines are measured with a clock that never goes back"
            for record, outcome in zip(batch, outcomes, strict=True):
                plan = record.renewal
                in_jeopardy = plan.in_jeopardy
                plan.finish()
                # Lost is final, also when a late answer says otherwise. So is the deadline, should the watch not have
                # run yet (a pause).
                believed = record.state is HELD and now < record.valid_until
                if isinstance(outcome, Renewed) and believed:
                    # What is to be renewed at once (`renew_soon`) is planned for 0.0; an extension is not planned.
                    late = max(0.0, sent - plan.next_at) if plan.next_at else 0.0
                    renewed.append((record, late if ttl is None else None))
                    record.grant.ttl = ttl or record.grant.ttl
                    recovered += record.renewed(outcome, sent)
                    self.reschedule(record)
                    continue
                reason = self._apply_failure(record, outcome, sent, now, ttl)
                if reason is not None:
                    lost.append((record, reason))
                elif believed and isinstance(outcome, Unknown) and ttl is None:
                    self._plan_retry(record, now, spread)
                    if not in_jeopardy:
                        failed.append((record, outcome.error))
        if failed:
            self._leases.report.jeopardy(failed)
        if recovered:
            self._leases.report.renewed_again(recovered)
        if observers.active is not None:
            _tell_observers(renewed, failed)
        for record, reason in lost:
            self._leases.lose(record, reason)

    def _apply_failure(
        self, record: LeaseRecord, outcome: Renewal, sent: Instant, now: Instant, ttl: Seconds | None
    ) -> LossReason | None:
        """Apply an answer that does not renew a lease; returns the reason if it is lost. Under the mutex."""
        plan = record.renewal
        assert not plan.in_flight, "it has been answered"
        if not isinstance(outcome, Gone):
            # The server may run it yet; or it has, and keeps the lock for it although the answer came too late.
            plan.note_unanswered(ttl or record.grant.ttl, sent)
        if record.state is not HELD:
            return None
        if now >= record.valid_until:
            return "expired"
        if ttl is not None and plan.next_at != inf:
            plan.next_at = 0.0  # the deadline may now be earlier than the next renewal was planned
            self.reschedule(record)
        return outcome.reason if isinstance(outcome, Gone) else None

    def _plan_retry(self, record: LeaseRecord, now: Instant, spread: float) -> None:
        """Plan the next try after a renewal without an answer. Under the mutex."""
        # It may be dropped at any time, without the mutex.
        assert record.state is not LOST, "lost is final"
        plan, left = record.renewal, record.valid_until - now
        until_stop = left - plan.grace if left > plan.grace else left
        # Several more tries before the deadline, or before the holder stops, spread so that the clients of a server
        # that comes back do not all call in the same instant. At least 5 ms: a dead port answers at once and would be
        # asked in a busy loop.
        plan.schedule(now + max(0.005, min(record.grant.ttl / 10, until_stop / 3)) * spread)
        assert plan.next_at > now, "a dead port is not asked in a busy loop"
        plan.in_jeopardy = True
        self.reschedule(record)

    # -- on the holder's request -----------------------------------------------------------------------------------

    def beat(self, record: LeaseRecord) -> None:
        """Note that the holder makes progress. Does nothing for a lease whose renewal does not depend on it."""
        plan = record.renewal
        if plan.stall == inf:
            return
        with self._client.mutex:
            if record.state is HELD and plan.beat(self._runtime.now()):
                self.reschedule(record)

    async def extend(
        self, record: LeaseRecord, backend: LockBackend, ttl: Seconds, *, hand_over: bool = False
    ) -> Renewal:
        """Renew one lease for another ttl; with `hand_over`, for whoever takes the lock, and end it here."""
        await self._wait_for_turn(record)
        outcome: Renewal = Unknown(InterruptedError("cut short"))
        sent = self._runtime.now()
        try:
            with self._client.mutex:
                record.renewal.beat(sent)
                # Before it is sent: the server counts a shorter ttl from its arrival on, however late the answer comes.
                record.shorten_deadline(sent, ttl)
                self.reschedule(record)
            grant = replace(record.grant, ttl=ttl)
            (outcome,) = [await backend.detach(grant)] if hand_over else await backend.renew([grant])
            _forget_frames([outcome])
        finally:
            self._apply([record], [outcome], sent, ttl)
        if hand_over and isinstance(outcome, Renewed):
            self._leases.hand_over(record)
        return outcome

    async def _wait_for_turn(self, record: LeaseRecord) -> None:
        """
        Wait until no renewal of this lease is in flight, and mark one as being so.

        Without it: A (the renewer) sends ttl=30, B (extend) sends ttl=60; the server runs B, then A;
        B's caller believes in 60 s, the server keeps 30.
        """
        plan = record.renewal
        while True:
            record.check()
            with self._client.mutex:
                if not plan.in_flight:
                    plan.in_flight = True
                    return
                if plan.answered is None:
                    plan.answered = self._runtime.event()
                plan.answered.clear()
                answered = plan.answered
            await answered.wait(record.remaining())


def _forget_frames(outcomes: Sequence[Renewal]) -> None:
    """
    Drop the tracebacks of the errors that outcomes carry.

    Their frames refer to those of all callers (CPython links ``f_back`` when a frame ends), and one of these has the
    outcome in a variable: a cycle. A lease that the holder drops would be renewed until the next garbage collection.
    """
    for outcome in outcomes:
        errors = [outcome.error] if isinstance(outcome, Unknown) else []
        for error in errors:
            error.__traceback__ = None
            others = (error.__cause__, error.__context__)
            errors += [other for other in others if other is not None and other not in errors]


def _tell_observers(
    renewed: list[tuple[LeaseRecord, Seconds | None]], failed: list[tuple[LeaseRecord, BaseException]]
) -> None:
    """Post the events of one batch."""
    for record, late in renewed:
        observation.post("renewed", record, late=late)
    for record, _ in failed:
        observation.post("jeopardy", record, "unavailable")
