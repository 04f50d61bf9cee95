"""How mode=row and mode=advisory lock on MariaDB and MySQL; see `lockkit.backends.sql_session.row` and ``advisory``."""

from __future__ import annotations

from lockkit.backend import Request
from lockkit.backends.sql.connection import Parameter, Result, Statement
from lockkit.backends.sql.database import Database
from lockkit.backends.sql_session.locking import DELETE_AFTER_US, Locking
from lockkit.backends.sql_session.session import Key, Session, Taken
from lockkit.errors import ConfigurationError

_LOOK = Statement("SELECT CONNECTION_ID(), VERSION()")
# Not @@wsrep_on, which MySQL does not know.
_CLUSTER = Statement("SHOW VARIABLES LIKE 'wsrep_on'")
_MARIADB_NO_OTHER_LIMIT = Statement(
    "SET SESSION idle_transaction_timeout = 0, idle_readonly_transaction_timeout = 0,"
    " idle_write_transaction_timeout = 0, max_statement_time = 0"
)
_NO_OTHER_LIMIT = Statement("SET SESSION max_execution_time = 0")
_LIMIT = Statement("SET SESSION wait_timeout = $1")
_CANCEL = Statement("KILL QUERY $1")
_END = Statement("KILL $1")
# Not another session that has got the same number since, as after a restart of the server.
_OF_SESSION = "SELECT id FROM information_schema.processlist WHERE id = $1 AND "
_WAITS = Statement(f"{_OF_SESSION}INSTR(info, $2) > 0")
_WAITS_OR_HOLDS = Statement(f"{_OF_SESSION}(INSTR(info, $2) > 0 OR IS_USED_LOCK($3) = id)")
MARK_CHARS = 40
"""How many characters of a lock's text all its user locks begin with: room for a session's number behind them."""
_REFUSED = 1
"""In place of a token: the session does not hold the lock. Tokens are times in µs, and far above."""


class _MysqlLocking(Locking):
    """
    MariaDB and MySQL: ``wait_timeout`` ends a session that idles, whole seconds.

    It counts in a transaction, too. MariaDB has other limits that go before it there, and both have one that ends the
    statement of a waiter, which then queues anew: lockkit switches them off.
    """

    units = 1
    limit_max = 31_536_000  # a year
    right_to_end = "KILL of another user's needs CONNECTION ADMIN (SUPER on older MariaDB) or CONNECTION_ADMIN"
    cancel = _CANCEL
    end_session = _END

    mariadb = False  # the server is MariaDB, as the newest session found

    def __init__(self, database: Database, name: str, *, auto_create: bool) -> None:
        super().__init__(database, name, auto_create=auto_create)
        first = self.tables[0]
        schema = f"'{first.schema}'" if first.schema else "DATABASE()"
        table = f"CONCAT({schema}, '.{first.name}')"
        # Where the names of tables are files of a file system that knows no case, T and t are one table.
        self.find_table = Statement(f"SELECT IF(@@lower_case_table_names = 0, {table}, LOWER({table}))")

    async def set_up(self, session: Session) -> None:
        session.pid, version = (await session.run(_LOOK)).rows[0]
        self.mariadb = "MariaDB" in version
        if any(value == "ON" for _, value in (await session.run(_CLUSTER)).rows):
            # Each would grant a lock that another has granted. A clash is found when the leases are replicated, later.
            message = (
                f"{self.database.label} is a node of a Galera cluster, whose nodes do not know one another's row locks "
                "and user locks: use mode=table"
            )
            raise ConfigurationError(message, backend=self.database.url)
        await session.run(_MARIADB_NO_OTHER_LIMIT if self.mariadb else _NO_OTHER_LIMIT)

    async def _limited(self, session: Session, limit: int) -> None:
        """See that the server ends this session when it has idled for so long."""
        if session.limit != limit:
            session.limit = None
            await session.run(_LIMIT, (limit,))
            session.limit = limit

    def keep(self, session: Session, limit: int) -> None:
        session.limit = limit
        session.send(_LIMIT, (limit,))

    async def waits(self, session: Session, key: Key, answer_by: float) -> bool:
        parameters = (session.pid, key.text[:MARK_CHARS])
        return bool((await self.database.run(_WAITS, parameters, again=True, answer_by=answer_by)).rows)

    async def end_waiter(self, session: Session, key: Key, answer_by: float) -> None:
        parameters = (session.pid, key.text[:MARK_CHARS], self._mark(session, key))
        if (await self.database.run(_WAITS_OR_HOLDS, parameters, again=True, answer_by=answer_by)).rows:
            await self.end(session.pid, answer_by)

    def _mark(self, session: Session, key: Key) -> str:
        """Name the user lock that shows who has the lock; each reader has its own."""
        return f"{_shared_mark(key)}{session.pid}" if key.shared else key.text

    def token(self, result: Result) -> int | None:
        return None if result.last_id == _REFUSED else result.last_id

    def _writing(self, table: str, used: str) -> Statement:
        """
        Make `write_lease`: the lease, if `used` (an expression for the session that holds the lock) is $3.

        MariaDB and MySQL assign from left to right, so `owner = $2` says what `used` was, which is evaluated once.
        There is no RETURNING in MySQL: the token comes back as the last id.
        """
        now = self.database.dialect.now_us
        return Statement(
            f"INSERT INTO {table} (name, owner, token, granted_at_us, session, metadata)"
            f" VALUES ($1, $2, LAST_INSERT_ID({now}), {now}, $3, $4) ON DUPLICATE KEY UPDATE"
            f" owner = IF({used} = $3, $2, owner),"
            f" token = IF(owner = $2, LAST_INSERT_ID(GREATEST(token + 1, {now})),"
            f" token + 0 * LAST_INSERT_ID({_REFUSED})),"
            " granted_at_us = IF(owner = $2, VALUES(granted_at_us), granted_at_us),"
            " session = IF(owner = $2, $3, session), metadata = IF(owner = $2, $4, metadata)",
        )

    def shares_key(self, key: Key) -> str:
        return f"\0read\0{key.text}\0"

    def _counting(self, table: str, used: str) -> Statement:
        """
        Make `write_share`, for readers as `_writing` for writers: $6 is the key of the reader's lease.

        The row of the lock is written first, and so stays locked until the reader's has its token: that is one
        transaction for both.
        """
        now = self.database.dialect.now_us
        return Statement(
            f"INSERT INTO {table} (name, owner, token, granted_at_us, session, metadata)"
            f" VALUES ($1, '', LAST_INSERT_ID({now}), {now}, 0, ''), ($6, $2, LAST_INSERT_ID(), {now}, $3, $4)"
            " ON DUPLICATE KEY UPDATE token = IF(name = $6, LAST_INSERT_ID(), IF("
            f"{used} = $3, LAST_INSERT_ID(GREATEST(token + 1, {now})), token + 0 * LAST_INSERT_ID({_REFUSED}))),"
            f" granted_at_us = IF(LAST_INSERT_ID() = {_REFUSED}, granted_at_us, VALUES(granted_at_us)),"
            f" session = IF(LAST_INSERT_ID() = {_REFUSED}, session, VALUES(session)),"
            " owner = IF(name = $6, VALUES(owner), owner), metadata = IF(name = $6, VALUES(metadata), metadata)"
        )

    def _looking(self, table: str, used: str) -> Statement:
        """Make `find_holder`. MariaDB and MySQL show waiters to privileged users only."""
        return Statement(
            f"SELECT u.session, l.owner, l.token, l.metadata, NULL, 0 FROM (SELECT {used} AS session) u"
            f" LEFT JOIN {table} l ON l.name = $1 AND l.session = u.session WHERE u.session IS NOT NULL"
        )


def _shared_mark(key: Key) -> str:
    """Return how the user locks of readers begin; the number of the session follows. GET_LOCK takes 64 characters."""
    return f"{key.text[:MARK_CHARS]}:r"


# Three years, the longest wait that MariaDB takes since 10.6.3.
_SESSION = Statement("SET SESSION autocommit = 0, innodb_lock_wait_timeout = 100000000")
_ROLLBACK = Statement("ROLLBACK")
_COMMIT = Statement("COMMIT")
_UNMARK = Statement("DO RELEASE_ALL_LOCKS()")
# The mark first: the next holder has its own as soon as it has the row.
_MARIADB_COMMIT = Statement("BEGIN NOT ATOMIC DO RELEASE_ALL_LOCKS(); COMMIT; END")
_MARK_SECONDS = 2
"""How long a new holder waits for the mark of the former, whose session the server is just ending: it frees the row
first."""


class MysqlRowLocking(_MysqlLocking):
    """The holder locks the row of the lock in an open transaction, and has a user lock that says who it is."""

    rows_table = True

    def __init__(self, database: Database, name: str, *, auto_create: bool) -> None:
        super().__init__(database, name, auto_create=auto_create)
        rows, leases = self.quoted
        locking = f"SELECT GET_LOCK($2, {_MARK_SECONDS}) FROM {rows} WHERE name = $1 FOR UPDATE"
        # MariaDB has no FOR SHARE, and MySQL no NOWAIT with the older spelling.
        reading, sharing = (locking.replace("FOR UPDATE", words) for words in ("LOCK IN SHARE MODE", "FOR SHARE"))
        self._wait, self._wait_reading = Statement(locking), Statement(reading)
        self._try = Statement(f"{locking} NOWAIT")
        self._try_reading = {True: Statement(f"{reading} NOWAIT"), False: Statement(f"{sharing} NOWAIT")}
        self._insert = Statement(f"INSERT IGNORE INTO {rows} (name) VALUES ($1)")
        self.write_lease = self._writing(leases, "IS_USED_LOCK($5)")
        self.write_share = self._counting(leases, "IS_USED_LOCK($5)")
        self.find_holder = Statement(
            f"{self._looking(leases, 'IS_USED_LOCK($2)').text} UNION ALL"
            f" SELECT session, owner, token, metadata, NULL, 1 FROM {leases}"
            " WHERE name BETWEEN $3 AND $4 AND IS_USED_LOCK(CONCAT($5, session)) = session ORDER BY 3"
        )
        self.delete_shares = Statement(
            f"DELETE FROM {leases} WHERE name BETWEEN $1 AND $2"
            f" AND granted_at_us < {self.database.dialect.now_us} - {DELETE_AFTER_US}"
            " AND NOT (IS_USED_LOCK(CONCAT($3, session)) <=> session)"
        )

    def lease_parameters(self, session: Session, key: Key) -> tuple[Parameter, ...]:
        mark = self._mark(session, key)
        return (mark, f"{self.shares_key(key)}{session.pid}") if key.shared else (mark,)

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, key.text, *self.shares_range(key), _shared_mark(key))

    def share_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (_shared_mark(key),)

    async def set_up(self, session: Session) -> None:
        await super().set_up(session)
        # Without autocommit a transaction is open whenever a row is read: no statement of its own for that.
        await session.run(_SESSION)

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        await self._limited(session, limit)
        trying = self._try_reading[self.mariadb] if key.shared else self._try
        parameters = (key.name, self._mark(session, key))
        try:
            result = await session.run(trying, parameters)
            if not result.rows:
                # At REPEATABLE READ, which a binary log of statements needs, it has locked the gap where the row will
                # be, and the INSERT would wait for that.
                await session.run(_ROLLBACK)
                await self.database.run(self._insert, (key.name,), again=True, answer_by=request.answer_by)
                result = await session.run(trying, parameters)
        except self.database.driver_errors as error:
            if session.unanswered or self.database.kind(error) != "locked":
                raise
            return None
        identity = self.granted(session, result)
        return None if identity is None else (identity, None)

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        await self._limited(session, (limit + 1) // 2)
        session.send(self._wait_reading if key.shared else self._wait, (key.name, self._mark(session, key)))

    def granted(self, session: Session, result: Result) -> int | None:
        return session.pid if result.rows else None

    async def leave(self, session: Session) -> None:
        await session.run(_UNMARK)
        await session.run(_ROLLBACK)

    async def free(self, session: Session, key: Key) -> bool:
        del key
        if self.mariadb:
            await session.run(_MARIADB_COMMIT)
        else:  # MySQL has no blocks outside of stored programs
            await session.run(_UNMARK)
            await session.run(_COMMIT)
        return True


_WAIT_SECONDS = 31_536_000
"""How long a waiter stays in the queue before it joins it anew. Without a limit is not the same number everywhere."""

_LOCK = Statement("SELECT GET_LOCK($1, $2)")
# The session has no other lock, but this one perhaps twice.
_UNLOCK = Statement("SELECT RELEASE_ALL_LOCKS()")


class MysqlAdvisoryLocking(_MysqlLocking):
    """The holder has a user lock."""

    rows_table = False

    def __init__(self, database: Database, name: str, *, auto_create: bool) -> None:
        super().__init__(database, name, auto_create=auto_create)
        (leases,) = self.quoted
        now = database.dialect.now_us
        # The lease is committed in the statement that locks: one round trip.
        self._take = Statement(
            f"INSERT INTO {leases} (name, owner, token, granted_at_us, session, metadata)"
            f" SELECT $1, $2, LAST_INSERT_ID({now}), {now}, CONNECTION_ID(), $3 FROM DUAL WHERE GET_LOCK($4, 0) = 1"
            " ON DUPLICATE KEY UPDATE owner = VALUES(owner),"
            " token = LAST_INSERT_ID(GREATEST(token + 1, VALUES(token))), granted_at_us = VALUES(granted_at_us),"
            " session = VALUES(session), metadata = VALUES(metadata)",
        )
        self.find_holder = self._looking(leases, "IS_USED_LOCK($2)")

    def holder_parameters(self, key: Key) -> tuple[Parameter, ...]:
        return (key.name, key.text)

    async def attempt(self, session: Session, key: Key, limit: int, request: Request) -> Taken | None:
        await self._limited(session, limit)
        result = await session.run(self._take, (key.name, request.owner, request.metadata, key.text))
        # NULL of GET_LOCK (out of memory, or this connection is being ended) counts as busy: the queue decides.
        return (session.pid, result.last_id) if result.changed else None

    async def enqueue(self, session: Session, key: Key, limit: int) -> None:
        await self._limited(session, (limit + 1) // 2)
        session.send(_LOCK, (key.text, _WAIT_SECONDS))

    def granted(self, session: Session, result: Result) -> int | None:
        # 0: a year has passed. NULL: the statement was ended. In either case the lock is not granted.
        return session.pid if result.rows[0][0] == 1 else None

    async def prove(self, session: Session, key: Key, limit: int, request: Request, identity: int) -> Taken | None:
        del identity
        # It has the lock from the queue already: a session may have it twice.
        return await self.attempt(session, key, limit, request)

    async def leave(self, session: Session) -> None:
        await session.run(_UNLOCK)

    async def free(self, session: Session, key: Key) -> bool:
        del key
        return bool((await session.run(_UNLOCK)).rows[0][0])
