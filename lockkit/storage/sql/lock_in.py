"""
Locks inside an application's transaction: see `lockkit.sql.lock_in`.

Each name has a row. The transaction that has changed the row and has not committed yet holds the lock: the database
makes other transactions wait, in its own queue, and releases the row when the transaction ends, however it ends. The
row stores the last token and its `owner`, a random id of the transaction that got it: a transaction that asks twice
keeps its token.

Why a *changed* row and not an advisory lock, or a row that is only locked: a transaction at REPEATABLE READ reads the
database as of its first statement, which is often before the lock was granted. It would not see what the last holder
wrote, and sell the same thing again. Only a row that has changed since then reveals this, so lockkit can refuse such a
transaction.

Tokens are drawn after the row is locked, so for each name they follow the order of grants, and from a source that no
rollback resets. But neither PostgreSQL nor InnoDB promises that a number drawn by a transaction which did not commit
stays drawn when the server *crashes* (PostgreSQL manual, "Sequence Manipulation Functions"). So after each start of the
server, after a PostgreSQL replica was promoted, and from PostgreSQL 15 on after one process of the server has crashed,
the first transaction raises the numbers to the time of day in microseconds; they grow by less than one each
microsecond.

===========  ============================================================  =========================================
PostgreSQL   ``INSERT … ON CONFLICT DO UPDATE``, one round trip            ``nextval`` of a sequence
MariaDB,     ``SELECT … FOR UPDATE`` of a row that a second connection     an AUTO_INCREMENT number
MySQL        has inserted and committed beforehand
SQLite       ``INSERT … ON CONFLICT DO UPDATE``: any write excludes all    the time of day, at least one more than the
             other writers                                                 last one committed
===========  ============================================================  =========================================
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Engine, TextClause, exc, text

from lockkit import validation
from lockkit.backends.sql.dialect import dialect_named
from lockkit.errors import ConfigurationError, LockTimeout
from lockkit.runtime import Runtime, wall_clock
from lockkit.storage.retry import pause_until
from lockkit.storage.sql.client import (
    ApplicationTransaction,
    StartAgain,
    kind_of,
    label_of,
    spare,
    stale_snapshot,
    transaction_of,
    translating,
)
from lockkit.storage.sql.schema import (
    ADVISORY_KEY,
    KEYS,
    Family,
    ensure,
    family_of,
    forget_if_missing,
    key_of,
    make_here,
    quoted,
)
from lockkit.units import Seconds

_PAUSE_MIN, _PAUSE_MAX = 0.005, 0.05
"""Pause between two tries, seconds, where the database cannot wait for less than a second."""

_SQLITE_WAIT_MAX = 0.25
"""Longest single wait of SQLite, seconds: its thread goes on for this long after the waiting task was cancelled."""

_KNOWN_ROWS_MAX = 10_000
"""Names whose row is known to exist, for each engine. More takes memory, fewer asks again (MariaDB, MySQL)."""

Statements = Mapping[str, TextClause]
"""SQL statements by what they do."""


async def acquire(
    transaction: ApplicationTransaction, name: object, timeout: object, *, table: str, auto_create: bool
) -> tuple[str, str, int]:
    """
    Lock a name inside a transaction; see `lockkit.sql.lock_in`.

    Returns:
        Name, owner and token.
    """
    checked = validation.lock_name(name)
    seconds = validation.timeout(timeout, name=checked)
    runtime = transaction.runtime
    until = None if seconds is None else runtime.now() + seconds
    locker: _Locker | None = None

    def attempt(connection: Connection) -> tuple[int | None, str, str]:
        nonlocal locker
        if locker is None:
            family = family_of(connection.dialect)
            locker = _LOCKERS[family](runtime, checked, quoted(family, table), table, auto_create=auto_create)
        wait = None if until is None else max(0.0, until - runtime.now())
        with translating(connection, checked):
            try:
                token = locker.attempt(connection, wait)
            except exc.DBAPIError as error:
                forget_if_missing(connection, table, error)
                raise
        return token, locker.owner, label_of(connection)

    while True:
        token, owner, label = await transaction.run(attempt)
        if token is not None:
            return checked, owner, token
        if until is not None and runtime.now() >= until:
            message = (
                f"{checked!r} at {label} stayed busy for {seconds:g} s: another transaction holds it. This one is "
                "unchanged: end it, try again later, or give a longer timeout"
            )
            raise LockTimeout(message, name=checked, backend=label)
        await pause_until(runtime, runtime.random.uniform(_PAUSE_MIN, _PAUSE_MAX), until)


class _Locker(ABC):
    """Locks one name in one transaction, on one kind of database."""

    def __init__(self, runtime: Runtime, name: str, quoted_table: str, table: str, *, auto_create: bool) -> None:
        self._runtime = runtime
        self._name = name
        self._quoted = quoted_table
        self._table = table
        self._auto_create = auto_create
        self.owner = ""

    @abstractmethod
    def attempt(self, connection: Connection, wait: Seconds | None) -> int | None:
        """Lock the row, waiting for at most `wait` seconds (None: as long as the database does), and draw a token."""

    def _start_again(self, connection: Connection, message: str) -> StartAgain:
        return StartAgain(message, name=self._name, backend=label_of(connection))


@contextmanager
def _restoring(connection: Connection, restore: Callable[[], object]) -> Iterator[None]:
    """
    Set back what belongs to the application's connection, unless that was lost.

    Nor after a cancellation or Ctrl-C: SQLAlchemy then closes the connection, and another statement could hide it.
    """
    try:
        yield
    except Exception:
        if not connection.invalidated:
            restore()
        raise
    restore()


class _Postgres(_Locker):
    """PostgreSQL: one statement locks and draws."""

    def attempt(self, connection: Connection, wait: Seconds | None) -> int | None:
        if self._auto_create:
            ensure(connection, "locks", self._table)
        version = connection.dialect.server_version_info or ()
        sql = _postgres(self._quoted, quoted("postgresql", self._table, "_token"), version >= _RESETS_SINCE)
        self.owner = transaction_of(connection, self._runtime)
        given = {"name": key_of("postgresql", self._name), "owner": self.owner}
        if wait is None:
            row = connection.execute(sql["lock"], given).one()
        elif connection.execute(sql["try"], given).first() is not None:
            row = connection.execute(sql["lock"], given).one()  # does not wait: this transaction has the row
        else:
            found = self._wait(connection, sql, given, wait)
            if found is None:
                return None
            row = found
        token, started_us = row
        if token < started_us:
            token = self._draw(connection, sql, given, started_us)
        return int(token)

    def _wait(self, connection: Connection, sql: Statements, given: dict[str, str], wait: Seconds) -> Any:  # noqa: ANN401 - a row
        """
        Wait in the database's queue, under a savepoint: without one, an error would end the whole transaction.

        PostgreSQL counts `lock_timeout` from the moment at which a statement begins to wait, so even 1 ms is enough to
        get a row that is free.
        """
        before = connection.execute(text("SELECT current_setting('lock_timeout')")).scalar_one()
        connection.execute(text("SAVEPOINT lockkit"))
        try:
            # After the savepoint, so that rolling back to it undoes this, too.
            connection.execute(sql["limit"], {"limit": f"{max(1, int(-(wait * 1000) // -1))}ms"})
            row = connection.execute(sql["lock"], given).one()
        except exc.DBAPIError as error:
            if kind_of(error) != "locked":
                raise
            _roll_back_to_savepoint(connection)
            return None
        connection.execute(sql["limit"], {"limit": before})
        connection.execute(text("RELEASE SAVEPOINT lockkit"))
        return row

    def _draw(self, connection: Connection, sql: Statements, given: dict[str, str], started_us: int) -> int:
        """Draw a number for a locked row that is new, or that gets its first token since the server's start."""
        token: int = connection.execute(sql["draw"], given).scalar_one()
        if token < started_us:
            # setval could lower what others have drawn, so only one transaction at a time calls it, and only while the
            # number is too low. The rollback ends the advisory lock, but does not undo setval (manual, 9.17).
            connection.execute(text("SAVEPOINT lockkit"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_KEY})
            connection.execute(sql["raise"], {"started_us": started_us})
            _roll_back_to_savepoint(connection)
            token = connection.execute(sql["draw"], given).scalar_one()
        return token


def _roll_back_to_savepoint(connection: Connection) -> None:
    connection.execute(text("ROLLBACK TO SAVEPOINT lockkit"))
    connection.execute(text("RELEASE SAVEPOINT lockkit"))


_RESETS_SINCE = (15,)
"""The version of PostgreSQL since which its statistics tell the time of the last crash in about 1 µs. Before, they are
read from a file, which is written anew for that: many ms."""


@lru_cache(maxsize=64)
def _postgres(table: str, tokens: str, resets: bool) -> Statements:  # noqa: FBT001 - by position, for the cache
    number = f"'{tokens}'::regclass"
    # The second: when a replica received the last transaction of its primary. Numbers drawn after that are lost.
    # The third: a process that crashes has the others recover, without a new start; that resets the statistics.
    reset = ", pg_stat_get_bgwriter_stat_reset_time()" * resets
    began = f"greatest(pg_postmaster_start_time(), pg_last_xact_replay_timestamp(){reset})"
    started_us = f"(extract(epoch FROM {began}) * 1000000)::bigint"
    now = dialect_named("postgresql").now_us
    name = KEYS["postgresql"].format("name")
    statements = {
        "try": f"SELECT 1 FROM {table} WHERE name = {name} FOR UPDATE SKIP LOCKED",
        # PostgreSQL computes what ON CONFLICT sets after it has locked the row, but the values of a new row before: so
        # a new row gets 0 first, and then a number from `draw`.
        "lock": (
            f"INSERT INTO {table} AS held (name, owner, token) VALUES ({name}, :owner, 0) ON CONFLICT (name) DO UPDATE "
            f"SET owner = excluded.owner, token = CASE WHEN held.owner = excluded.owner THEN held.token "
            f"ELSE nextval({number}) END RETURNING token, {started_us}"
        ),
        "draw": f"UPDATE {table} SET token = nextval({number}) WHERE name = {name} RETURNING token",
        # A replica's clock may be behind the clock of the primary that it followed.
        "raise": f"SELECT setval({number}, greatest({now}, :started_us)) FROM {tokens} WHERE last_value < :started_us",
        "limit": "SELECT set_config('lock_timeout', :limit, true)",
    }
    return {key: text(statement) for key, statement in statements.items()}


class _InnoDB(_Locker):
    """
    MariaDB and MySQL.

    The row is inserted and committed beforehand: if several transactions wait for a row whose insertion is then rolled
    back, InnoDB gives all of them a lock on the gap, and ends all but one with a deadlock. And a search for a missing
    row would itself lock the gap, so lockkit remembers which names have a row.
    """

    def attempt(self, connection: Connection, wait: Seconds | None) -> int | None:
        if connection.get_transaction() in _rolled_back:
            label = label_of(connection)
            message = f"{label} has aborted this transaction after an earlier error: roll it back first"
            raise ConfigurationError(message, name=self._name, backend=label)
        try:
            return self._attempt(connection, wait)
        except exc.DBAPIError as error:
            transaction = connection.get_transaction()
            if kind_of(error) == "deadlock" and transaction is not None:
                # The server has undone the application's work. PostgreSQL would refuse the next statement; InnoDB
                # silently begins another transaction.
                _rolled_back.add(transaction)
            if kind_of(error) == "no table":
                _known_rows.get(connection.engine, {}).pop(self._table, None)
            raise

    def _attempt(self, connection: Connection, wait: Seconds | None) -> int | None:
        if self._auto_create:
            ensure(connection, "locks", self._table)
        sql = _innodb(self._quoted, quoted("mysql", self._table, "_token"))
        given = {"name": key_of("mysql", self._name)}
        self._insert_row(connection, sql, given)
        self.owner = transaction_of(connection, self._runtime)
        row = self._lock(connection, sql, given, wait)
        if row is None:
            return None
        owner, token = row
        if owner == self.owner:
            return int(token)
        # This reads the transaction's snapshot, not the locked row. It makes the snapshot if there is none yet.
        seen = connection.execute(sql["read"], given).scalar()
        if (seen or 0) != token:
            detail = f"it sees token {seen}, the last one is {token}"
            raise self._start_again(connection, stale_snapshot(label_of(connection), self._name, detail))
        token = self._draw(connection, sql, token)
        connection.execute(sql["keep"], {**given, "owner": self.owner, "token": token})
        return token

    def _insert_row(self, connection: Connection, sql: Statements, given: dict[str, Any]) -> None:
        known = _known_rows.setdefault(connection.engine, {}).setdefault(self._table, {})
        if self._name in known:
            return
        with spare(connection.engine) as own:
            # Looked for first: an INSERT would wait for the holder of the lock. So would a SELECT at SERIALIZABLE, but
            # not in autocommit.
            own.execution_options(isolation_level="AUTOCOMMIT")
            if own.execute(sql["read"], given).first() is None:
                own.execute(sql["insert"], given)
        while len(known) >= _KNOWN_ROWS_MAX:
            known.pop(next(iter(tuple(known)), ""), None)  # a copy: threads add others meanwhile
        known[self._name] = None

    def _lock(self, connection: Connection, sql: Statements, given: dict[str, Any], wait: Seconds | None) -> Any:  # noqa: ANN401 - a row
        """
        Wait in the database's queue, which counts whole seconds; for less than one, the caller polls.

        A lock wait that times out ends the statement, but the transaction goes on, unless the server is configured
        otherwise (see `_refuse_rollback_on_timeout`).
        """
        try:
            if wait is None:
                return self._found(connection, sql["lock"], given)
            return self._found(connection, sql["try"], given)
        except exc.DBAPIError as error:
            if kind_of(error) != "locked":
                raise
            self._refuse_rollback_on_timeout(connection, error)
        if wait is None or wait < 1:
            return None
        before = connection.execute(text("SELECT @@innodb_lock_wait_timeout")).scalar_one()
        try:
            with _restoring(connection, lambda: connection.execute(sql["limit"], {"limit": before})):
                connection.execute(sql["limit"], {"limit": int(wait)})
                return self._found(connection, sql["lock"], given)
        except exc.DBAPIError as error:
            if kind_of(error) != "locked":
                raise
            return None

    def _found(self, connection: Connection, statement: TextClause, given: dict[str, Any]) -> Any:  # noqa: ANN401 - a row
        row = connection.execute(statement, given).first()
        if row is None:
            _known_rows.get(connection.engine, {}).get(self._table, {}).pop(self._name, None)
            message = (
                f"the row of {self._name!r} at {label_of(connection)} was removed meanwhile: roll back and run the "
                "transaction again"
            )
            raise self._start_again(connection, message)
        return row

    def _refuse_rollback_on_timeout(self, connection: Connection, error: BaseException) -> None:
        """With this setting the server has rolled back the transaction, and the application's work with it."""
        if connection.execute(text("SELECT @@innodb_rollback_on_timeout")).scalar_one():
            message = (
                f"{self._name!r} at {label_of(connection)} stayed busy, and the server has rolled back this "
                "transaction (innodb_rollback_on_timeout): roll back and run it again"
            )
            raise self._start_again(connection, message) from error

    def _draw(self, connection: Connection, sql: Statements, last: int) -> int:
        """
        Draw a number above the `last` of the row, and leave no row behind.

        Inserting a higher number raises all later ones, and a lower one changes nothing. So every connection inserts
        the time of day at its first use: no connection outlives the server. If a number is not above what this
        connection has seen, the table was emptied (TRUNCATE restarts at 1) or created again: raised once more, numbers
        are above all that were ever drawn, also by transactions that were rolled back.
        """
        table, highest = connection.info.get(_RAISED, ("", 0))
        number = self._next(connection, sql) if table == self._table else 0
        if number <= max(highest, last):
            # The random rest keeps two connections from waiting for one another's row. It is below 1 ms, and no server
            # starts in less.
            rest = self._runtime.random.randrange(1_000)
            raised = connection.execute(sql["raise"], {"rest": rest, "last": last}).lastrowid
            connection.execute(sql["clean"], {"number": raised})
            number = self._next(connection, sql)
        connection.info[_RAISED] = (self._table, number)
        return number

    def _next(self, connection: Connection, sql: Statements) -> int:
        number: int = connection.execute(sql["draw"]).lastrowid
        connection.execute(sql["clean"], {"number": number})
        return number


# Transactions that the server has rolled back, but their applications have not.
_rolled_back: weakref.WeakSet[Any] = weakref.WeakSet()
_RAISED = "lockkit: tokens raised"
# Names that are known to have a row, by engine and table; the inner dict is an ordered set.
_known_rows: weakref.WeakKeyDictionary[Engine, dict[str, dict[str, None]]] = weakref.WeakKeyDictionary()


@lru_cache(maxsize=64)
def _innodb(table: str, tokens: str) -> Statements:
    name = KEYS["mysql"].format("name")
    lock = f"SELECT owner, token FROM {table} WHERE name = {name} FOR UPDATE"
    statements = {
        "insert": f"INSERT IGNORE INTO {table} (name, token) VALUES ({name}, 0)",
        "try": f"{lock} NOWAIT",
        "lock": lock,
        "read": f"SELECT token FROM {table} WHERE name = {name}",
        "keep": f"UPDATE {table} SET owner = :owner, token = :token WHERE name = {name}",
        # In microseconds: a server may crash and restart within the second in which the last number was drawn.
        "raise": f"INSERT IGNORE INTO {tokens} (id) VALUES (GREATEST({dialect_named('mysql').now_us}, :last) + :rest)",
        "draw": f"INSERT INTO {tokens} () VALUES ()",
        "clean": f"DELETE FROM {tokens} WHERE id = :number",
        "limit": "SET SESSION innodb_lock_wait_timeout = :limit",
    }
    return {key: text(statement) for key, statement in statements.items()}


class _SQLite(_Locker):
    """SQLite: a writer excludes all other writers, whatever the name, until its transaction ends."""

    def attempt(self, connection: Connection, wait: Seconds | None) -> int | None:
        was_idle = not _in_transaction(connection)
        started = self._runtime.now()
        limit = _SQLITE_WAIT_MAX if wait is None else min(wait, _SQLITE_WAIT_MAX)
        self.owner = transaction_of(connection, self._runtime)
        try:
            token = self._limited(connection, limit)
        except exc.DBAPIError as error:
            if kind_of(error) != "locked":
                raise
            if was_idle and _in_transaction(connection):
                connection.exec_driver_sql("ROLLBACK")  # undoes only the driver's BEGIN before this statement
            elif self._runtime.now() - started < limit * 0.9:
                # SQLite did not wait, because this transaction has read, and the writer waits for it to end (SQLite
                # manual, sqlite3_busy_handler).
                message = stale_snapshot(label_of(connection), self._name, str(error.orig))
                raise self._start_again(connection, message) from error
            return None
        return token

    def _limited(self, connection: Connection, limit: float) -> int:
        """Write, waiting for at most `limit` seconds."""
        before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
        with _restoring(connection, lambda: connection.exec_driver_sql(f"PRAGMA busy_timeout = {before}")):
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(-(limit * 1000) // -1)}")
            return self._lock(connection)

    def _lock(self, connection: Connection) -> int:
        sql = _sqlite(self._quoted)
        given = {"name": self._name}
        try:
            row = connection.execute(sql["lock"], given).one()
        except exc.DBAPIError as error:
            if kind_of(error) != "no table" or not self._auto_create:
                raise
            make_here(connection, "locks", self._table)
            row = connection.execute(sql["lock"], given).one()
        owner, token = row
        if owner != self.owner:
            # The time is read when no other transaction can write.
            token = max(token + 1, int(wall_clock() * 1_000_000))
            connection.execute(sql["keep"], {**given, "owner": self.owner, "token": token})
        return int(token)


def _in_transaction(connection: Connection) -> bool:
    """Ask the driver: an application may send BEGIN itself on a connection that SQLAlchemy has in autocommit."""
    driver: Any = connection.connection.driver_connection
    return bool(driver.in_transaction)


@lru_cache(maxsize=64)
def _sqlite(table: str) -> Statements:
    statements = {
        "lock": (
            f"INSERT INTO {table} AS held (name, token) VALUES (:name, 0) "
            "ON CONFLICT (name) DO UPDATE SET token = held.token RETURNING owner, token"
        ),
        "keep": f"UPDATE {table} SET owner = :owner, token = :token WHERE name = :name",
    }
    return {key: text(statement) for key, statement in statements.items()}


_LOCKERS: dict[Family, type[_Locker]] = {"postgresql": _Postgres, "mysql": _InnoDB, "sqlite": _SQLite}
