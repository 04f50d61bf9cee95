"""The leases of one client: which there are, which a thread or task may enter again, and the loss of one."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from lockkit import validation
from lockkit.backend import Grant, LossReason
from lockkit.engine import observation
from lockkit.engine.cleanup import PendingCleanups
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import HELD, LOST, RELEASED, LeaseRecord, LeaseState
from lockkit.engine.observation import Report
from lockkit.engine.settings import LockSettings, LostCallback
from lockkit.errors import LockError
from lockkit.runtime import wall_clock
from lockkit.units import Seconds

log = logging.getLogger("lockkit")

EARLY_LOSSES_MAX = 100
"""How many losses of unknown owners are remembered. Those of leases that were released stay until others push them out;
with fewer, the loss of a lease that is being granted at this moment could be forgotten."""

HAND_OVER_SECONDS = 1.0
"""How long a call that would wait for itself gives another thread or task to enter or release its lease, seconds.
Longer blocks an event loop for longer that waits for itself; shorter refuses a wait for a thread that has just been
given the lease."""

HAND_OVER_LOOK = 0.01
"""Pause between two looks at that, seconds."""

CALLBACK_SECONDS = 60.0
"""How long a callback of a loss may have to wait for a thread, seconds: one after the other in that of the cleanups."""


class Leases:
    """All leases of one client that are neither released nor lost, and what happens when one is lost."""

    def __init__(self, client: ClientState, cleanups: PendingCleanups) -> None:
        """Start without leases."""
        self._client = client
        self.cleanups = cleanups
        self.records: dict[str, LeaseRecord] = {}
        self.unplanned: dict[str, LeaseRecord] = {}  # those of them that the renewer's watch has not seen yet
        self.reentrant: dict[tuple[object, str], LeaseRecord] = {}
        self.early_losses: dict[str, LossReason] = {}  # reported by the backend, of owners that are not known here
        self.unlogged: deque[str] = deque()  # of leases that were dropped
        self.report = Report(client, self.all)

    def forked(self) -> None:
        """Own nothing in the child of a fork: its copies of the parent's leases are lost."""
        for record in self.all():
            record.state = LOST
            record.lost_reason = "session"
        self.records = {}
        self.unplanned = {}
        self.reentrant = {}
        self.early_losses = {}
        self.unlogged.clear()
        self.report.forked()

    # -- which there are -------------------------------------------------------------------------------------------

    def all(self) -> list[LeaseRecord]:
        """
        Return all leases. A copy, made in one step: ``__del__`` forgets leases in any thread, at any time.

        Not ``tuple()``, which has begun to iterate when it allocates: on Python 3.11 that may collect garbage.
        """
        return list(self.records.values())

    def add(self, record: LeaseRecord, settings: LockSettings) -> None:
        """Keep a new lease, which was acquired with these settings. Under the mutex."""
        owner = record.grant.owner
        assert owner not in self.records, "each acquisition has an owner of its own"
        self.records[owner] = self.unplanned[owner] = record
        if settings.reentrant or settings.nests:
            record.reentry_key = (record.acquired_by, record.grant.name)
            self.reentrant[record.reentry_key] = record

    def drop(self, record: LeaseRecord) -> None:
        """Forget a lease that has ended, also for re-entry. Dict operations only: also called from ``__del__``."""
        assert record.state is not HELD, "a lease that is held must be watched"
        self._forget(record.grant.owner)
        if record.reentry_key is not None:
            self._end_reentry(record)

    def _forget(self, owner: str) -> None:
        self.records.pop(owner, None)
        self.unplanned.pop(owner, None)

    def enter(self, record: LeaseRecord) -> None:
        """Note that a block runs under a lease. If another thread or task enters it, it was handed over to that one."""
        who = self._client.runtime.current()
        if record.acquired_by != who:
            record.acquired_by = who
            # With a count above 1, blocks of its former thread or task go on under it.
            if record.count == 1 and self._end_reentry(record) and record.settings.reentrant:
                record.reentry_key = (who, record.grant.name)
                self.reentrant.setdefault(record.reentry_key, record)
                if record.released:  # meanwhile
                    self._end_reentry(record)
        record.blocks += 1

    async def handed_over(self, record: LeaseRecord) -> bool:
        """
        Return whether the caller has handed its lease over, after a moment in which that can show.

        It shows when another thread or task enters or releases the lease. With a block of the caller under it, it never
        does.
        """
        runtime = self._client.runtime
        until = runtime.now() + HAND_OVER_SECONDS
        while record.held and runtime.relation(record.acquired_by):
            if record.blocks or runtime.now() >= until:
                return False
            await runtime.sleep(HAND_OVER_LOOK)
        return True

    def _end_reentry(self, record: LeaseRecord) -> bool:
        """
        Let nobody enter a lease again; returns whether somebody could.

        Of a lock that was lost, its thread may have acquired another one since.
        """
        key = record.reentry_key
        return key is not None and self.reentrant.get(key) is record and self.reentrant.pop(key, None) is record

    def find(self, owner: str | None, name: str) -> LeaseRecord | None:
        """Return the lease of this owner; if the owner is not known, one of this lock."""
        if owner is not None:
            return self.records.get(owner)
        return next((record for record in self.all() if record.grant.name == name), None)

    def reenter(self, settings: LockSettings) -> Any | None:  # noqa: ANN401 - the lease class of the API in use
        """Return the lease that the current thread or task already holds, counted once more; None without one."""
        client = self._client
        record = self.reentrant.get((client.runtime.current(), settings.name))
        if record is None:
            return None
        if settings.mode != "shared" and not (settings.reentrant and record.settings.reentrant):
            return None
        if settings.mode == "exclusive" and record.mode != "exclusive":
            return None  # downgraded
        record.check()
        lease = None if record.lease_ref is None else record.lease_ref()
        if lease is None:
            return None
        with client.mutex:
            if record.released:
                return None  # another thread has it, and released it after the check
            assert record.count > 0, "the last release ends a lease"
            record.count += 1
        return lease

    async def refuse_write_inside_read(self, settings: LockSettings) -> None:
        """Refuse a writer whose own thread or task holds the lock for reading."""
        name = settings.name
        record = self.reentrant.get((self._client.runtime.current(), name))
        if record is None or record.mode != "shared" or await self.handed_over(record):
            return
        message = (
            f"lock {name!r} at {self._client.url} is held for reading by this same thread or task, which would wait "
            "for itself: release the read lease first, or acquire write() from the start and downgrade() it"
        )
        raise LockError(message, name=name, backend=self._client.url)

    def dropped(self, record: LeaseRecord) -> bool:
        """Stop renewing a lease that nothing refers to any more."""
        # No mutex: the garbage collector may run this in a thread that holds it.
        mistake = record.state is HELD and not self._client.closed
        if record.state is HELD:
            record.state = RELEASED
            observation.post("released", record, "dropped")
        self.drop(record)
        return mistake

    def log_soon(self, message: str) -> None:
        """
        Log what ``__del__`` has to say: now, or by the watch if this thread may be inside the mutex.

        A handler may use a lock of this same client.
        """
        self.unlogged.append(message)
        if not self._client.mutex.locked():
            self.log_now()

    def log_now(self) -> None:
        """Log what was put off. Never under the mutex."""
        with suppress(IndexError):
            while True:
                log.warning("%s", self.unlogged.popleft())

    def hand_over(self, record: LeaseRecord) -> None:
        """End a lease whose lock stays held for whoever has the ticket, unless it has ended otherwise."""
        with self._client.mutex:
            if record.state is not HELD:
                return
            record.state, record.handed_over = RELEASED, True
            self.drop(record)
            events = record.end_events
        for event in events:
            event.set()

    # -- loss ------------------------------------------------------------------------------------------------------

    def lose(self, record: LeaseRecord, reason: LossReason, *, state: LeaseState = HELD) -> None:
        """Mark a lease as lost, once, and notify its holder."""
        assert state is HELD or state is RELEASED, "a lease is lost while it is held, or when its release finds it gone"
        client = self._client
        with client.mutex:
            if record.state is not state:
                return
            passed = client.runtime.now() >= record.valid_until
            if reason == "expired" and not passed:
                return  # renewed since the caller looked at the clock
            if passed and reason in {"expired", "session"} and record.find_pause():
                reason = "paused"
            elif reason == "expired" and record.renewal.stalled:
                reason = "stalled"
            callbacks = self._mark_lost(record, reason)
            events = record.end_events
            may_have_renewed = record.renewal.may_have_renewed
        self.report.lost(record, reason, record.loss_text)  # first: who is notified may end the process
        for event in events:
            event.set()
        for callback in callbacks:
            self._notify(record, callback, reason)
        if reason in {"expired", "paused", "stalled"} and may_have_renewed and not record.min_hold_left:
            # A renewal whose answer was lost may have kept the lock at the server: free it for the others.
            self.cleanups.release_later(record)
        observation.post("lost", record, reason)

    def _mark_lost(self, record: LeaseRecord, reason: LossReason) -> list[LostCallback]:
        """Change the state; returns the callbacks to call once the mutex is free. Under the mutex."""
        assert record.state is not LOST, "lost once"
        record.state = LOST
        record.lost_reason = reason
        # It stays the reentrant lease of its thread until released: entering again must say "lost", not acquire.
        self._forget(record.grant.owner)
        record.renewal.wake_waiters()
        callbacks, record.callbacks = record.callbacks or [], None
        return callbacks

    def stalled(self, record: LeaseRecord) -> None:
        """Tell that a lease is not renewed any more, until its holder makes progress."""
        grant, stall = record.grant, record.renewal.stall
        since = datetime.fromtimestamp(wall_clock() - stall).astimezone().isoformat(" ", "seconds")
        # Not here: a log handler that hangs must not keep the watch from the other leases.
        self.report.later(
            "the holder of lock %r (token %d) at %s has made no progress for %g s, since %s: without a beat() within "
            "%.3g s it loses the lock", grant.name, grant.token, self._client.url, stall, since, record.remaining(),
        )  # fmt: skip
        observation.post("stalled", record)

    def lost_at_backend(self, owner: str, reason: LossReason) -> None:
        # First this: the lease may have been granted, and another thread may be about to add it.
        self.early_losses[owner] = reason
        record = self.records.get(owner)
        if record is not None:
            self.early_losses.pop(owner, None)
            self._client.runtime.deliver(lambda: self.lose(record, reason))
        elif len(self.early_losses) > EARLY_LOSSES_MAX:
            self.early_losses.pop(next(iter(list(self.early_losses)), ""), None)  # a copy: it changes in any thread

    def apply_early_loss(self, record: LeaseRecord) -> None:
        """Mark a new lease as lost if the backend reported its loss before it was added."""
        reason = self.early_losses.pop(record.grant.owner, None)
        if reason is not None:
            self.lose(record, reason)

    def on_lost(self, record: LeaseRecord, callback: LostCallback) -> None:
        """Register a callback, or call it at once if the lease is lost already."""
        with validation.about(record.grant.name, self._client.url):
            validation.on_lost(callback, awaits=self._client.runtime.kind != "blocking")
        with self._client.mutex:
            if record.lost_reason is None:
                record.callbacks = [*(record.callbacks or ()), callback]
                return
        self._notify(record, callback, record.lost_reason)

    def _notify(self, record: LeaseRecord, callback: LostCallback, reason: str) -> None:
        assert record.lost_reason is not None, "a holder is notified of a loss only"
        lease = None if record.lease_ref is None else record.lease_ref()
        runtime, name = self._client.runtime, record.grant.name

        async def call() -> None:
            try:
                await runtime.io(callback(lease, reason))
            except Exception:
                log.exception("on_lost callback of lock %r raised", name)

        # In the background: a slow callback must delay neither the loss of other leases nor the caller of check().
        if not self._client.spawn("lockkit-on-lost", call):  # thousands of leases may be lost at once
            self.cleanups.add(CALLBACK_SECONDS, call)

    async def wait_lost(self, record: LeaseRecord, timeout: Seconds | timedelta | None) -> bool:
        """Wait until the lease is lost (True) or released, or the time is over (False)."""
        seconds = validation.timeout(timeout, name=record.grant.name, backend=self._client.url)
        if record.lost:
            return True
        with self._client.mutex:
            if not record.end_events:
                record.end_events = (self._client.runtime.event(),)
            event = record.end_events[0]
            if record.state is not HELD:
                event.set()
        await event.wait(seconds)
        return record.lost

    # -- the end of the client -------------------------------------------------------------------------------------

    def end_all(self, unreleased: dict[str, Grant], *, notify: bool) -> None:
        """End every lease: one under which a ``with`` block runs is lost, the others are released."""
        callbacks: list[tuple[LeaseRecord, LostCallback]] = []
        with self._client.mutex:
            records = self.all()
            ended = [record for record in records if record.state is HELD]
            for record in records:
                unreleased[record.grant.owner] = record.grant
                if record.blocks and record.state is HELD:
                    callbacks += [(record, callback) for callback in self._mark_lost(record, "session")]
                else:
                    record.state = RELEASED
                    self.drop(record)
                    record.renewal.wake_waiters()
                for event in record.end_events:
                    event.set()
        assert all(record.state is not HELD for record in ended), "each is either lost or released"
        for record in ended:
            lost = record.lost_reason is not None
            observation.post("lost" if lost else "released", record, record.lost_reason or "closed")
        if notify:
            for record, callback in callbacks:
                self._notify(record, callback, "session")
        if interrupted := sum(record.blocks > 0 for record in ended):
            log.warning("ending leases under which `with` blocks still run: %d at %s", interrupted, self._client.url)
