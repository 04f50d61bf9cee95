"""The table of leases: who holds which lock, written by each holder."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from math import inf

from lockkit.backend import Holder, Mode, Request, decode_metadata, granted_at
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.errors import MissingTable
from lockkit.backends.sql.schema import create
from lockkit.backends.sql.statement import Result, Statement
from lockkit.backends.sql_session.locking import Locking
from lockkit.backends.sql_session.session import Key, Session, Taken
from lockkit.errors import ConfigurationError, LockError

log = logging.getLogger("lockkit")


KEYS_MAX = 1000
"""Keys of locks that a client remembers. More takes memory; fewer computes hashes more often."""


class LeaseTable:
    """Reads and writes leases, and makes the tables if they are missing."""

    def __init__(self, database: Database, locking: Locking, *, auto_create: bool) -> None:
        """Send nothing yet."""
        self._database = database
        self._locking = locking
        self._auto_create = auto_create
        self._table = ""
        self._keys: dict[str, Key] = {}

    async def key(self, run: Callable[[Statement], Awaitable[Result]], name: str) -> Key | None:
        """
        Return the key of a lock; None: its table is not there.

        Clients that name one table in two ways (``t``, ``public.t``) must have the same key. The server is asked once.
        """
        if not self._table:
            rows = (await run(self._locking.find_table)).rows
            table = rows[0][0] if rows else None
            if table is None:
                return None
            self._table = table.decode() if isinstance(table, bytes) else table
        key = self._keys.get(name)
        if key is None:
            if len(self._keys) >= KEYS_MAX:
                self._keys.clear()
            key = self._keys[name] = self._locking.key(self._table, name)
        return key

    async def token(self, request: Request, key: Key, session: Session, taken: Taken) -> int | None:
        """Return the token of what was taken, and write the lease if that is still to be done."""
        token = await self.write(request, key, session, taken.identity) if taken.token is None else taken.token
        if token == 0:
            # MariaDB returns no last id when the table has a trigger that writes.
            holders = await self.holders(key, request.answer_by)
            token = next((holder.token for _, holder in holders if holder.owner == request.owner), None)
        return token

    async def write(self, request: Request, key: Key, session: Session, identity: int) -> int | None:
        """Write the lease; return its token, or None: the session does not hold the lock any more."""
        locking = self._locking
        statement = locking.write_share if key.shared else locking.write_lease
        parameters = (key.name, request.owner, identity, request.metadata, *locking.lease_parameters(session, key))
        try:
            result = await self._database.run(statement, parameters, again=True, answer_by=request.answer_by)
        except MissingTable as error:
            await self.make_tables(error, request.answer_by)
            result = await self._database.run(statement, parameters, again=True, answer_by=request.answer_by)
        return locking.token(result)

    async def delete_shares(self, key: Key, answer_by: float) -> None:
        """Delete the leases of readers that have ended: a release leaves its own, so that it costs no write."""
        locking = self._locking
        parameters = (*locking.shares_range(key), *locking.share_parameters(key))
        try:
            await self._database.run(locking.delete_shares, parameters, again=True, answer_by=answer_by)
        except LockError as error:  # for want of the right, perhaps: they do no harm
            log.debug("deleting the leases of former readers at %s: %s", self._database.url, error)

    async def holders(self, key: Key | None, answer_by: float = inf) -> list[tuple[int, Holder]]:
        """Return who holds a lock, each after its session's number; empty if there is no table (`key` is None)."""
        if key is None:
            return []
        parameters = self._locking.holder_parameters(key)
        try:
            result = await self._database.run(self._locking.find_holder, parameters, again=True, answer_by=answer_by)
        except MissingTable:
            return []
        found = []
        for pid, owner, token, metadata, waiters, shared in result.rows:
            # Without an owner it is a client of another kind, or one that was granted the lock in this moment.
            name = f"session {pid}" if owner is None else owner.decode() if isinstance(owner, bytes) else owner
            mode: Mode = "shared" if shared else "exclusive"
            told = decode_metadata(metadata)
            found.append((pid, Holder(name, token, None, told, waiters, mode, since=granted_at(token))))
        return found

    async def make_tables(self, error: BaseException | None, answer_by: float) -> None:
        """Make the tables."""
        tables = self._locking.tables
        if not self._auto_create:
            names = " and ".join(table.fullname for table in tables)
            message = (
                f"{self._database.url} lacks one of the tables {names}. Create them with lockkit migrate, or keep "
                "auto_create on"
            )
            raise ConfigurationError(message, backend=self._database.url) from error
        await create(self._database, tables, answer_by)
