"""Gives locks back: by their holder, at the end of a ``with`` block, and all together when the client ends."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from math import inf

from lockkit import observers
from lockkit.backend import CALL_SECONDS, Grant
from lockkit.engine import observation
from lockkit.engine.cleanup import RELEASE_SECONDS, PendingCleanups, give_back
from lockkit.engine.client_state import ClientState
from lockkit.engine.lease_record import HELD, RELEASED, RELEASING, UNCONFIRMED, LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.errors import BackendUnavailable, LockError, LockLost
from lockkit.runtime import Event
from lockkit.units import Instant

log = logging.getLogger("lockkit")

INTERRUPTED_SECONDS = 5.0
"""How long a release that was cancelled or interrupted waits until it has been sent again, seconds; after that it goes
on in the background."""


class Releases:
    """All ways in which a client gives locks back."""

    def __init__(self, client: ClientState, leases: Leases, cleanups: PendingCleanups) -> None:
        """Start with nothing to give back."""
        self._client = client
        self._leases = leases
        self._cleanups = cleanups
        self._unreleased: dict[str, Grant] = {}  # by owner

    def forked(self) -> None:
        """Release nothing of the parent's."""
        self._unreleased = {}

    # -- one lease -------------------------------------------------------------------------------------------------

    async def release(
        self,
        record: LeaseRecord,
        answer_by: Instant = inf,
        block: bool = False,  # noqa: FBT001, FBT002 - faster than by its name
    ) -> None:
        """Give the lock back; `block`: at the end of a ``with`` block."""
        client = self._client
        while True:
            # Without a function of its own: leaving a reentrant lock must need no more stack than entering it again.
            # Else a RecursionError in the body would strike here too, and the lock stay held.
            if (record.state is not HELD or client.runtime.now() >= record.valid_until) and record.lost:
                self._leases.drop(record)
                raise record.lost_error()
            ours, begun, before = None, False, record.state
            try:
                with client.mutex:
                    before = record.state
                    if not record.leave(block):
                        return
                    begun = before is HELD or before is UNCONFIRMED
                    if begun:
                        self._begin(record)
                    other = None if begun else self._end_of_other_release(record)
                if other is None:
                    ours = await self._asked(record, answer_by)
                    break
            except BaseException as error:
                await self._failed(record, error, begun=begun, first=before is HELD)
                raise
            finally:
                if begun:
                    self._end(record, ours is not None)
            if not await other.wait(CALL_SECONDS) and record.state is RELEASING:
                record.state = UNCONFIRMED  # an interrupt tore the other thread out of its `_end`
        # A release that is sent again may find that the first one was run.
        if before is HELD and (not ours or observers.active is not None):
            await self._finish(record, ours=bool(ours))

    def _asked(self, record: LeaseRecord, answer_by: Instant) -> Awaitable[bool]:
        """Ask the backend to free the lock, unless the other locks of a set have taken the time."""
        client = self._client
        if answer_by != inf and client.runtime.now() >= answer_by:
            raise BackendUnavailable("the time for it had passed")
        if record.settings.min_hold:
            return give_back(client.ready(), record, answer_by)
        return client.ready().release(record.grant, client.answer_by(RELEASE_SECONDS, answer_by))

    async def _finish(self, record: LeaseRecord, *, ours: bool) -> None:
        """Mark a lease as lost if the backend did not hold it any more when it was released; tell the observers."""
        runtime = self._client.runtime
        assert record.state is RELEASED, "the backend has answered"
        # Not ours any more, though the deadline has not passed: broken, flushed or taken. (Past the deadline the lease
        # may have run out while the release was on its way: the work had ended by then.)
        if not ours and runtime.now() < record.valid_until:
            self._leases.lose(record, "gone", state=RELEASED)
            raise record.lost_error()
        if observers.active is not None:
            await observers.tell(runtime, "released", observation.of_lease(record))

    def _begin(self, record: LeaseRecord) -> None:
        """End a lease on its holder's word, before the backend knows. Under the mutex."""
        assert record.state is HELD or record.state is UNCONFIRMED, "no release is under way, and none was answered"
        record.state = RELEASING
        record.release_done = None
        self._leases.drop(record)
        if record.renewal.in_flight:
            record.renewal.wake_waiters()  # it may not be sent any more: an extend() must not wait for it
        for event in record.end_events:
            event.set()

    def _end(self, record: LeaseRecord, answered: bool) -> None:  # noqa: FBT001 - faster than by its name
        """Note how the release that `_begin` began has ended."""
        with self._client.mutex:
            if record.state is RELEASING:
                record.state = RELEASED if answered else UNCONFIRMED
            assert not answered or record.state is RELEASED, "the backend's answer ends a release"
            waited_for = record.release_done
        if waited_for is not None:
            waited_for.set()

    def _end_of_other_release(self, record: LeaseRecord) -> Event:
        """
        Return the event that tells that another thread's release has ended. Under the mutex.

        Two threads release one lease: were both to ask, the second would be told that it does not hold the lock.
        The event is set already if there is no such release: the lease was lost after the look at the clock.
        """
        if record.release_done is None:
            record.release_done = self._client.runtime.event()
        if record.state is not RELEASING:
            record.release_done.set()
        return record.release_done

    async def _failed(self, record: LeaseRecord, error: BaseException, *, begun: bool, first: bool) -> None:
        """Say what failed, and send a release again that was cancelled or interrupted: it may not have been sent."""
        client, grant = self._client, record.grant
        if begun and first:
            observation.post("released", record, "unconfirmed")
        if isinstance(error, BackendUnavailable):
            raise client.unavailable(error, f"release lock {grant.name!r}", grant.name) from error.__cause__ or error
        # If it was sent, the backend compares the owner.
        if begun and record.state is RELEASING and not isinstance(error, Exception):
            await self._send_again(record)

    async def _send_again(self, record: LeaseRecord) -> None:
        """Release as well as possible: now, else in the background until the ttl has passed."""
        backend = self._client.backend
        if backend is None:
            return
        try:
            await self._client.runtime.settle(give_back(backend, record), INTERRUPTED_SECONDS)
        except BaseException as error:
            self._cleanups.release_later(record)
            if not isinstance(error, Exception):
                raise

    async def leave(self, record: LeaseRecord, error: BaseException | None, answer_by: Instant = inf) -> None:
        """Release at the end of a ``with`` block."""
        try:
            await self.release(record, answer_by, True)  # noqa: FBT003 - as there
        except LockLost as lost:
            if error is not None:
                error.add_note(f"lockkit: {lost}")
            elif record.settings.raise_on_lost:
                raise
            # With raise_on_lost=False the loss has been logged when it was noticed.
        except LockError as failed:
            assert record.state is not HELD, "its renewal has ended"
            if error is not None:
                error.add_note(f"lockkit: {failed}")
            self._leases.report.unreleased(record, failed)
            self._cleanups.release_later(record)

    # -- all leases ------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> bool:
        """Whether `end_all` has anything to do."""
        return bool(self._leases.records or self._unreleased)

    async def end_all(self, answer_by: Instant, *, notify: bool = True) -> None:
        """
        End and free every lease: the client, its event loop or the interpreter ends.

        One under which a ``with`` block runs is lost for that block, which must not end as if it had been protected.
        """
        # Kept until they have been sent: if this is cancelled or interrupted, it is called again.
        self._leases.end_all(self._unreleased, notify=notify)
        backend, url = self._client.backend, self._client.url
        grants = list(self._unreleased.values())
        if backend is None or not grants:
            return
        try:
            await backend.release_all(grants, answer_by)
        except LockError as error:
            log.warning("could not release all locks at %s: %s", url, error)
        for grant in grants:
            self._unreleased.pop(grant.owner, None)
