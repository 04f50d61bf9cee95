"""What mode=row and mode=advisory have in common on MariaDB and MySQL."""

from __future__ import annotations

from math import inf

from lockkit.backends.sql.statement import Result, Statement
from lockkit.backends.sql_session.locking import Locking, whole_units
from lockkit.backends.sql_session.session import Key, Session
from lockkit.errors import ConfigurationError
from lockkit.units import Seconds

_LIMIT_SECONDS_MAX = 31_536_000
"""The longest limit that MariaDB and MySQL take, a year."""

_MYSQL_LOOK = Statement("SELECT CONNECTION_ID(), VERSION()")
# Not @@wsrep_on, which MySQL does not know.
_MYSQL_CLUSTER = Statement("SHOW VARIABLES LIKE 'wsrep_on'")
_MARIADB_NO_OTHER_LIMIT = Statement(
    "SET SESSION idle_transaction_timeout = 0, idle_readonly_transaction_timeout = 0,"
    " idle_write_transaction_timeout = 0, max_statement_time = 0"
)
_MYSQL_NO_OTHER_LIMIT = Statement("SET SESSION max_execution_time = 0")
_MYSQL_LIMIT = Statement("SET SESSION wait_timeout = $1")
_MYSQL_CANCEL = Statement("KILL QUERY $1")
_MYSQL_END = Statement("KILL $1")
# Not another session that has got the same number since, as after a restart of the server.
_MYSQL_SESSION = "SELECT id FROM information_schema.processlist WHERE id = $1 AND "
_MYSQL_WAITS = Statement(f"{_MYSQL_SESSION}INSTR(info, $2) > 0")
_MYSQL_WAITS_OR_HOLDS = Statement(f"{_MYSQL_SESSION}(INSTR(info, $2) > 0 OR IS_USED_LOCK($3) = id)")
MARK_CHARS = 40
"""How many characters of a lock's text all its user locks begin with: room for a session's number behind them."""
_REFUSED = 1
"""In place of a token: the session does not hold the lock. Tokens are times in µs, and far above."""


class MysqlLocking(Locking):
    """
    MariaDB and MySQL: ``wait_timeout`` ends a session that idles, whole seconds.

    It counts in a transaction, too. MariaDB has other limits that go before it there, and both have one that ends the
    statement of a waiter, which then queues anew: lockkit switches them off.

    Attributes:
        mariadb: The server is MariaDB, as the newest session found.
    """

    right_to_end = "KILL of another user's needs CONNECTION ADMIN (SUPER on older MariaDB) or CONNECTION_ADMIN"
    cancel = _MYSQL_CANCEL
    end_session = _MYSQL_END

    mariadb = False

    def _make_statements(self, *tables: str) -> None:
        del tables
        first = self.tables[0]
        database = f"'{first.schema}'" if first.schema else "DATABASE()"
        table = f"CONCAT({database}, '.{first.name}')"
        # Where the names of tables are files of a file system that knows no case, T and t are one table.
        self.find_table = Statement(f"SELECT IF(@@lower_case_table_names = 0, {table}, LOWER({table}))")

    async def set_up(self, session: Session) -> None:
        session.pid, version = (await session.run(_MYSQL_LOOK)).rows[0]
        self.mariadb = "MariaDB" in version
        if any(value == "ON" for _, value in (await session.run(_MYSQL_CLUSTER)).rows):
            # Each would grant a lock that another has granted. A clash is found when the leases are replicated, later.
            message = (
                f"{self.database.label} is a node of a Galera cluster, whose nodes do not know one another's row locks "
                "and user locks: use mode=table"
            )
            raise ConfigurationError(message, backend=self.database.url)
        await session.run(_MARIADB_NO_OTHER_LIMIT if self.mariadb else _MYSQL_NO_OTHER_LIMIT)

    def limit(self, ttl: Seconds) -> int:
        return whole_units(ttl, 1, _LIMIT_SECONDS_MAX)

    def seconds(self, limit: int, ttl: float) -> float:
        del ttl
        return float(limit)

    def kept_seconds(self, session: Session) -> float:
        # Well before, by another clock, and with the time that the first statement takes to get there.
        return 0.8 * session.limit if session.limit is not None else inf

    async def _limited(self, session: Session, limit: int) -> None:
        """See that the server ends this session when it has idled for so long."""
        if session.limit != limit:
            session.limit = None
            await session.run(_MYSQL_LIMIT, (limit,))
            session.limit = limit

    async def _waiter_limit(self, session: Session, limit: int) -> None:
        await self._limited(session, (limit + 1) // 2)

    def keep(self, session: Session, limit: int) -> None:
        session.limit = limit
        session.send(_MYSQL_LIMIT, (limit,))

    async def waits(self, session: Session, key: Key, answer_by: float) -> bool:
        parameters = (session.pid, key.text[:MARK_CHARS])
        return bool((await self.database.run(_MYSQL_WAITS, parameters, again=True, answer_by=answer_by)).rows)

    async def end_waiter(self, session: Session, key: Key, answer_by: float) -> None:
        parameters = (session.pid, key.text[:MARK_CHARS], self._mark(session, key))
        if (await self.database.run(_MYSQL_WAITS_OR_HOLDS, parameters, again=True, answer_by=answer_by)).rows:
            await self.end(session.pid, answer_by)

    def _mark(self, session: Session, key: Key) -> str:
        """Name the user lock that shows who has the lock."""
        del session
        return key.text

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
            frequent=True,
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
