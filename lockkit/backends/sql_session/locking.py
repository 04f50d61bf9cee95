"""What the modes and databases differ in: how a session locks, renews, releases, is ended, and writes its lease."""

from __future__ import annotations

import hashlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import ClassVar

from lockkit.backend import Holder, Mode, Request, decode_metadata, granted_at
from lockkit.backends.sql.connection import Parameter, Result, Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.dialect import MissingTable
from lockkit.backends.sql.schema import Column, Table, create, row_key
from lockkit.backends.sql_session.session import Key, Session, Taken
from lockkit.errors import ConfigurationError, LockError, Unsupported
from lockkit.units import Seconds

log = logging.getLogger("lockkit")

DELETE_AFTER_US = 10_000_000
"""How old the lease of a reader must be before others delete it, µs. A reader may be writing a younger one anew just
now, on a session that had the lock before."""

_KEY = Column("name", "key", null=False)
"""The name of a lock, compared as bytes."""


def _lease_table(name: str) -> Table:
    """Describe the table that says who holds what, or held it last. Times are µs since 1970, database clock."""
    columns = (
        _KEY,
        Column("owner", "key", null=False),
        Column("token", "number", null=False),
        Column("granted_at_us", "number", null=False),
        # Of the holder: its transaction on PostgreSQL in mode=row, else its connection.
        Column("session", "number", null=False),
        Column("metadata", "text", null=False),
    )
    return Table(name, columns)


class Locking(ABC):
    """
    One mode of one database: its statements, and how they are used. Methods on a session raise the driver's errors.

    A *limit* is how long the server lets a session idle before it ends the session, in the server's unit.
    """

    units: ClassVar[int]
    """How many of the server's units are a second."""
    limit_max: ClassVar[int]
    """The longest limit that the server takes."""
    right_to_end: ClassVar[str]
    """What to do so that this login may end other sessions."""
    cancel: ClassVar[Statement]
    """Cancels the statement of a session ($1 its process id)."""
    end_session: ClassVar[Statement]
    """Ends a session ($1 its process id)."""
    rows_table: ClassVar[bool]
    """There is a table of rows that are locked, one for each name, beside that of the leases."""

    find_table: Statement
    """Finds which table ``table=`` means, as text that is the same however it was spelled; no row: there is none."""
    write_lease: Statement
    """Writes a lease ($1 name, $2 owner, $3 identity, $4 metadata, then `lease_parameters`), committed."""
    write_share: Statement
    """As `write_lease`, of a reader; only where there is a read side."""
    delete_shares: Statement
    """Deletes the leases of readers that have ended ($1 and $2: between which keys; then `share_parameters`)."""
    find_holder: Statement
    """Finds who holds a lock (`holder_parameters`): process id, owner, token, metadata, waiters, whether it reads; no
    row: free."""

    def __init__(self, database: Database, name: str, *, auto_create: bool) -> None:
        """Describe the tables, which ``lockkit migrate`` makes; `name` as in ``table=``. A subclass adds statements."""
        self.database = database
        self.tables: Sequence[Table] = [_lease_table(name)]
        if self.rows_table:
            self.tables = [Table(name, (_KEY,), busy=False), _lease_table(f"{name}_leases")]
        self.quoted = [table.quoted(database.dialect.name) for table in self.tables]
        self._auto_create = auto_create
        self._table = ""

    # -- of a session ----------------------------------------------------------------------------------------------

    @abstractmethod
    async def set_up(self, session: Session) -> None:
        """Set what holds for the life of a new session."""

    def limit(self, ttl: Seconds) -> int:
        """Return the limit for a ttl, rounded up."""
        # 0.1 * 3 is a little above 0.3: without the margin that would be a unit more.
        return min(self.limit_max, max(1, math.ceil(ttl * self.units - 1e-6)))

    def seconds(self, limit: int, ttl: Seconds) -> float:
        """Return for how long a session keeps its lock with this limit for a ttl, seconds."""
        del ttl
        return limit / self.units

    @abstractmethod
    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        """Lock if it is free. The session has no open transaction before."""

    @abstractmethod
    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        """
        Send the statement that waits for the lock, after an `attempt` that returned None.

        Before that, have the server end the session when it idles for half of `limit`: a waiter that is stopped, and
        is granted the lock then, holds up those behind it no longer than that.
        """

    async def blocks_others(self, session: Session, answer_by: float) -> bool:
        """Tell whether other work in the database cannot go on because this session waits for a lock."""
        del session, answer_by
        return False

    @abstractmethod
    async def waits(self, session: Session, key: Key, answer_by: float) -> bool:
        """Ask on another connection whether this session still waits, as far as the server tells."""

    @abstractmethod
    def granted(self, session: Session, result: Result) -> int | None:
        """Read the answer to `enqueue`: the holder's identity; None: not granted, begin anew."""

    async def prove(self, session: Session, key: Key, limit: int, request: Request, identity: int) -> Taken | None:
        """
        Have a session that was granted the lock in the queue answer once more; None: begin anew.

        If the lease is still to be written, the answer need not have been read: the lease is written on another
        connection meanwhile.
        """
        del key, request
        self.keep(session, limit)
        return (identity, None)

    @abstractmethod
    def keep(self, session: Session, limit: int) -> None:
        """Send a renewal: it starts the ttl anew."""

    async def downgrade(self, session: Session, key: Key, limit: int, owner: str) -> None:
        """Turn the write lock that is held into a read lock; starts the ttl anew. Called only if it can be done."""
        raise NotImplementedError

    @abstractmethod
    async def leave(self, session: Session) -> None:
        """Give up what the session holds, whatever that is."""

    @abstractmethod
    async def free(self, session: Session, key: Key) -> bool:
        """Release the lock that is held; False: it was not held."""

    @abstractmethod
    async def end_waiter(self, session: Session, key: Key, answer_by: float) -> None:
        """Have the server end a session whose connection is closed or lost, if it waits for the lock or has it."""

    async def end(self, pid: int, answer_by: float) -> None:
        """Have the server end a session."""
        try:
            await self.database.run(self.end_session, (pid,), again=True, answer_by=answer_by)
        except ConfigurationError as error:
            message = (
                f"could not end session {pid} at {self.database.url}, which holds the lock: {self.right_to_end}, or "
                "give the login that the holder uses"
            )
            raise Unsupported(message, backend=self.database.url) from error.__cause__
        except LockError as error:
            if error.__cause__ is None or self.database.kind(error.__cause__) != "no session":  # it ended by itself
                raise

    # -- keys ------------------------------------------------------------------------------------------------------

    async def key(self, run: Callable[[Statement], Awaitable[Result]], name: str) -> Key | None:
        """
        Return the key of a lock; None: its table is not there.

        Clients that name one table in two ways (``t``, ``public.t``) must have the same key, and those with different
        tables share no locks. The server is asked once.
        """
        if not self._table:
            rows = (await run(self.find_table)).rows
            table = rows[0][0] if rows else None
            if table is None:
                return None
            self._table = table.decode() if isinstance(table, bytes) else table
        digest = hashlib.sha256(f"{self._table}\0{name}".encode()).digest()
        # Of the number, mode=row takes other bits of the hash than mode=advisory, which may have a table of that name.
        bits = digest[16:24] if self.rows_table else digest[:8]
        text = f"lockkit:{digest[:24].hex()}"  # 56 characters: GET_LOCK takes 64
        return Key(row_key(name, self.database.dialect.name), int.from_bytes(bits, signed=True), text)

    @abstractmethod
    def shares_key(self, key: Key) -> str:
        """
        Return how the keys of the leases of a lock's readers begin; the number of the reader's session follows.

        They are in the table of leases, under keys that no lock can have. The row of the lock itself has the token
        that readers and writers count on.
        """

    def shares_range(self, key: Key) -> tuple[str, str]:
        """Return between which keys the leases of a lock's readers are."""
        first = self.shares_key(key)
        return first, f"{first}:"  # a colon follows the digits

    def share_parameters(self, key: Key) -> tuple[Parameter, ...]:
        """Return what `delete_shares` needs besides the range of keys."""
        del key
        return ()

    def lease_parameters(self, session: Session, key: Key) -> tuple[Parameter, ...]:
        """Return what `write_lease` needs besides the lease."""
        del session, key
        return ()

    @abstractmethod
    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        """Return what `find_holder` needs."""

    # -- leases ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def token(self, result: Result) -> int | None:
        """Read the answer to `write_lease`: the token; None: the session does not hold the lock."""

    async def write(self, request: Request, key: Key, session: Session, identity: int) -> int | None:
        """Write the lease; return its token, or None: the session does not hold the lock any more."""
        statement = self.write_share if key.shared else self.write_lease
        parameters = (key.name, request.owner, identity, request.metadata, *self.lease_parameters(session, key))
        try:
            result = await self.database.run(statement, parameters, again=True, answer_by=request.answer_by)
        except MissingTable as error:
            await self.make_tables(error, request.answer_by)
            result = await self.database.run(statement, parameters, again=True, answer_by=request.answer_by)
        return self.token(result)

    async def delete_former_shares(self, key: Key, answer_by: float) -> None:
        """Delete the leases of readers that have ended: a release leaves its own, so that it costs no write."""
        parameters = (*self.shares_range(key), *self.share_parameters(key))
        try:
            await self.database.run(self.delete_shares, parameters, again=True, answer_by=answer_by)
        except LockError as error:  # for want of the right, perhaps: they do no harm
            log.debug("deleting the leases of former readers at %s: %s", self.database.url, error)

    async def holders(self, key: Key | None, answer_by: float = inf) -> list[tuple[int, Holder]]:
        """Return who holds a lock, each after its session's number; empty if there is no table (`key` is None)."""
        if key is None:
            return []
        parameters = self.holder_parameters(key)
        try:
            result = await self.database.run(self.find_holder, parameters, again=True, answer_by=answer_by)
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
        if not self._auto_create:
            names = " and ".join(table.fullname for table in self.tables)
            message = (
                f"{self.database.url} lacks one of the tables {names}. Create them with lockkit migrate, or keep "
                "auto_create on"
            )
            raise ConfigurationError(message, backend=self.database.url) from error
        await create(self.database, self.tables, answer_by)
