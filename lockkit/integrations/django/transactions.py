"""Locks that know of Django's transactions: none is free before what was written under it can be seen."""

from __future__ import annotations

import logging
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, cast, overload

from django.db import connections

from lockkit import validation
from lockkit.errors import ConfigurationError, LockError
from lockkit.sync import Client, Lease, Lock
from lockkit.sync.lock import SkippingLock

__all__ = ["DjangoClient", "TransactionLease", "TransactionLock"]

log = logging.getLogger("lockkit")


class DjangoClient(Client):
    """A `lockkit.Client` whose locks know of Django's transactions."""

    __slots__ = ()

    def __init__(self, client: Client) -> None:
        """Made by `client` and `from_connection`."""
        super().__init__(client._engine)  # noqa: SLF001 - the same client under another class

    @overload
    def lock(
        self, name: str, *, on_busy: Literal["skip"], until_commit: bool | None = None, **options: Any
    ) -> SkippingLock: ...

    @overload
    def lock(self, name: str, *, until_commit: bool | None = None, **options: Any) -> Lock: ...

    def lock(self, name: str, *, until_commit: bool | None = None, **options: Any) -> Lock:
        """
        Describe a lock. Nothing is sent yet.

        Args:
            name: As for ``lockkit.Client.lock``.
            until_commit: When the lock becomes free if it is released inside ``transaction.atomic()``. True: when the
                transaction has been committed or rolled back (the outermost one; if the savepoint around the release is
                rolled back, then already). None: the same, and `LockError`, because the program looks as if the lock
                were free. False: at once, for a lock that protects nothing in these databases.
            **options: As for ``lockkit.Client.lock``. With ``until_commit=True``, ``reentrant`` is True unless given:
                a transaction that waited for its own lock would wait for ever.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        if until_commit is not None and validation.flag(until_commit, "until_commit"):
            options.setdefault("reentrant", True)
        lock = super().lock(name, **options)
        lock._settings.make_lease = partial(TransactionLease, until_commit=until_commit)  # noqa: SLF001 - made just now
        return TransactionLock(lock._engine, lock._settings)  # noqa: SLF001


class TransactionLock(Lock):
    """A `lockkit.Lock` whose ``with`` leaves the release to its lease."""

    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, see `TransactionLease`."""
        self._blocks.pop(self._engine.runtime.current).__exit__(kind, error, trace)

    def _check_in_set(self) -> None:
        if cast("partial[Lease]", self._settings.make_lease).keywords["until_commit"]:
            message = (
                f"lock {self.name!r} has until_commit=True and cannot be in a set of locks, which releases it without "
                "waiting for the transaction: use `with` for each, in the order of their names"
            )
            raise ConfigurationError(message, name=self.name, backend=self._engine.url)


class TransactionLease(Lease):
    """A `lockkit.Lease` that is held until the transactions that are open at its release have ended."""

    __slots__ = ("_until_commit",)

    def __init__(self, *arguments: Any, until_commit: bool | None) -> None:
        """Made by the engine only."""
        self._until_commit = until_commit
        super().__init__(*arguments)

    def release(self) -> None:
        """
        Give the lock back, see `DjangoClient.lock` for when.

        Raises:
            LockError: A transaction is open, and the lock does not say what then.
            LockLost: The lease was lost before.
            BackendUnavailable: No answer; call again, or leave it to the ttl.
        """
        if not self._postponed():
            super().release()
        elif self._until_commit is None:
            raise self._refusal()

    def __enter__(self) -> Self:
        """Return itself, unless the block lies inside a transaction, so that its end would be refused."""
        if self._until_commit is None and self._postponed():
            raise self._refusal()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, as `release` does."""
        if not self._postponed():
            super().__exit__(kind, error, trace)
        elif self._until_commit is None and error is None:
            raise self._refusal()

    def end(self) -> None:
        """Release now. Never raises: what was written has been committed or rolled back."""
        try:
            super().__exit__(None, None, None)
        except LockError as error:
            log.error("a transaction ended after the lock that it needed was lost: %s", error)  # noqa: TRY400

    def _postponed(self) -> bool:
        """Leave the release to the transactions that are open, if there are any and it would free the lock."""
        if self._until_commit is False or not self.held or self._record.count > 1:
            return False
        transactions = _open_transactions()
        if not transactions:
            return False
        end = _End(self, len(transactions))
        for connection in transactions:
            connection.on_commit(end.committed)
        return True

    def _refusal(self) -> LockError:
        message = (
            f"lock {self.name!r} is released inside a transaction that is still open: another client would get it "
            "before it can see what was written. Take the lock outside of transaction.atomic(), or give it "
            "until_commit=True (until_commit=False if it protects nothing in the database). It is held until the "
            "transaction has ended"
        )
        return LockError(message, name=self.name, backend=self._engine.url)


class _End:
    """
    Ends a lease when the last of its transactions has ended.

    Django calls what `on_commit` was given after a commit. After a rollback, of a savepoint too, and when the
    connection is closed it only drops it, and has no other hook: so the last reference counts as the end.
    """

    def __init__(self, lease: TransactionLease, transactions: int) -> None:
        self._lease: TransactionLease | None = lease
        self._open = transactions

    def committed(self) -> None:
        self._open -= 1
        if not self._open:
            self._end()

    def _end(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.end()

    def __del__(self) -> None:
        self._end()


def _open_transactions() -> list[Any]:
    """Return this thread's connections that are inside ``atomic``; that of a ``TestCase`` around a test is none."""
    return [
        connection
        for connection in connections.all(initialized_only=True)
        if any(not getattr(block, "_from_testcase", False) for block in connection.atomic_blocks)
    ]
