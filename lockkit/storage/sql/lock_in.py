"""
Locks inside an application's transaction: see `lockkit.sql.lock_in`.

A name has a row. Who has changed it and not committed holds the lock: the database keeps others waiting, in its own
queue, and ends it with the transaction, however that ends. The row holds the last token and its `owner`, a random id
of the transaction that it was granted to: a transaction that comes twice keeps its token.

Why a *changed* row and not an advisory lock, or a row that is only locked: a transaction at REPEATABLE READ reads the
database as of its first statement, often before the lock was granted. It would not see what the last holder wrote, and
sell the same thing again. That the row has changed since tells the two apart, so such a transaction is refused.

Tokens are drawn after the row is locked, so for a name they follow the order of grants, from what no rollback takes
back. Neither PostgreSQL nor InnoDB promises that a number drawn by a transaction which did not commit stays drawn when
the server *crashes* (PostgreSQL manual, "Sequence Manipulation Functions"). So after each start of the server, and
after a replica of PostgreSQL's was promoted, the first one raises the numbers to the time of day in microseconds; they
grow by less than one each microsecond.

===========  ============================================================  =========================================
PostgreSQL   ``INSERT … ON CONFLICT DO UPDATE``, one round trip            ``nextval`` of a sequence
MariaDB,     ``SELECT … FOR UPDATE`` of a row that was made and committed  an AUTO_INCREMENT number
MySQL        beforehand, on a connection of our own
SQLite       ``INSERT … ON CONFLICT DO UPDATE``: any write keeps every     the time of day, at least one more than the
             other writer out                                              last one committed
===========  ============================================================  =========================================
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, TextClause, exc, text

from lockkit import validation
from lockkit.backends.sql.dialect import dialect_named
from lockkit.errors import ConfigurationError, LockTimeout
from lockkit.runtime import wall_clock
from lockkit.storage.sql.client import (
    Place,
    Problem,
    StartAgain,
    label_of,
    problem_of,
    spare,
    stale_snapshot,
    transaction_of,
    translating,
)
from lockkit.storage.sql.schema import ADVISORY_KEY, KEYS, Family, ensure, family_of, key_of, make_here, quoted

if TYPE_CHECKING:
    from lockkit.runtime import Runtime

__all__ = ["acquire"]

_PAUSE_MIN, _PAUSE_MAX = 0.005, 0.05
"""Seconds between two looks where the database cannot wait for less than a second."""

_SLICE = 0.25
"""Seconds that SQLite waits at a time: so long its thread goes on after the task that waits was cancelled."""

_BORN_MAX = 10_000
"""Names remembered for each engine to have a row. More takes memory, fewer asks again (MariaDB, MySQL)."""


async def acquire(
    place: Place, name: object, timeout: object, *, table: str, auto_create: bool
) -> tuple[str, str, int]:
    """
    Lock a name inside the transaction at `place`; see `lockkit.sql.lock_in`.

    Returns:
        Name, owner and token.
    """
    checked = validation.lock_name(name)
    limit = validation.timeout(timeout, name=checked)
    runtime = place.runtime
    until = None if limit is None else runtime.now() + limit
    attempts: _Attempts | None = None

    def attempt(connection: Connection) -> tuple[int | None, str, str]:
        nonlocal attempts
        if attempts is None:
            family = family_of(connection.dialect)
            attempts = _FAMILIES[family](runtime, checked, quoted(family, table), table, auto_create=auto_create)
        left = None if until is None else max(0.0, until - runtime.now())
        with translating(connection, checked):
            return attempts.attempt(connection, left), attempts.owner, label_of(connection)

    while True:
        token, owner, label = await place.run(attempt)
        if token is not None:
            return checked, owner, token
        now = runtime.now()
        if until is not None and now >= until:
            message = (
                f"{checked!r} at {label} stayed busy for {limit:g} s: somebody else's transaction holds it. This one "
                "is as it was before: end it, try later, or give a longer timeout"
            )
            raise LockTimeout(message, name=checked, backend=label)
        pause = runtime.random.uniform(_PAUSE_MIN, _PAUSE_MAX)
        await runtime.sleep(pause if until is None else min(pause, until - now))


class _Attempts(ABC):
    """What one call does on one kind of database."""

    def __init__(self, runtime: Runtime, name: str, quoted_table: str, table: str, *, auto_create: bool) -> None:
        self._runtime = runtime
        self._name = name
        self._quoted = quoted_table
        self._table = table
        self._auto_create = auto_create
        self.owner = ""

    @abstractmethod
    def attempt(self, connection: Connection, left: float | None) -> int | None:
        """
        Lock the row, waiting for at most `left` seconds (None: as long as the database does); draw a token.

        Returns:
            The token; None if the row is busy, with the transaction as it was before.
        """


class _Postgres(_Attempts):
    """PostgreSQL: one statement locks and draws."""

    def attempt(self, connection: Connection, left: float | None) -> int | None:
        if self._auto_create:
            ensure(connection, "locks", self._table)
        sql = _postgres(self._quoted, quoted("postgresql", self._table, "_token"))
        self.owner = transaction_of(connection, self._runtime)
        given = {"name": key_of("postgresql", self._name), "owner": self.owner}
        if left is None:
            row = connection.execute(sql["lock"], given).one()
        elif connection.execute(sql["try"], given).first() is not None:
            row = connection.execute(sql["lock"], given).one()  # does not wait: the row is ours
        else:
            found = self._wait(connection, sql, given, left)
            if found is None:
                return None
            row = found
        token, started = row
        if token < started:
            token = self._draw(connection, sql, given, started)
        return int(token)

    def _wait(self, connection: Connection, sql: dict[str, TextClause], given: dict[str, str], left: float) -> Any:  # noqa: ANN401 - a row
        """
        Wait in the database's queue, under a savepoint: an error would end the whole transaction.

        Its `lock_timeout` counts from the moment in which a statement begins to wait, so 1 ms is no race where nobody
        holds the row.
        """
        before = connection.execute(text("SELECT current_setting('lock_timeout')")).scalar_one()
        connection.execute(text("SAVEPOINT lockkit"))
        try:
            # After the savepoint, so that going back to it undoes this, too.
            connection.execute(sql["limit"], {"limit": f"{max(1, int(-(left * 1000) // -1))}ms"})
            row = connection.execute(sql["lock"], given).one()
        except exc.DBAPIError as error:
            if problem_of(error) is not Problem.BUSY:
                raise
            connection.execute(text("ROLLBACK TO SAVEPOINT lockkit"))
            connection.execute(text("RELEASE SAVEPOINT lockkit"))
            return None
        connection.execute(sql["limit"], {"limit": before})
        connection.execute(text("RELEASE SAVEPOINT lockkit"))
        return row

    def _draw(self, connection: Connection, sql: dict[str, TextClause], given: dict[str, str], started: int) -> int:
        """Draw a number for a row that is locked: a new one, or after the server's start the first."""
        token: int = connection.execute(sql["draw"], given).scalar_one()
        if token < started:
            # setval can set back what others have drawn, so one does it at a time, and only while it is too low. The
            # advisory lock goes with the savepoint; setval stays, it is not undone (manual, 9.17).
            connection.execute(text("SAVEPOINT lockkit"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_KEY})
            connection.execute(sql["raise"], {"started": started})
            connection.execute(text("ROLLBACK TO SAVEPOINT lockkit"))
            connection.execute(text("RELEASE SAVEPOINT lockkit"))
            token = connection.execute(sql["draw"], given).scalar_one()
        return token


@lru_cache(maxsize=64)
def _postgres(table: str, tokens: str) -> dict[str, TextClause]:
    number = f"'{tokens}'::regclass"
    # The second is when the last transaction came that a replica got from its primary: numbers drawn after it are lost.
    began = "greatest(pg_postmaster_start_time(), pg_last_xact_replay_timestamp())"
    started = f"(extract(epoch FROM {began}) * 1000000)::bigint"
    now = dialect_named("postgresql").now_us
    name = KEYS["postgresql"].format("name")
    statements = {
        "try": f"SELECT 1 FROM {table} WHERE name = {name} FOR UPDATE SKIP LOCKED",
        # What ON CONFLICT sets is computed after the row is locked, the values of a new row before: so those get 0,
        # and a number from `draw`.
        "lock": (
            f"INSERT INTO {table} AS held (name, owner, token) VALUES ({name}, :owner, 0) ON CONFLICT (name) DO UPDATE "
            f"SET owner = excluded.owner, token = CASE WHEN held.owner = excluded.owner THEN held.token "
            f"ELSE nextval({number}) END RETURNING token, {started}"
        ),
        "draw": f"UPDATE {table} SET token = nextval({number}) WHERE name = {name} RETURNING token",
        # A replica's own clock may be behind that of the primary that it followed.
        "raise": f"SELECT setval({number}, greatest({now}, :started)) FROM {tokens} WHERE last_value < :started",
        "limit": "SELECT set_config('lock_timeout', :limit, true)",
    }
    return {key: text(statement) for key, statement in statements.items()}


class _InnoDB(_Attempts):
    """
    MariaDB and MySQL.

    The row is made and committed beforehand: where several wait for a row whose insertion is then rolled back, InnoDB
    gives all of them a lock on the gap, and ends all but one for a deadlock. And a search for a row that is not there
    would itself lock the gap, so names that have a row are remembered.
    """

    def attempt(self, connection: Connection, left: float | None) -> int | None:
        if connection.get_transaction() in _given_up:
            label = label_of(connection)
            message = f"{label} has given up this transaction after an earlier error: roll it back first"
            raise ConfigurationError(message, name=self._name, backend=label)
        try:
            return self._attempt(connection, left)
        except exc.DBAPIError as error:
            transaction = connection.get_transaction()
            if problem_of(error) is Problem.DEADLOCK and transaction is not None:
                # What the application has done in it is undone. PostgreSQL refuses what comes next; InnoDB would begin
                # another transaction without a word.
                _given_up.add(transaction)
            raise

    def _attempt(self, connection: Connection, left: float | None) -> int | None:
        if self._auto_create:
            ensure(connection, "locks", self._table)
        sql = _innodb(self._quoted, quoted("mysql", self._table, "_token"))
        given = {"name": key_of("mysql", self._name)}
        self._bear(connection, sql, given)
        self.owner = transaction_of(connection, self._runtime)
        row = self._lock(connection, sql, given, left)
        if row is None:
            return None
        owner, token = row
        if owner == self.owner:
            return int(token)
        # Not what was locked, but what this transaction reads. It makes the snapshot, if there is none yet.
        seen = connection.execute(sql["read"], given).scalar()
        if (seen or 0) != token:
            label = label_of(connection)
            message = stale_snapshot(label, self._name, f"it sees token {seen}, the last one is {token}")
            raise StartAgain(message, name=self._name, backend=label)
        token = self._draw(connection, sql, token)
        connection.execute(sql["keep"], {**given, "owner": self.owner, "token": token})
        return token

    def _bear(self, connection: Connection, sql: dict[str, TextClause], given: dict[str, Any]) -> None:
        born = _born.setdefault(connection.engine, {}).setdefault(self._table, {})
        if self._name in born:
            return
        with spare(connection.engine) as own:
            # Looked for first: an INSERT would wait for whoever holds the lock.
            if own.execute(sql["read"], given).first() is None:
                own.execute(sql["bear"], given)
            own.commit()
        while len(born) >= _BORN_MAX:
            born.pop(next(iter(born)), None)
        born[self._name] = None

    def _lock(
        self, connection: Connection, sql: dict[str, TextClause], given: dict[str, Any], left: float | None
    ) -> Any:  # noqa: ANN401 - a row
        """
        Wait in the database's queue, which counts whole seconds; for less the caller comes again.

        A lock wait that times out ends the statement, and unless the server was told otherwise the transaction goes on.
        """
        try:
            if left is None:
                return self._found(connection, sql["lock"], given)
            return self._found(connection, sql["try"], given)
        except exc.DBAPIError as error:
            if problem_of(error) is not Problem.BUSY:
                raise
            self._refuse_rollback_on_timeout(connection, error)
        if left is None or left < 1:
            return None
        before = connection.execute(text("SELECT @@innodb_lock_wait_timeout")).scalar_one()
        connection.execute(sql["limit"], {"limit": int(left)})
        row = None
        # No `finally`: after anything else the connection is of no use, and asking it would hide what happened.
        try:
            row = self._found(connection, sql["lock"], given)
        except exc.DBAPIError as error:
            if problem_of(error) is not Problem.BUSY:
                raise
        connection.execute(sql["limit"], {"limit": before})
        return row

    def _found(self, connection: Connection, statement: TextClause, given: dict[str, Any]) -> Any:  # noqa: ANN401 - a row
        row = connection.execute(statement, given).first()
        if row is None:
            label = label_of(connection)
            _born.get(connection.engine, {}).get(self._table, {}).pop(self._name, None)
            message = f"somebody has removed the row of {self._name!r} at {label}: roll back and run it again"
            raise StartAgain(message, name=self._name, backend=label)
        return row

    def _refuse_rollback_on_timeout(self, connection: Connection, error: BaseException) -> None:
        """With this setting the transaction is gone, and with it what the application has done in it."""
        if connection.execute(text("SELECT @@innodb_rollback_on_timeout")).scalar_one():
            label = label_of(connection)
            message = (
                f"{self._name!r} at {label} stayed busy, and the server has rolled back this transaction "
                "(innodb_rollback_on_timeout): roll back and run it again"
            )
            raise StartAgain(message, name=self._name, backend=label) from error

    def _draw(self, connection: Connection, sql: dict[str, TextClause], last: int) -> int:
        """
        Draw a number above the `last` of the row, and leave no row.

        A higher number that is inserted raises those to come, and a lower one changes nothing, so every connection does
        it at its first use: no connection outlives the server. A number that is not above what this connection has seen
        comes from a table that was emptied (TRUNCATE counts from 1 again) or made anew: raised again, numbers are above
        all that were ever drawn, also by transactions that were rolled back.
        """
        table, floor = connection.info.get(_RAISED, ("", 0))
        number = self._next(connection, sql) if table == self._table else 0
        if number <= max(floor, last):
            # The rest keeps two connections from waiting for one another's row. No server starts in less.
            rest = self._runtime.random.randrange(1_000)
            floor = connection.execute(sql["raise"], {"rest": rest, "last": last}).lastrowid
            connection.execute(sql["clean"], {"number": floor})
            number = self._next(connection, sql)
        connection.info[_RAISED] = (self._table, number)
        return number

    def _next(self, connection: Connection, sql: dict[str, TextClause]) -> int:
        number: int = connection.execute(sql["draw"]).lastrowid
        connection.execute(sql["clean"], {"number": number})
        return number


# Transactions that the server has rolled back, and their applications have not.
_given_up: weakref.WeakSet[Any] = weakref.WeakSet()
_RAISED = "lockkit: tokens raised"
# Names that have a row, by engine and table; a dict is an ordered set.
_born: weakref.WeakKeyDictionary[Engine, dict[str, dict[str, None]]] = weakref.WeakKeyDictionary()


@lru_cache(maxsize=64)
def _innodb(table: str, tokens: str) -> dict[str, TextClause]:
    name = KEYS["mysql"].format("name")
    lock = f"SELECT owner, token FROM {table} WHERE name = {name} FOR UPDATE"
    statements = {
        "bear": f"INSERT IGNORE INTO {table} (name, token) VALUES ({name}, 0)",
        "try": f"{lock} NOWAIT",
        "lock": lock,
        "read": f"SELECT token FROM {table} WHERE name = {name}",
        "keep": f"UPDATE {table} SET owner = :owner, token = :token WHERE name = {name}",
        # Microseconds: a server may crash and be back within the second in which the last number was drawn.
        "raise": f"INSERT IGNORE INTO {tokens} (id) VALUES (GREATEST({dialect_named('mysql').now_us}, :last) + :rest)",
        "draw": f"INSERT INTO {tokens} () VALUES ()",
        "clean": f"DELETE FROM {tokens} WHERE id = :number",
        "limit": "SET SESSION innodb_lock_wait_timeout = :limit",
    }
    return {key: text(statement) for key, statement in statements.items()}


class _SQLite(_Attempts):
    """SQLite: whoever writes keeps all other writers out, whatever the name, until the transaction ends."""

    def attempt(self, connection: Connection, left: float | None) -> int | None:
        began = not _in_transaction(connection)
        started = self._runtime.now()
        limit = _SLICE if left is None else min(left, _SLICE)
        self.owner = transaction_of(connection, self._runtime)
        try:
            token = self._limited(connection, limit)
        except exc.DBAPIError as error:
            if problem_of(error) is not Problem.BUSY:
                raise
            if began and _in_transaction(connection):
                connection.exec_driver_sql("ROLLBACK")  # of the driver's BEGIN before our statement, and nothing else
            elif self._runtime.now() - started < limit * 0.9:
                # Not waited for: this transaction has read, and who writes waits for it to end (SQLite manual,
                # sqlite3_busy_handler).
                label = label_of(connection)
                message = stale_snapshot(label, self._name, str(error.orig))
                raise StartAgain(message, name=self._name, backend=label) from error
            return None
        return token

    def _limited(self, connection: Connection, limit: float) -> int:
        """Write, waiting for at most `limit` seconds."""
        before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(-(limit * 1000) // -1)}")
        try:
            token = self._lock(connection)
        except exc.DBAPIError:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {before}")
            raise
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {before}")
        return token

    def _lock(self, connection: Connection) -> int:
        sql = _sqlite(self._quoted)
        given = {"name": self._name}
        try:
            row = connection.execute(sql["lock"], given).one()
        except exc.DBAPIError as error:
            if problem_of(error) is not Problem.MISSING or not self._auto_create:
                raise
            make_here(connection, "locks", self._table)
            row = connection.execute(sql["lock"], given).one()
        owner, token = row
        if owner != self.owner:
            # The time is read when nobody else can write any more.
            token = max(token + 1, int(wall_clock() * 1_000_000))
            connection.execute(sql["keep"], {**given, "owner": self.owner, "token": token})
        return int(token)


def _in_transaction(connection: Connection) -> bool:
    """Ask the driver: an application may send BEGIN itself, in what SQLAlchemy takes for autocommit."""
    driver: Any = connection.connection.driver_connection
    return bool(driver.in_transaction)


@lru_cache(maxsize=64)
def _sqlite(table: str) -> dict[str, TextClause]:
    statements = {
        "lock": (
            f"INSERT INTO {table} AS held (name, token) VALUES (:name, 0) "
            "ON CONFLICT (name) DO UPDATE SET token = held.token RETURNING owner, token"
        ),
        "keep": f"UPDATE {table} SET owner = :owner, token = :token WHERE name = :name",
    }
    return {key: text(statement) for key, statement in statements.items()}


_FAMILIES: dict[Family, type[_Attempts]] = {"postgresql": _Postgres, "mysql": _InnoDB, "sqlite": _SQLite}
