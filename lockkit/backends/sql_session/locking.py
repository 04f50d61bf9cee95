"""What the modes and databases differ in: how a session locks, renews, releases, and is ended by the server."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from lockkit.backend import Request
from lockkit.backends.sql.database import Database
from lockkit.backends.sql.names import row_key
from lockkit.backends.sql.schema import Column, Table
from lockkit.backends.sql.statement import Parameter, Result, Statement
from lockkit.backends.sql_session.session import Key, Session, Taken
from lockkit.errors import ConfigurationError, LockError, Unsupported
from lockkit.units import Seconds

DELETE_AFTER_US = 10_000_000
"""How old the lease of a reader must be before others delete it, µs. A reader may be writing a younger one anew just
now, on a session that had the lock before."""

KEY = Column("name", "key", null=False)
"""The name of a lock, compared as bytes."""


def lease_table(name: str) -> Table:
    """Describe the table that says who holds what, or held it last. Times are µs since 1970, database clock."""
    columns = (
        KEY,
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
    One mode of one database: its statements, and how they are used. Methods raise the driver's errors.

    A *limit* is how long the server lets a session idle before it ends the session, in the server's unit.
    """

    right_to_end: ClassVar[str]
    """What to do so that this login may end other sessions."""

    tables: Sequence[Table]
    """The tables that it needs; ``lockkit migrate`` makes them."""
    write_lease: Statement
    """Writes a lease ($1 name, $2 owner, $3 identity, $4 metadata, then `lease_parameters`), committed."""
    write_share: Statement
    """As `write_lease`, of a reader; only where there is a read side."""
    delete_shares: Statement
    """Deletes the leases of readers that have ended ($1 and $2: between which keys; then `share_parameters`)."""
    find_holder: Statement
    """Finds who holds a lock (`holder_parameters`): process id, owner, token, metadata, waiters, whether it reads; no
    row: free."""
    cancel: Statement
    """Cancels the statement of a session ($1 its process id)."""
    end_session: Statement
    """Ends a session ($1 its process id)."""
    find_table: Statement
    """Finds which table ``table=`` means, as text that is the same however it was spelled; no row: there is none."""

    def __init__(self, database: Database, name: str) -> None:
        """Make the statements; `name` as in ``table=``."""
        self.database = database
        self.tables = self.describe(name)
        self._make_statements(*[table.quoted(database.dialect.name) for table in self.tables])

    @staticmethod
    @abstractmethod
    def describe(name: str) -> list[Table]:
        """Describe the tables; `name` as in ``table=``."""

    @abstractmethod
    def _make_statements(self, *tables: str) -> None:
        """Set the statements; the tables are as they stand in SQL."""

    def key(self, table: str, name: str) -> Key:
        """Make the key of a lock; `table` is what `find_table` said: clients with different tables share no locks."""
        digest = hashlib.sha256(f"{table}\0{name}".encode()).digest()
        text = f"lockkit:{digest[:24].hex()}"  # 56 characters: GET_LOCK takes 64
        return Key(row_key(name, self.database.dialect.name), int.from_bytes(digest[:8], signed=True), text)

    @abstractmethod
    async def set_up(self, session: Session) -> None:
        """Set what holds for the life of a new session."""

    @abstractmethod
    def limit(self, ttl: Seconds) -> int:
        """Return the limit for a ttl, rounded up."""

    @abstractmethod
    def seconds(self, limit: int, ttl: float) -> float:
        """Return for how long a session keeps its lock with this limit, seconds: at least the ttl asked for."""

    @abstractmethod
    def kept_seconds(self, session: Session) -> float:
        """Return for how long the server lets a session idle that holds nothing, seconds."""

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
        return Taken(identity)

    @abstractmethod
    def keep(self, session: Session, limit: int) -> None:
        """Send a renewal: it starts the ttl anew."""

    async def downgrade(self, session: Session, key: Key, limit: int, owner: str) -> None:
        """Turn the write lock that is held into a read lock; starts the ttl anew. Called only if it can be done."""
        raise NotImplementedError

    @abstractmethod
    async def leave(self, session: Session, key: Key) -> None:
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

    @abstractmethod
    def token(self, result: Result) -> int | None:
        """Read the answer to `write_lease`: the token; None: the session does not hold the lock."""

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

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        """Return what `find_holder` needs."""
        return (key.name,)


def whole_units(ttl: Seconds, unit_seconds: float, most: int) -> int:
    """Round a ttl up to whole units, at most `most` of them."""
    # 0.1 * 3 is a little above 0.3: without the margin that would be a unit more.
    return min(most, max(1, math.ceil(ttl / unit_seconds - 1e-6)))
