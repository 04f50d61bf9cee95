"""One grant of a lock, in the sync API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from lockkit.lease import BaseLease, OtherApi, find_current
from lockkit.primitives import note
from lockkit.runtime import drive
from lockkit.units import Seconds

__all__ = ["Lease", "current_lease"]


class Lease(BaseLease):
    """
    One grant of a lock to one holder, for a limited time.

    May be handed to another thread and released there. Leaving it as a context manager releases it.
    """

    __slots__ = ()
    __aenter__ = OtherApi()
    _api = "lockkit"

    def confirm(self) -> bool:
        """
        Ask the backend whether this lease still holds the lock. A "no" marks it as lost.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        return drive(self._engine.confirm(self._record))

    def extend(self, ttl: Seconds | timedelta | None = None) -> None:
        """
        Set the time left to `ttl`; never adds to it.

        Args:
            ttl: Seconds; None means the lease's ttl. Later renewals use it, too.

        Raises:
            LockLost: The lease is not held.
            BackendUnavailable: No answer; the lease may still be held, see ``remaining()``.
            ConfigurationError: The ttl is wrong.
        """
        drive(self._engine.extend(self._record, ttl))

    def update(self, metadata: str | Mapping[str, object] | None) -> None:
        """
        Replace the application's metadata of this lease; ``holders`` shows the new one at once.

        For example to show how far a job has come. `metadata` is the new one when this returns.

        Args:
            metadata: As for ``Client.lock``: text or a mapping of JSON values, never a secret. None removes it.

        Raises:
            LockLost: The lease is not held.
            BackendUnavailable: No answer; the backend may have the new metadata or the old.
            ConfigurationError: The metadata cannot be stored.
            Unsupported: The backend cannot replace it (``capabilities.metadata_update``). Nothing was sent.
        """
        drive(self._engine.update(self._record, metadata))

    def ticket(self, ttl: Seconds | timedelta | None = None) -> str:
        """
        Hand the lock over to whoever takes it with the ticket, in this process or another: `Client.take`.

        The lock stays held; this lease ends: `check` raises, and `release` and leaving ``with`` do nothing. Nobody
        takes it: the lock is free when the ticket's time is over.

        Args:
            ttl: Seconds for which the ticket is good. None: the lease's ttl.

        Returns:
            At most 1,024 URL-safe characters. Whoever has them and reaches the server can take the lock: treat them as
            a secret.

        Raises:
            LockLost: The lease is not held.
            LockError: It is held with others, part of a set or a term, or was entered again.
            BackendUnavailable: No answer. The lease is as before.
            ConfigurationError: The ttl is wrong.
            Unsupported: Here a session or connection is the lock (``capabilities.transfer``). Nothing was sent.
        """
        return drive(self._engine.ticket(self._record, ttl))

    def write_note(self, value: Any, keep: float | timedelta = note.KEEP) -> None:  # noqa: ANN401 - any JSON
        """
        Leave a value with the lock for its next holder, in place of the one before; `Client.read_note` reads it.

        The backend writes it only if this lease still holds the lock, in the same step. It outlives the lease: release,
        loss, expiry and ``break_lock`` leave it.

        Args:
            value: A JSON value, at most 64 KiB as JSON text. None removes the note.
            keep: Seconds after which the backend forgets it, counted from this call.

        Raises:
            LockLost: The lease is not held: nothing was written.
            LockError: It is held with others (a reader's lease, a permit).
            BackendUnavailable: The backend did not answer for a ttl; it may have the new note or the old.
            ConfigurationError: The value cannot be stored, or `keep` is wrong.
            Unsupported: The backend keeps no notes (``capabilities.notes``). Nothing was sent.
        """
        drive(note.write(self._engine, self._record, value, keep))

    def downgrade(self) -> None:
        """
        Turn a write lease into a read lease. No waiting writer gets the lock in between; waiting readers do.

        Raises:
            LockError: It is no write lease.
            LockLost: It is not held.
            Unsupported: The backend cannot do it in one step.
            BackendUnavailable: No answer. The lease is held for writing or for reading; call again.
        """
        drive(self._engine.downgrade(self._record))

    def release(self) -> None:
        """
        Release the lock. Releasing twice is no error.

        Raises:
            LockLost: The lease was lost before: the work since then was not protected.
            BackendUnavailable: No answer. Renewal has stopped; call again, or leave it to the ttl.
        """
        drive(self._engine.releases.release(self._record))

    def wait_lost(self, timeout: Seconds | timedelta | None = None) -> bool:
        """
        Wait until the lease is lost.

        Args:
            timeout: Seconds at most; None without limit.

        Returns:
            True when lost; False when it was released, or the time is over.
        """
        return drive(self._engine.leases.wait_lost(self._record, timeout))

    def __enter__(self) -> Self:
        """Return itself: it is held already. Another thread that enters it has been handed it over."""
        self._engine.leases.enter(self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, as leaving ``with lock`` does."""
        drive(self._engine.releases.leave(self._record, error))


def current_lease() -> Lease:
    """
    Return the lease of the decorated function, or of the job, that runs in this thread or task: of the innermost one.

    For its `token`, ``check()`` and ``beat()``, since a decorator has no ``as lease``. Threads that the function starts
    have none, and a `LockSet` gives none: use ``with``.

    Raises:
        LockError: No function runs here that a lock, a semaphore or `Client.once` decorates, and no job with a lock.
    """
    return find_current(Lease)
